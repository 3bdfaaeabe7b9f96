"""
Wrong solutions that test the grader, and the bugs that students have to expose.

Each mutant changes a line or two of the reference. The known bugs of batching code are among them.
A mutant must lose points in its own part. None is ever copied to students. (Right solutions that
must get full marks are in variants.py.)
"""
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))   # the repository's modules
from toolbox.traps import TRAPS  # noqa: E402 (the known bugs of batching code)


@dataclass
class Mutant:
    part: str     # that it belongs to, "4b"
    edits: list   # [(function, code as it stands, code of the mutant), ...]


HEAD, ALONE = "model.py:Head.forward", "generate_unbatched.py:Alone"
STATIC, APPEND = "generate_naive.py:StaticBatch.lay_out", "request.py:Request.append"
ADMIT, LEAVE = "generate_dynamic.py:admit", "generate_dynamic.py:leave"
SHARE, ENTER = "scheduler.py:Scheduler.share_budget", "scheduler.py:Scheduler.admit"
ROOM, RELEASE = "scheduler.py:Scheduler.grant_room", "scheduler.py:Scheduler.release"
ADVANCE, COMPLETE = "request.py:advance", "request.py:complete"
LAY, ATTEND = "generate_dynamic.py:Rectangle.lay_out", "generate_dynamic.py:Rectangle.attend"
FIT, PACK = "generate_prepacked.py:first_fit_decreasing", "generate_prepacked.py:Packed.lay_out"
FLAT, BLOCK = "generate_ragged.py:Flat.lay_out", "generate_ragged.py:Flat.block_diagonal"
VARLEN = "generate_ragged.py:Flat.attend"
HOLD, GIVE, EVICT = (f"paging.py:Pages.{name}" for name in ("hold", "give_back", "evict"))
FIND, PUBLISH = "paging.py:Pages.find", "paging.py:Pages.publish"
SLOTS, WRITE = "generate_paged.py:Paged.slots", "generate_paged.py:Paged.write"
PREEMPT, MISSING = "paging.py:PagedScheduler.preempt", "paging.py:PagedScheduler.missing"
PUT, READ = "cache.py:KV.write", "cache.py:KV.read"


def instead(attention, *lines):
    """An edit of Flat.attend: other code for one of its two ways, without its local variables."""
    write = "self.write(layer, k, v)"
    return VARLEN, write, "\n            ".join(
        [f"{write}\n        if self.attention == {attention!r}:", *lines])


