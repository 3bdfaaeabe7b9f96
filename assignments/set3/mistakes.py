"""Set 3: mistakes, as edits of our source. Each must fail some case of its part."""
SHARE, ADMIT, ROOM = (f"scheduler.py:Scheduler.{name}"
                      for name in ("share_budget", "admit", "grant_room"))
ADVANCE, RELEASE = "request.py:advance", "scheduler.py:Scheduler.release"
MISTAKES = {   # part: [(sentence, function, code as it stands, code of the mistake), ...]
    "a": [
        ("as if prompts came before decodes", SHARE, "return plan",
         "return sorted(plan, key=lambda pair: pair[0].todo == 1)"),
        ("as if decodes did not count towards the budget", SHARE, " - len(plan)", ""),
        ("as if one token more than the budget were allowed", SHARE, "- len(plan)",
         "- len(plan) + 1"),
        ("as if a prompt that does not fit as a whole had to wait", SHARE,
         "request.todo > 1 and budget > 0", "1 < request.todo <= budget"),
        ("as if a step had only one chunk", SHARE, "budget -= n", "budget = 0"),
        ("as if a request without a generated token were never a decode", SHARE,
         "if request.todo == 1]", "if request.todo == 1 and request.generated]"),
        ("as if chunks did not use up the budget", SHARE, "budget -= n", "pass")],
    "b": [
        ("as if the budget did not limit admission", ADMIT, " and todo < self.token_budget", ""),
        ("as if a sum of todo that equals the budget were below it", ADMIT,
         "todo < self.token_budget", "todo <= self.token_budget"),
        ("as if the todo of those just admitted did not count", ADMIT,
         "todo += self.running[-1].todo", "pass"),
        ("as if one request more than max_batch might run", ADMIT, "< self.max_batch",
         "<= self.max_batch"),
        ("as if one request were admitted in a step", ADMIT, "todo += self.running[-1].todo",
         "break"),
        ("as if requests were admitted before they arrive", ADMIT, "self.arrived(step)",
         "self.waiting"),
        ("as if a prompt had to fit into what is left of the budget", ADMIT,
         "not self.arrived(step) or", "not self.arrived(step) or "
         "todo + self.waiting[0].todo > self.token_budget or"),
        ("as if a later request might overtake the first", ADMIT, "",
         "self.waiting = deque(sorted(self.waiting, key=lambda r: r.arrival > step or r.kv_tokens "
         "+ sum(other.kv_tokens for other in self.running) > self.max_kv_tokens))"),
        ("as if an exact fit were no room", ROOM, "> self.max_kv_tokens", ">= self.max_kv_tokens"),
        ("as if only tokens computed so far were reserved", ROOM, "other.kv_tokens",
         "other.computed"),
        ("as if a request reserved its prompt only", ROOM, "reserved + request.kv_tokens",
         "reserved + len(request.prompt)"),
        ("as if nobody had reserved anything", ROOM, "reserved + request", "request"),
        ("as if a newcomer needed no cache", ROOM, "request.kv = KV(request.kv_tokens)", "pass"),
        ("as if a cache were given before it is known whether there is room", ROOM, "",
         "request.kv = KV(request.kv_tokens)")],
    "c": [
        ("as if completeness were judged after `computed` has changed", ADVANCE, "",
         "for request, n in plan:\n    request.computed += n\n"
         "plan = [(request, n - (n == 0)) for request, n in plan]\n"
         "sampled = [r for r, n in plan if n == r.todo]\n"
         "return [r.append(token) for r, token in zip(sampled, tokens)] and None"),
        ("as if every request of the plan got a token", ADVANCE,
         "[plan[i][0] for i in indices_due(plan)]", "[request for request, _ in plan][:len(tokens)]"),
        ("as if a request with n = 0 counted as one that computes", ADVANCE, "",
         "plan = [(request, n or 1) for request, n in plan]"),
        ("as if only those that get a token had computed something", ADVANCE,
         "request.computed += n", "request.computed += n * (request in sampled)"),
        ("as if the list of tokens might be emptied", ADVANCE, "zip(sampled, tokens, strict=True)",
         "[(r, tokens.pop(0)) for r in sampled]"),
        ("as if a token were added past `append`, which decides whether it is the last", ADVANCE,
         "request.append(token)", "request.generated.append(token)"),
        ("as if the list changed while one walks through it", RELEASE,
         "[request for request in self.running if request.finished]:",
         "self.running:\n            if not request.finished:\n                continue"),
        ("as if caches were not freed", RELEASE, "self.free(request)", "pass"),
        ("as if running requests were freed, too", RELEASE, "self.free(request)",
         "[self.free(each) for each in [*self.running, request]]"),
        ("as if finished requests kept their places", RELEASE, "self.running.remove(request)",
         "pass"),
        ("as if a request might end by its end of text only", RELEASE, "if request.finished",
         "if request.finish_reason == 'stop'")],
}
