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
    """
    part:  the part that it belongs to, "4b"
    words: what is wrong, for the students who have to expose it
    edits: [(function, code as it stands, code of the mutant), ...]
    """
    part: str
    words: str
    edits: list


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

MUTANTS = {
    # set 1
    "causal rule from the top left": Mutant(
        "1a", "The causal triangle begins in the top left corner of the mask, past or no past.",
        TRAPS["causal rule from the top left"]),
    "no causal rule": Mutant(
        "1a", "A new token sees all new tokens, later ones included.",
        [(HEAD, ".tril(diagonal=S - T)", "")]),
    "scores that are not scaled": Mutant(
        "1a", "The scores are not divided by the square root of the head's size.",
        [(HEAD, " / math.sqrt(q.size(-1))", "")]),
    "the mask replaces the causal rule": Mutant(
        "1a", "Where a mask is given, the causal rule is not applied.",
        [(HEAD, "see = see & mask", "see = mask")]),
    "NaN for a query without keys": Mutant(
        "1a", "A query that may see no key gets NaN instead of zeros.",
        [(HEAD, "out.masked_fill(~see.any(dim=-1, keepdim=True), 0.0)", "out")]),
    "keys written at the beginning": Mutant(
        "1b", "Keys are always written at the beginning of the cache; values are not.",
        [(PUT, "all_k[..., start:end, :] = k", "all_k[..., :end - start, :] = k")]),
    "values are not written": Mutant(
        "1b", "Only keys are written.", [(PUT, "all_v[..., start:end, :] = v", "pass")]),
    "reads all of the cache": Mutant(
        "1b", "Reading returns the whole buffer, slots that are not written yet included.",
        [(READ, "self.k[layer][..., :end, :], self.v[layer][..., :end, :]",
          "self.k[layer], self.v[layer]")]),
    "a full cache is silent": Mutant(
        "1b", "What does not fit into the cache is dropped without an error.",
        [(PUT, 'raise ValueError(f"KV of {self.capacity} tokens cannot take tokens {start} to '
               '{end}")', "return")]),
    "positions from 0": Mutant(
        "1c", "The tokens of every pass are at positions 0, 1, 2, ...",
        [(ALONE + ".lay_out", "range(self.start, self.end)\n", "range(self.end - self.start)\n")]),
    "all tokens every time": Mutant(
        "1c", "Every pass computes all tokens again, cache or not.",
        [(ALONE + ".lay_out", "self.start, self.end = request.computed, request.computed + n",
          "self.start, self.end = 0, request.computed + n")]),
    # set 2
    "static column positions": Mutant(
        "2a", "A token's position is the number of its column.",
        TRAPS["static column positions"]),
    "right padding": Mutant(
        "2a", "The pads of the prompts are on the right, with correct mask and positions; the next "
        "token still comes from the last column.",
        TRAPS["right padding"]),
    "pads are seen": Mutant(
        "2a", "Tokens see the pads on their left.",
        [(STATIC, "(columns >= self.pads[:, None])", "(columns >= 0 * self.pads[:, None])")]),
    "finished rows get tokens": Mutant(
        "2a", "Rows of finished requests are sampled from.",
        [(STATIC, "complete(self.plan)", "list(range(B))")]),
    "one token too many": Mutant(
        "2b", "A request ends one token too late.",
        [(APPEND, "len(self.generated) ==", "len(self.generated) - 1 ==")]),
    "end of text is overlooked": Mutant(
        "2b", "A first token that is the end of text does not end the request.",
        [(APPEND, "if token == self.eos_token:",
          "if token == self.eos_token and len(self.generated) > 1:")]),
    "no end at the context limit": Mutant(
        "2b", "A sequence continues when no position is left.",
        [(APPEND, " or self.computed == self.block_size", "")]),
    "the length comes first": Mutant(
        "2b", "An end of text that is also the last token allowed ends a request with \"length\".",
        [(APPEND, "if token == self.eos_token:",
          "if token == self.eos_token and len(self.generated) < self.max_new_tokens:")]),
    "more requests than max_batch": Mutant(
        "2c", "One request too many is admitted.",
        [(ADMIT, "arrived[:max_batch - len(running)]", "arrived[:max_batch - len(running) + 1]")]),
    "not yet arrived": Mutant(
        "2c", "Requests are admitted one step before they arrive.",
        [(ADMIT, "request.arrival <= step", "request.arrival <= step + 1")]),
    "admitted twice": Mutant(
        "2c", "Admitted requests stay in the queue.",
        [(ADMIT, "waiting[len(admitted):]", "list(waiting)")]),
    "caches are kept": Mutant(
        "2c", "Finished requests keep their caches.", [(LEAVE, "request.kv = None", "pass")]),
    "cancelled requests go on": Mutant(
        "2c", "Cancelled requests stay.",
        [(LEAVE, "unfinished(running)", "[r for r in running if not r.finished]")]),
    # set 3
    "prompts before decodes": Mutant(
        "3a", "Decodes get what prompts leave of the budget.",
        TRAPS["prompts before decodes"]),
    "the budget is overdrawn": Mutant(
        "3a", "Decodes do not count towards the budget.",
        [(SHARE, "self.token_budget - len(plan)", "self.token_budget")]),
    "one chunk a step": Mutant(
        "3a", "Only one prompt gets a chunk in each step.",
        [(SHARE, "budget -= n", "budget = 0")]),
    "whole prompts only": Mutant(
        "3a", "A prompt that does not fit into what is left of the budget waits.",
        [(SHARE, "request.todo > 1 and budget > 0",
          "request.todo > 1 and (budget >= request.todo or budget == self.token_budget)")]),
    "admits without room": Mutant(
        "3b", "A request is admitted when its prompt fits, whatever its answer will need.",
        [(ROOM, "reserved + request.kv_tokens", "reserved + len(request.prompt)")]),
    "the second overtakes the first": Mutant(
        "3b", "Where the first in the queue does not fit, a later one is admitted.",
        [(ENTER, "if not self.arrived(step) or not self.grant_room(self.waiting[0]):",
          "fit = [r for r in self.waiting if r.arrival <= step and self.grant_room(r)]\n"
          "            if not fit:"),
         (ENTER, "self.running.append(self.waiting.popleft())",
          "self.running.append(fit[0])\n            self.waiting.remove(fit[0])")]),
    "one place too many": Mutant(
        "3b", "One request more than max_batch runs.",
        [(ENTER, "len(self.running) < self.max_batch", "len(self.running) <= self.max_batch")]),
    "admits beyond the budget": Mutant(
        "3b", "Requests are admitted although the running ones use up the budget.",
        [(ENTER, " and todo < self.token_budget", "")]),
    "prompts come before their arrival": Mutant(
        "3b", "Requests are admitted before they arrive.",
        [(ENTER, "self.arrived(step)", "self.arrived(step + 1)")]),
    "finished requests stay": Mutant(
        "3c", "Finished requests keep their places.",
        [(RELEASE, "if request.finished", "if False")]),
    "partial prefills get tokens": Mutant(
        "3c", "Tokens go to the first requests of the plan, complete or not.",
        [(ADVANCE, "[plan[i][0] for i in complete(plan)]",
          "[request for request, _ in plan]")]),
    "computed is not counted": Mutant(
        "3c", "After a chunk a prompt counts as computed.",
        [(ADVANCE, "request.computed += n", "request.computed += request.todo")]),
    "caches are not freed": Mutant(
        "3c", "Finished requests leave, and keep their caches.", [(RELEASE, "self.free(request)",
                                                                   "pass")]),
    # set 4
    "column positions": Mutant(
        "4a", "A token's position is its column, past included.",
        TRAPS["column positions"]),
    "the wrong tokens": Mutant(
        "4a", "A chunk holds the first tokens of the prompt, whatever is computed already.",
        [(LAY, "request.slice(start, start + n)", "request.slice(0, n)")]),
    "published mask": Mutant(
        "4b", "All new slots count as tokens, pads included.",
        TRAPS["published mask"]),
    "pads of the past are seen": Mutant(
        "4b", "The whole rectangle of the past may be seen, empty slots included.",
        [(LAY, "mask[b, ..., P - start:P] = True", "mask[b, ..., :P] = True")]),
    "the past from the left": Mutant(
        "4b", "The mask marks the past at the left end of its part, where the pads are.",
        [(LAY, "mask[b, ..., P - start:P] = True", "mask[b, ..., :start] = True")]),
    "no past": Mutant(
        "4b", "The past is hidden.", [(LAY, "mask[b, ..., P - start:P] = True", "pass")]),
    "pads written to the cache": Mutant(
        "4c", "The first n slots of a row are cached, instead of the last n.",
        TRAPS["pads written to the cache"]),
    "the past is aligned left": Mutant(
        "4c", "The cached keys are gathered at the left end of the past's part.",
        [(ATTEND, "past_k[b, :, P - start:], past_v[b, :, P - start:] = past",
          "past_k[b, :, :start], past_v[b, :, :start] = past")]),
    "written at 0": Mutant(
        "4c", "New keys are always written at the beginning of the cache.",
        [(ATTEND, "request.kv.write(layer, start, *new)", "request.kv.write(layer, 0, *new)")]),
    "samples from a partial prefill": Mutant(
        "4d", "A request whose prompt is only partly computed gets a token.",
        TRAPS["samples from a partial prefill"]),
    "only decodes get a token": Mutant(
        "4d", "A request gets no token in the step that completes its prompt.",
        [(COMPLETE, "n == request.todo", "n == request.todo and request.generated")]),
    "the first column": Mutant(
        "4d", "The next token comes from a row's first column.",
        [(LAY, "device=device), -1)", "device=device), 0)")]),
    "no causal rule in a chunk": Mutant(
        "4b", "Where there is a past, the new tokens of a chunk see each other, even later ones.",
        TRAPS["no causal rule in a chunk"]),
    # set 5
    "first fit without sorting": Mutant(
        "5a", "The prompts are packed as they come, not from the longest to the shortest.",
        [(FIT, "sorted(range(len(lengths)), key=lambda i: -lengths[i])", "range(len(lengths))")]),
    "last fit": Mutant(
        "5a", "Each prompt goes into the last row that has room.", [(FIT, "bins[fits[0]].append(i)",
                                                                    "bins[fits[-1]].append(i)"),
                                                                   (FIT, "room[fits[0]] -=",
                                                                    "room[fits[-1]] -=")]),
    "neighbours in a packed row": Mutant(
        "5b", "Prompts of one row see those on their left.",
        TRAPS["neighbours in a packed row"]),
    "positions that run on in a packed row": Mutant(
        "5b", "The second prompt of a row does not start at position 0.",
        TRAPS["positions that run on in a packed row"]),
    "the last column of a packed row": Mutant(
        "5b", "The next token of every prompt is read from the last column of its row.",
        [(PACK, "[end - 1 for end in ends]", "[m - 1 for end in ends]")]),
    "caches in packed order": Mutant(
        "5b", "Keys and values are unpacked in the order of the rows, not of the requests.",
        [(PACK, "self.tokens, self.positions = tokens.to(device), positions.to(device)",
          "self.places.sort()\n        self.tokens, self.positions = tokens.to(device), "
          "positions.to(device)")]),
    "a stream that sees the future": Mutant(
        "5c", "In the mask, a token sees the later tokens of its request.",
        [(BLOCK, ".tril(start)", "")]),
    "tokens for all": Mutant(
        "5c", "The next token of every request is read, complete or not.",
        [(FLAT, "[self.plan[i][0] for i in complete(self.plan)]",
          "[request for request, _ in self.plan]"),
         (FLAT, "[self.cu_seqlens[i + 1] - 1 for i in complete(self.plan)]",
          "[end - 1 for end in self.cu_seqlens[1:]]")]),
    "a triangle without its past": Mutant(
        "5c", "In the mask, the triangle begins at the left, as if there were no past.",
        [(BLOCK, ".tril(start)", ".tril(0)")]),
    "the first token's logits": Mutant(
        "5c", "The next token is read from the first token of each request.",
        [(FLAT, "self.cu_seqlens[i + 1] - 1", "self.cu_seqlens[i]")]),
    "stream positions": Mutant(
        "5c", "Positions are places in the stream.",
        [(FLAT, "positions += range(start, end)", "positions += range(len(positions), len(tokens))"
          )]),
    "a stream without boundaries": Mutant(
        "5d", "With masking, the mask is not used: only the causal rule over the whole stream.",
        TRAPS["a stream without boundaries"]),
    "the loop is one off": Mutant(
        "5d", "The loop gives each request the queries of the next boundary.",
        [(VARLEN, "slice(self.cu_seqlens[i], self.cu_seqlens[i + 1])",
          "slice(self.cu_seqlens[i], self.cu_seqlens[-1] - self.cu_seqlens[-i - 2])")]),
    "the loop masks instead of skipping": Mutant(
        "5d", "The loop computes every query for every request and picks out the right ones.",
        [(VARLEN, "out.append(head(q[:, new], keys, values)[0])",
          "out.append(head(q.roll(-new.stop, -2), keys, values)[0][:, new.start - new.stop:])"
          )]),
    # set 6
    "a kept page stays kept": Mutant(
        "6a", "A page that is found again is still listed as kept.",
        [(HOLD, "self.kept.pop(page, None)", "pass")]),
    "given back in order": Mutant(
        "6a", "A table's first pages are the first to be evicted.",
        [(GIVE, "reversed(table)", "table")]),
    "published pages are freed": Mutant(
        "6a", "A page that others could find becomes free at once.",
        [(GIVE, "if page in self.key_of:", "if False:")]),
    "no heap": Mutant(
        "6a", "A free page is appended to the list, which is then no heap.",
        [(GIVE, "heappush(self.free, page)", "self.free.append(page)")]),
    "giving back is no gain": Mutant(
        "6a", "A page that is given back is not counted in gains.",
        [(GIVE, "self.gains += 1", "pass")]),
    "evicts the latest": Mutant(
        "6a", "The page that was used last is evicted first.",
        [(EVICT, "popitem(last=False)", "popitem()")]),
    "evicted and still known": Mutant(
        "6a", "An evicted page is still in key_of.",
        [(EVICT, "self.key_of.pop(page)", "self.key_of[page]")]),
    "the slot of the page": Mutant(
        "6b", "A token's slot is its page's first slot.",
        [(SLOTS, "+ p % size", "")]),
    "values into the wrong slots": Mutant(
        "6b", "Values are written in another order than keys.",
        [(WRITE, "= k, v", "= k, v.flip(1)")]),
    "pages known by their own tokens": Mutant(
        "6c", "A page is found by its own tokens, whatever comes before them.",
        TRAPS["pages known by their own tokens"]),
    "pages known by one page before": Mutant(
        "6c", "A page is found by its own tokens and those of the page before, no more.",
        [(PUBLISH, "next(self.names)", "key[1]")]),
    "pages known by a page's number": Mutant(
        "6c", "A page's name is its number, which is used again after an eviction.",
        [(PUBLISH, "next(self.names)", "page + 1")]),
    "the name is not passed on": Mutant(
        "6c", "A page whose tokens are published already gets no name.",
        [(PUBLISH, "self.name_of[page] = self.name_of[self.published[key]]", "pass")]),
    "the later page wins": Mutant(
        "6c", "A page takes the place of one with the same tokens that was published before.",
        [(PUBLISH, "if key not in self.published:", "if True:")]),
    "only the first page": Mutant(
        "6c", "Only the first page of a prefix is shared.",
        [(FIND, "name = self.name_of[page]", "break")]),
    "a preempted request goes to the end": Mutant(
        "6d", "A preempted request goes to the end of the queue.",
        [(PREEMPT, "self.waiting.appendleft(request)", "self.waiting.append(request)")]),
    "a stale count after preemption": Mutant(
        "6d", "A preempted request still counts its tokens as computed.",
        [(PREEMPT, "request.computed = 0", "pass")]),
    "the answer is forgotten": Mutant(
        "6d", "A preempted request begins its answer again.",
        [(PREEMPT, "request.computed = 0", "request.computed, request.generated = 0, []")]),
    "the pages stay held": Mutant(
        "6d", "A preempted request does not give its pages back.",
        [(PREEMPT, "self.free(request)", "request.kv = None")]),
    "one page too few": Mutant(
        "6d", "A request asks for its next page one token too late.",
        [(MISSING, "request.computed + request.todo", "request.computed + request.todo - 1")]),
    "pages read in one piece": Mutant(
        "6b", "Scattered pages are read as if they were neighbours.",
        TRAPS["pages read in one piece"]),
}