# part: {mutant: its edits; None: the bug of this name in toolbox/traps.py}
WRONG = {
    "1a": {
        "causal rule from the top left": None,
        "no causal rule": [(HEAD, ".tril(diagonal=S - T)", "")],
        "scores that are not scaled": [(HEAD, " / math.sqrt(q.size(-1))", "")],
        "the mask replaces the causal rule": [(HEAD, "see = see & mask", "see = mask")],
        "NaN for a query without keys": None,
        "the square root of 5": [(HEAD, "math.sqrt(q.size(-1))", "5 ** 0.5")],
        "four axes": [(HEAD, "T, S = q.size(-2), k.size(-2)",
             "(_, _, T, _), S = q.shape, k.size(-2)")],
        "the queries are scaled in place": [
            (HEAD, "scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))",
             "q /= math.sqrt(q.size(-1))\n        scores = q @ k.transpose(-2, -1)")],
        "softmax over the queries": [(HEAD, "softmax(dim=-1)", "softmax(dim=-2)")],
        "attention in float32": [(HEAD, "weights @ v ",
             "(weights.float() @ v.float()).to(v.dtype) ")],
        "attention in float64": [(HEAD, "return out.masked_fill(",
             "return out.double().masked_fill(")],
        "the mask has one row": [(HEAD, "see = see & mask", "see = see & mask[..., :1, :]")]},
    "1b": {
        "keys written at the beginning": [(PUT, "all_k[..., start:end, :] = k",
             "all_k[..., :end - start, :] = k")],
        "values are not written": [(PUT, "all_v[..., start:end, :] = v", "pass")],
        "reads all of the cache": [
            (READ, "self.k[layer][..., :end, :], self.v[layer][..., :end, :]",
             "self.k[layer], self.v[layer]")],
        "a full cache is silent": [
            (PUT, 'raise ValueError(f"KV of {self.capacity} tokens cannot take tokens {start} '
             'to {end}")',
             "return")],
        "one buffer for all caches": [(PUT, "all_k, all_v = self.buffers(layer, k, v)",
             "self.k, self.v = KV.__dict__.get('all') or (self.k, self.v)\n        KV.all = "
             "self.k, self.v\n        all_k, all_v = self.buffers(layer, k, v)")],
        "half of a write": [(PUT, "if end > self.capacity:",
             "if end > self.capacity:\n            for buffer, new in zip(self.buffers(layer, "
             "k, v), (k, v)):\n                room = buffer[..., start:, :]\n                "
             "room[...] = new[..., :room.size(-2), :]")],
        "an exact fit is refused": [(PUT, "end > self.capacity", "end >= self.capacity")]},
    "1c": {
        "positions from 0": [(ALONE + ".lay_out", "range(self.start, self.end)\n",
             "range(self.end - self.start)\n")],
        "all tokens every time": [
            (ALONE + ".lay_out", "self.start, self.end = request.computed, request.computed + n",
             "self.start, self.end = 0, request.computed + n")],
        "no branch without a cache": [(ALONE + ".attend", "if self.kv is not None:", "if True:")]},
    "2a": {
        "static column positions": None,
        "right padding": None,
        "pads are seen": [(STATIC, "(columns >= self.pads[:, None])",
             "(columns >= 0 * self.pads[:, None])")],
        "finished rows get tokens": [(STATIC, "complete(self.plan)", "list(range(B))")],
        "sampled backwards": [(STATIC, "complete(self.plan)", "complete(self.plan)[::-1]")],
        "positions in int32": [(STATIC, "self.positions.clamp_(0, self.requests[0].block_size - 1)",
             "self.positions = self.positions.clamp(0, self.requests[0].block_size - 1).int()")]},
    "2b": {
        "one token too many": None,
        "end of text is overlooked": None,
        "no end at the context limit": None,
        "the length comes first": [(APPEND, "if token == self.eos_token:",
             "if token == self.eos_token and len(self.generated) < self.max_new_tokens:")],
        "the context limit comes early": [(APPEND, "self.computed == self.block_size",
             "self.computed + 1 == self.block_size")],
        "end of text is dropped": [(APPEND, "if token == self.eos_token:",
             "if token == self.eos_token:\n            self.generated.pop()")]},
    "2c": {
        "more requests than max_batch": [(ADMIT, "arrived[:max_batch - len(running)]",
             "arrived[:max_batch - len(running) + 1]")],
        "not yet arrived": [(ADMIT, "request.arrival <= step", "request.arrival <= step + 1")],
        "admitted twice": [(ADMIT, "waiting[len(admitted):]", "list(waiting)")],
        "caches are kept": [(LEAVE, "request.kv = None", "pass")],
        "cancelled requests go on": [(LEAVE, "unfinished(running)",
             "[r for r in running if not r.finished]")],
        "newcomers come first": [(ADMIT, "running + admitted", "admitted + running")],
        "max_batch newcomers": [(ADMIT, "max_batch - len(running)", "max_batch")]},
    "3a": {
        "prompts before decodes": None,
        "the budget is overdrawn": [(SHARE, "self.token_budget - len(plan)", "self.token_budget")],
        "one chunk a step": [(SHARE, "budget -= n", "budget = 0")],
        "whole prompts only": [(SHARE, "request.todo > 1 and budget > 0",
             "request.todo > 1 and (budget >= request.todo or budget == self.token_budget)")],
        "a decode by its answer": [(SHARE, "if request.todo == 1]", "if request.generated]")],
        "half a budget": [(SHARE, "min(request.todo, budget)",
             "min(request.todo, budget - 1) or budget")]},
    "3b": {
        "admits without room": [(ROOM, "reserved + request.kv_tokens",
             "reserved + len(request.prompt)")],
        "the second overtakes the first": [
            (ENTER, "if not self.arrived(step) or not self.grant_room(self.waiting[0]):",
             "fit = [r for r in self.waiting if r.arrival <= step and "
             "self.grant_room(r)]\n            if not fit:"),
            (ENTER, "self.running.append(self.waiting.popleft())",
             "self.running.append(fit[0])\n            self.waiting.remove(fit[0])")],
        "one place too many": [(ENTER, "len(self.running) < self.max_batch",
             "len(self.running) <= self.max_batch")],
        "admits beyond the budget": None,
        "prompts come before their arrival": [(ENTER, "self.arrived(step)",
             "self.arrived(step + 1)")],
        "admits at the whole budget": [(ENTER, "todo < self.token_budget",
             "todo <= self.token_budget")],
        "an exact fit finds no room": [(ROOM, "<= self.max_kv_tokens", "< self.max_kv_tokens")],
        "one newcomer a step": [(ENTER, "todo += self.running[-1].todo", "break")],
        "newcomers have nothing to do": [(ENTER, "todo += self.running[-1].todo", "pass")]},
    "3c": {
        "finished requests stay": [(RELEASE, "if request.finished", "if False")],
        "partial prefills get tokens": [(ADVANCE, "[plan[i][0] for i in complete(plan)]",
             "[request for request, _ in plan]")],
        "computed is not counted": [(ADVANCE, "request.computed += n",
             "request.computed += request.todo")],
        "caches are not freed": [(RELEASE, "self.free(request)", "pass")],
        "running requests are freed": [
            (RELEASE, "            self.running.remove(request)\n            self.free(request)",
             "            self.running.remove(request)\n        for request in [*self.running, "
             "request] if self.running else []:\n            self.free(request)")],
        "freed twice": [(RELEASE, "self.free(request)",
             "self.free(request)\n            self.free(request)")],
        "a list that changes on the way": [
            (RELEASE, "[request for request in self.running if request.finished]:",
             "self.running:\n            if not request.finished:\n                continue")],
        "nothing to compute is complete": [(ADVANCE, "[plan[i][0] for i in complete(plan)]",
             "[request for request, n in plan if n in (0, request.todo)]")],
        "a token before it is counted": [
            (ADVANCE, "        request.computed += n\n    for request, token in zip(sampled, "
             "tokens):\n        request.append(token)",
             "        pass\n    for request, token in zip(sampled, tokens):\n        "
             "request.append(token)\n    for request, n in plan:\n        request.computed += n")]},
    "4a": {
        "column positions": None,
        "tokens in int32": [(LAY, "self.P = P", "self.P, self.tokens = P, self.tokens.int()")],
        "the wrong tokens": [(LAY, "request.slice(start, start + n)", "request.slice(0, n)")]},
    "4b": {
        "published mask": None,
        "pads of the past are seen": None,
        "the past from the left": [(LAY, "mask[b, ..., P - start:P] = True",
             "mask[b, ..., :start] = True")],
        "no past": [(LAY, "mask[b, ..., P - start:P] = True", "pass")],
        "no causal rule in a chunk": None},
    "4c": {
        "pads written to the cache": None,
        "the past is aligned left": [
            (ATTEND, "past_k[b, :, P - start:], past_v[b, :, P - start:] = past",
             "past_k[b, :, :start], past_v[b, :, :start] = past")],
        "written at 0": [(ATTEND, "request.kv.write(layer, start, *new)",
             "request.kv.write(layer, 0, *new)")],
        "the past in float32": [(ATTEND, "t.new_zeros(*t.shape[:-2], P, t.size(-1))",
             "torch.zeros(*t.shape[:-2], P, t.size(-1))")]},
    "4d": {
        "samples from a partial prefill": None,
        "only decodes get a token": [(COMPLETE, "n == request.todo",
             "n == request.todo and request.generated")],
        "the first column": [(LAY, "device=device), -1)", "device=device), 0)")],
        "complete in another order": [(LAY, "complete(self.plan)", "complete(self.plan)[::-1]")],
        "a chunk of nothing is complete": [(COMPLETE, "if n == request.todo",
             "if n in (0, request.todo)")]},
    "5a": {
        "first fit without sorting": [
            (FIT, "sorted(range(len(lengths)), key=lambda i: -lengths[i])", "range(len(lengths))")],
        "last fit": [
            (FIT, "bins[fits[0]].append(i)", "bins[fits[-1]].append(i)"),
            (FIT, "room[fits[0]] -=", "room[fits[-1]] -=")],
        "best fit": [(FIT, "fits = [b for b in range(len(bins)) if lengths[i] <= room[b]]",
             "fits = sorted((b for b in range(len(bins)) if lengths[i] <= "
             "room[b]),\n                      key=lambda b: room[b])")],
        "rows are never full": [(FIT, "lengths[i] <= room[b]", "lengths[i] < room[b]")],
        "from the shortest": [(FIT, "-lengths[i])", "lengths[i])")]},
    "5b": {
        "neighbours in a packed row": None,
        "positions that run on in a packed row": None,
        "the last column of a packed row": [(PACK, "[end - 1 for end in ends]",
             "[m - 1 for end in ends]")],
        "caches in packed order": [
            (PACK, "self.tokens, self.positions = tokens.to(device), positions.to(device)",
             "self.places.sort()\n        self.tokens, self.positions = tokens.to(device), "
             "positions.to(device)")]},
    "5c": {
        "a stream that sees the future": [(BLOCK, ".tril(start)", "")],
        "tokens for all": [
            (FLAT, "[self.plan[i][0] for i in complete(self.plan)]",
             "[request for request, _ in self.plan]"),
            (FLAT, "[self.cu_seqlens[i + 1] - 1 for i in complete(self.plan)]",
             "[end - 1 for end in self.cu_seqlens[1:]]")],
        "a triangle without its past": [(BLOCK, ".tril(start)", ".tril(0)")],
        "the first token's logits": [(FLAT, "self.cu_seqlens[i + 1] - 1", "self.cu_seqlens[i]")],
        "stream positions": [(FLAT, "positions += range(start, end)",
             "positions += range(len(positions), len(tokens))")]},
    "5d": {
        "a stream without boundaries": None,
        "the loop is one off": [instead("varlen", "c = self.cu_seqlens",
             "return torch.cat([head(q[:, c[i]:c[-1] - c[-i - 2]], *self.read(layer, i))[0]"
             " for i in range(len(self.plan))], dim=-2)")],
        "the loop masks instead of skipping": [instead("varlen", "c = self.cu_seqlens",
             "return torch.cat([head(q.roll(-c[i + 1], -2), *self.read(layer, i))[0]"
             "[:, c[i] - c[i + 1]:] for i in range(len(self.plan))], dim=-2)")],
        "a softmax of its own": [instead("mask",
             "keys, values = (torch.cat(part, dim=-2) for part in zip(*("
             "self.read(layer, i) for i in range(len(self.plan)))))",
             "scores = q @ keys.transpose(-2, -1) / q.size(-1) ** 0.5",
             "return scores.masked_fill(~self.mask, -1e300).softmax(-1) @ values")]},
    "6a": {
        "a kept page stays kept": [(HOLD, "self.kept.pop(page, None)", "pass")],
        "given back in order": [(GIVE, "reversed(table)", "table")],
        "published pages are freed": [(GIVE, "if page in self.key_of:", "if False:")],
        "no heap": [(GIVE, "heappush(self.free, page)", "self.free.append(page)")],
        "giving back is no gain": [(GIVE, "self.gains += 1", "pass")],
        "evicts the latest": [(EVICT, "popitem(last=False)", "popitem()")],
        "evicted and still known": [(EVICT, "self.key_of.pop(page)", "self.key_of[page]")],
        "held once": [(HOLD, "self.holders[page] += 1", "self.holders[page] = 1")]},
    "6b": {
        "the slot of the page": [(SLOTS, "+ p % size", "")],
        "values into the wrong slots": [(WRITE, "= k, v", "= k, v.flip(1)")],
        "pages read in one piece": None,
        "slots from the chunk": [(SLOTS, "+ p % size", "+ (p - start) % size")]},
    "6c": {
        "pages known by their own tokens": None,
        "pages known by one page before": [(PUBLISH, "next(self.names)", "key[1]")],
        "pages known by a page's number": None,
        "the name is not passed on": [
            (PUBLISH, "self.name_of[page] = self.name_of[self.published[key]]", "pass")],
        "the later page wins": [(PUBLISH, "if key not in self.published:", "if True:")],
        "only the first page": [(FIND, "name = self.name_of[page]", "break")],
        "holes in a prefix": [(FIND, "break", "continue")]},
    "6d": {
        "a preempted request goes to the end": None,
        "a stale count after preemption": [(PREEMPT, "request.computed = 0", "pass")],
        "the answer is forgotten": [(PREEMPT, "request.computed = 0",
             "request.computed, request.generated = 0, []")],
        "the pages stay held": [(PREEMPT, "self.free(request)", "request.kv = None")],
        "one page too few": [(MISSING, "request.computed + request.todo",
             "request.computed + request.todo - 1")],
        "pages for what is computed": [(MISSING, "request.computed + request.todo",
             "request.computed")]},
}
MUTANTS = {name: Mutant(part, edits or TRAPS[name]) for part, mutants in WRONG.items()
           for name, edits in mutants.items()}


