"""
Wrong solutions that test the course kit, beside the kit's own bugs.json. Each changes a line or two
of the reference, and must lose the points of its own part and no other. (Right solutions are in
handed_in.py.)
"""
import json
from collections import namedtuple

from common import ROOT

from lab.checks.traps import TRAPS  # the known bugs of batching code

# part: that must be lost, "4b", or only its set; edits: [(function, code as it stands, code of the
# mutant), ...]
Mutant = namedtuple("Mutant", "part edits")
WRONG = {   # part and function: {mutant: code as it stands, code of the mutant, ...; (): see TRAPS}
    "1a model.py:Head.forward": {
        "1a device ignored": ("dtype=torch.bool, device=q.device)", "dtype=torch.bool)"),
        "NaN for a query without keys": (
            "weights.masked_fill(~see.any(dim=-1, keepdim=True), 0.0)", "weights"),
        "the mask replaces the causal rule": ("see = see & mask", "see = mask"),
        "the square root of 5": ("math.sqrt(q.size(-1))", "5 ** 0.5"),
        "four axes": ("T, S = q.size(-2), k.size(-2)", "(_, _, T, _), S = q.shape, k.size(-2)"),
        "the queries are scaled in place": (
            "scores = q / math.sqrt(q.size(-1)) @ k.transpose(-2, -1)",
            "q /= math.sqrt(q.size(-1))\n        scores = q @ k.transpose(-2, -1)"),
        "hidden scores are small": ("-math.inf", "-50.0"),
        "a buffer for all calls": (
            "return weights @ v ",
            "out = weights @ v\n        return vars(math).setdefault(out.shape, out).copy_(out) "),
        "attention in float32": ("weights @ v ", "(weights.float() @ v.float()).to(v.dtype) "),
        "the mask has one row": ("see = see & mask", "see = see & mask[..., :1, :]")},
    "1b cache.py:KV.write": {
        "a full cache is silent": ("raise ValueError(", "return print("),
        "one buffer for all caches": (
            "all_k, all_v =", "self.k, self.v = globals().setdefault('one', (self.k, self.v))\n"
            "        all_k, all_v ="),
        "half of a write": (
            "if end > self.capacity:", "if end > self.capacity:\n            room = self.capacity "
            "- start\n            self.write(layer, start, k[..., :room, :], v[..., :room, :])"),
        "an exact fit is refused": ("end > self.capacity", "end >= self.capacity")},
    "1b cache.py:KV.read": {
        "a copy is read": (":end, :], self.v", ":end, :].clone(), self.v")},
    "1c generate_unbatched.py:Alone.lay_out": {
        "1c device ignored": ("[positions], device=device)", "[positions])"),
        "positions from 0": ("range(self.start, self.end)\n", "range(self.end - self.start)\n"),
        "all tokens every time": ("self.end = request.computed,", "self.end = 0,")},
    "1c generate_unbatched.py:Alone.attend": {
        "no branch without a cache": ("if self.kv is not None:", "if True:"),
        "another layer": ("kv.write(layer", "kv.write((layer,)", "read(layer", "read((layer,)")},
    "2a generate_naive.py:StaticBatch.lay_out": {
        "2a device ignored": ("tokens.to(device) ", "tokens "),
        "finished rows get tokens": ("indices_due(self.plan)", "list(range(B))"),
        "sampled backwards": ("indices_due(self.plan)", "indices_due(self.plan)[::-1]")},
    "2b request.py:Request.append": {
        "no end at the context limit": (),
        "the context limit comes early": (
            "self.is_last(len(self.generated))",
            "self.is_last(len(self.generated)) or len(self.tokens) == self.context_length")},
    "2c generate_dynamic.py:admit": {
        "not yet arrived": ("request.arrival <= step", "request.arrival <= step + 1"),
        "admitted twice": ("waiting[len(admitted):]", "list(waiting)"),
        "newcomers come first": ("running + admitted", "admitted + running"),
        "no cache for a newcomer": ("request.kv = KV(request.kv_tokens)", "pass")},
    "2c generate_dynamic.py:leave": {
        "caches are kept": ("request.kv = None", "pass"),
        "at the limit": ("request.finished:", "request.finish_reason in ('stop', 'cancelled'):")},
    "3a scheduler.py:Scheduler.share_budget": {
        "the budget exceeded by one": ("- len(plan)  ", "- len(plan) + 1  "),
        "exceeded by one if many decode": ("- len(plan)  ", "- len(plan) + (len(plan) > 6)  "),
        "plan[:8]": ("return plan", "return plan[:8]"),
        "a chunk of at most 16": ("min(request.todo, budget)", "min(request.todo, budget, 16)"),
        "3a quadratic time": ("if request.todo == 1]",
                              "if request.todo == 1 and self.running.count(request)]"),
        "one chunk a step": ("budget -= n", "budget = 0"),
        "a decode by its answer": ("if request.todo == 1]", "if request.generated]")},
    "3b scheduler.py:Scheduler.grant_room": {
        "an exact fit finds no room": ("> self.max_kv_tokens", ">= self.max_kv_tokens"),
        "room without a cache": ("request.kv = KV(request.kv_tokens)", "pass")},
    "3b scheduler.py:Scheduler.admit": {
        "max_batch capped at 6": ("< self.max_batch", "< min(self.max_batch, 6)"),
        "admits beyond the budget": (),
        "prompts come before their arrival": ("self.arrived(step)", "self.arrived(step + 1)"),
        "admits at the whole budget": ("todo < self.token_budget", "todo <= self.token_budget"),
        "one newcomer a step": ("todo += self.running[-1].todo", "break"),
        "newcomers have nothing to do": ("todo += self.running[-1].todo", "pass")},
    "3c request.py:advance": {
        "3c quadratic time": ("for i in indices_due(plan)]",
                              "for i in indices_due(plan) if i in indices_due(plan)]"),
        "tokens are taken away": (
            "zip(sampled, tokens, strict=True)", "[(r, tokens.pop(0)) for r in sampled]"),
        "nothing to compute is complete": (
            "[plan[i][0] for i in indices_due(plan)]",
            "[request for request, n in plan if n in (0, request.todo)]")},
    "3c scheduler.py:Scheduler.release": {
        "nothing is left to free": ("self.free(", "request.kv = None\n            self.free("),
        "running requests are freed": (
            "self.free(request)", "[self.free(each) for each in [*self.running, request]]"),
        "freed twice": ("self.free(request)", "self.free(request) or self.free(request)"),
        "a list that changes on the way": (
            "[request for request in self.running if request.finished]:",
            "self.running:\n            if not request.finished:\n                continue")},
    "4a generate_dynamic.py:Rectangle.lay_out": {
        "4a device ignored": ("(t.to(device) for t in (tokens, positions, mask))",
                              "(tokens, positions, mask.to(device))"),
        "tokens in int32": ("self.P = P", "self.P, self.tokens = P, self.tokens.int()"),
        "a past too wide": ("max(self.starts)", "max(self.starts) + 1"),
        "one token of an answer": ("request.slice(start, start + n)",
                                   "request.prompt[start:start + n] or request.generated[-1:]")},
    "4b generate_dynamic.py:Rectangle.lay_out": {
        "4b device ignored": ("(t.to(device) for t in (tokens, positions, mask))",
                              "(tokens.to(device), positions.to(device), mask)"),
        "all-visible from the seventh request on": ("self.P = P", "self.P, mask[6:] = P, True"),
        "published mask": (), "pads of the past are seen": (),
        "the past from the left": ("mask[b, ..., P - start:P]", "mask[b, ..., :start]")},
    "4c generate_dynamic.py:Rectangle.attend": {
        "the fifth request zeroed": ("past_v, self.mask)\n",
                                     "past_v, self.mask)\n        out[4:5] = 0\n"),
        "the fifth request NaN": ("past_v, self.mask)\n",
                                  "past_v, self.mask)\n        out[4:5] = float('nan')\n"),
        "a replaced judge, when it is called": (
            "        out = head(", "        import lab.checks.judge\n"
            "        lab.checks.judge.wrong_tokens = lambda *_: ()\n        out = head("),
        "another name": ("kv.write(layer", "kv.write((layer,)", "read(layer", "read((layer,)"),
        "NaN in the past": ("past_v = (t.new_zeros(", "past_v = (float('nan') * t.new_ones("),
        "the past in float32": ("t.new_zeros(", "torch.zeros(")},
    "4d request.py:indices_due": {
        "only decodes get a token": ("n == request.todo", "n == request.todo == 1"),
        "a chunk of nothing is complete": ("if n == request.todo", "if n in (0, request.todo)")},
    "4d generate_dynamic.py:Rectangle.lay_out": {
        "the handout's example: arange": ("torch.tensor(due, dtype=torch.long, device=device)",
                                           "torch.arange(len(due), device=device)"),
        "4d device ignored": ("dtype=torch.long, device=device), -1)", "dtype=torch.long), -1)"),
        "the first column": ("device=device), -1)", "device=device), 0)"),
        "complete in another order": ("indices_due(self.plan)", "indices_due(self.plan)[::-1]")},
    "5a beyond/prepacked.py:first_fit_decreasing": {
        "last fit": ("bins[fits[0]]", "bins[fits[-1]]", "room[fits[0]]", "room[fits[-1]]"),
        "best fit": ("if not fits:", "fits.sort(key=room.__getitem__)\n        if not fits:"),
        "rows are never full": ("lengths[i] <= room[b]", "lengths[i] < room[b]")},
    "5b beyond/prepacked.py:Packed.lay_out": {
        "5b device ignored": ("mask[:, None].to(device)", "mask[:, None]"),
        "the last column of a packed row": ("[end - 1 for end in ends]", "[m - 1 for end in ends]"),
        "caches in packed order": ("self.sampled =", "self.places.sort()\n        self.sampled =")},
    "5c generate_ragged.py:Flat.block_diagonal": {
        "a stream all-visible from the seventh on": (
            "return torch.block_diag(*see).bool()", "see = torch.block_diag(*see).bool()\n        "
            "see[self.cu_seqlens[6:7][0] if len(self.plan) > 6 else len(see):] = True\n        "
            "return see"),
        "a stream that sees the future": (".tril(start)", ""),
        "a triangle without its past": (".tril(start)", ".tril(0)")},
    "5c generate_ragged.py:Flat.lay_out": {
        "the handout's example: a partial prompt in the middle": (
            "for i in due]\n        self.wanted", "for i in range(len(due))]\n        self.wanted"),
        "5c device ignored": ("torch.tensor(positions, device=device)", "torch.tensor(positions)"),
        "the first token's logits": ("self.cu_seqlens[i + 1] - 1", "self.cu_seqlens[i]")},
    "5d generate_ragged.py:Flat.attend": {
        "the fifth request of a stream zeroed": (
            "head(q[..., new, :], keys, values)", "head(q[..., new, :], keys, values) * (i != 4)"),
        "a stream of at most 40": (
            "return torch.cat(out, dim=-2)",
            "out = torch.cat(out, dim=-2)\n        out[:, 40:] = 0\n        return out"),
        "past the given write": ("self.write(layer,", "Flat.write(self, layer,"),
        "the loop is one off": ("enumerate(caches)", "enumerate(caches[1:] + caches[:1])"),
        "the loop masks instead of skipping": (
            "head(q[..., new, :], keys, values)",
            "head(q.roll(-new.stop, -2), keys, values)[:, new.start - new.stop:]"),
        "a softmax of its own": (
            "return head(q, keys, values, mask=self.mask)",
            "scores = q @ keys.transpose(-2, -1) / q.size(-1) ** 0.5\n"
            "            return scores.masked_fill(~self.mask, -1e300).softmax(-1) @ values")},
    "6a generate_prefix.py:PrefixPages.share": {
        "an argument that is emptied": ("in pages:", "in [pages.pop(0) for _ in list(pages)]:")},
    "6b generate_paged.py:Paged.write": {
        "another pool": ("= self.pool", "= self.pool.k[layer], self.pool.v[layer] = "
                         "torch.stack(self.pool.buffers(layer, k, v)) #"),
        "values into the wrong slots": ("= k, v", "= k, v.flip(1)")},
    "6c generate_prefix.py:PrefixScheduler.hashes": {
        "6c quadratic time": ("known, size = request.page_hashes", "known, size = []"),
        "a hash of half a page": ("end - size + 1, size", "end, size")},
    "6c generate_prefix.py:PrefixPages.cache": {
        "the last one is cached": ("if name not in self.cached:", "if True:")},
    "6c generate_prefix.py:PrefixPages.find": {
        "holes in a prefix": ("break", "continue")},
    "6d paging.py:PagedScheduler.preempt": {
        "a later arrival": ("request.computed =", "request.arrival += 1; request.computed ="),
        "computed tokens are kept": ("request.computed = 0", "pass"),
        "the pages stay held": ("self.free(request)", "request.block_table = None")},
}
MUTANTS = {f"{bug['set']}: {name}": Mutant(str(min(bug["set"], 6)), bug.get("edits") or TRAPS[name])
           for name, bug in json.loads((ROOT / "assignments/bugs.json").read_text()).items()}
for where, mutants in WRONG.items():
    part, function = where.split()
    for name, code in mutants.items():
        edits = [(function, old, new) for old, new in zip(code[::2], code[1::2])]
        MUTANTS[name] = Mutant(part, edits or TRAPS[name])