# For each bug that students expose, the smallest known workload. A request is [prompt, new tokens,
# arrival, priority, eos_token]; a prompt is a number of tokens, or the tokens themselves.
SMALLEST = {bug: {"requests": requests, "knobs": knobs} for bug, (requests, knobs) in {
    # set 1
    "causal rule from the top left": ([[1, 2]], {}),
    "no causal rule": ([[2, 1]], {}),
    "scores that are not scaled": ([[1, 2]], {}),
    "keys written at the beginning": ([[1, 2]], {}),
    "reads all of the cache": ([[1, 2]], {}),
    # set 2
    "static column positions": ([[1, 1], [2, 1]], {}),
    "right padding": ([[2, 1], [1, 1]], {}),
    "one token too many": ([[1, 1]], {}),
    "end of text is overlooked": ([[1, 2, 0, 0, 6]], {}),
    "more requests than max_batch": ([[1, 1], [1, 1]], {"max_batch": 1}),
    # set 3
    "prompts before decodes": ([[1, 1], [2, 1]], {"token_budget": 3}),
    "the budget is overdrawn": ([[1, 1], [2, 1]], {"token_budget": 2}),
    "admits without room": ([[1, 1], [1, 2]], {"max_kv_tokens": 2}),
    "the second overtakes the first": ([[1, 1], [1, 2], [1, 1]], {"max_kv_tokens": 2}),
    "finished requests stay": ([[1, 1]], {}),
    # set 4
    "published mask": ([[2, 1], [1, 1]], {}),
    "column positions": ([[2, 1], [1, 1]], {}),
    "pads written to the cache": ([[2, 1], [1, 2]], {}),
    "samples from a partial prefill": ([[2, 1]], {"token_budget": 1}),
    "no causal rule in a chunk": ([[4, 1]], {"token_budget": 2}),
    # set 5
    "neighbours in a packed row": ([[1, 1], [1, 1], [2, 1]], {}),
    "positions that run on in a packed row": ([[1, 1], [1, 1], [2, 1]], {}),
    "a stream without boundaries": ([[1, 1], [1, 1]], {}),
    "stream positions": ([[1, 2]], {}),
    "first fit without sorting": ([[1, 1], [1, 1], [3, 1], [2, 1], [2, 1]], {}),
    # set 6
    "pages read in one piece": ([[1, 1], [1, 2]], {"pages": 2, "page_size": 1, "max_batch": 1}),
    "pages known by their own tokens": (
        [[1, 1], [[1, 1, 1], 1]], {"pages": 3, "page_size": 1, "max_batch": 1}),
    "pages known by one page before": (
        [[[1, 1, 2], 1], [[1, 2, 3], 1]], {"pages": 7, "page_size": 1, "max_batch": 1}),
    "a preempted request goes to the end": (
        [[1, 2], [1, 2], [1, 1]], {"pages": 3, "page_size": 1, "max_batch": 2}),
    "the answer is forgotten": ([[1, 2], [1, 2]], {"pages": 3, "page_size": 1}),
}.items()}