# The bugs that students expose: what is wrong, and the smallest workload known that shows it, as
# requests and knobs. A request is [prompt, new tokens, arrival, priority, eos_token]; a prompt is a
# number of tokens, or the tokens themselves.
BUGS = {
    # set 1
    "causal rule from the top left": (
        "The causal triangle begins in the top left corner of the mask, past or no past.",
        [[1, 2]], {}),
    "no causal rule": (
        "A new token sees all new tokens, later ones included.", [[2, 1]], {}),
    "scores that are not scaled": (
        "The scores are not divided by the square root of the head's size.", [[1, 2]], {}),
    "keys written at the beginning": (
        "Keys are always written at the beginning of the cache; values are not.", [[1, 2]], {}),
    "reads all of the cache": (
        "Reading returns the whole buffer, slots that are not written yet included.", [[1, 2]], {}),
    # set 2
    "static column positions": (
        "A token's position is the number of its column.", [[1, 1], [2, 1]], {}),
    "right padding": (
        "The pads of the prompts are on the right, with correct mask and positions; the next "
        "token still comes from the last column.", [[2, 1], [1, 1]], {}),
    "one token too many": (
        "A request ends one token too late.", [[1, 1]], {}),
    "end of text is overlooked": (
        "A first token that is the end of text does not end the request.", [[1, 2, 0, 0, 6]], {}),
    "more requests than max_batch": (
        "One request too many is admitted.", [[1, 1], [1, 1]], {"max_batch": 1}),
    # set 3
    "prompts before decodes": (
        "Decodes get what prompts leave of the budget.", [[1, 1], [2, 1]], {"token_budget": 3}),
    "the budget is overdrawn": (
        "Decodes do not count towards the budget.", [[1, 1], [2, 1]], {"token_budget": 2}),
    "admits without room": (
        "A request is admitted when its prompt fits, whatever its answer will need.",
        [[1, 1], [1, 2]], {"max_kv_tokens": 2}),
    "the second overtakes the first": (
        "Where the first in the queue does not fit, a later one is admitted.",
        [[1, 1], [1, 2], [1, 1]], {"max_kv_tokens": 2}),
    "finished requests stay": (
        "Finished requests keep their places.", [[1, 1]], {}),
    # set 4
    "published mask": (
        "All new slots count as tokens, pads included.", [[2, 1], [1, 1]], {}),
    "column positions": (
        "A token's position is its column, past included.", [[2, 1], [1, 1]], {}),
    "pads written to the cache": (
        "The first n slots of a row are cached, instead of the last n.", [[2, 1], [1, 2]], {}),
    "samples from a partial prefill": (
        "A request whose prompt is only partly computed gets a token.",
        [[2, 1]], {"token_budget": 1}),
    "no causal rule in a chunk": (
        "Where there is a past, the new tokens of a chunk see each other, even later ones.",
        [[4, 1]], {"token_budget": 2}),
    # set 5
    "neighbours in a packed row": (
        "Prompts of one row see those on their left.", [[1, 1], [1, 1], [2, 1]], {}),
    "positions that run on in a packed row": (
        "The second prompt of a row does not start at position 0.", [[1, 1], [1, 1], [2, 1]], {}),
    "a stream without boundaries": (
        "With masking, the mask is not used: only the causal rule over the whole stream.",
        [[1, 1], [1, 1]], {}),
    "stream positions": (
        "Positions are places in the stream.", [[1, 2]], {}),
    "first fit without sorting": (
        "The prompts are packed as they come, not from the longest to the shortest.",
        [[1, 1], [1, 1], [3, 1], [2, 1], [2, 1]], {}),
    # set 6
    "pages read in one piece": (
        "Scattered pages are read as if they were neighbours.",
        [[1, 1], [1, 2]], {"pages": 2, "page_size": 1, "max_batch": 1}),
    "pages known by their own tokens": (
        "A page is found by its own tokens, whatever comes before them.",
        [[1, 1], [[1, 1, 1], 1]], {"pages": 3, "page_size": 1, "max_batch": 1}),
    "pages known by one page before": (
        "A page is found by its own tokens and those of the page before, no more.",
        [[[1, 1, 2], 1], [[1, 2, 3], 1]], {"pages": 7, "page_size": 1, "max_batch": 1}),
    "a preempted request goes to the end": (
        "A preempted request goes to the end of the queue.",
        [[1, 2], [1, 2], [1, 1]], {"pages": 3, "page_size": 1, "max_batch": 2}),
    "the answer is forgotten": (
        "A preempted request begins its answer again.",
        [[1, 2], [1, 2]], {"pages": 3, "page_size": 1}),
}
