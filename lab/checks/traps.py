"""
Known bugs of batching code: the repository's only list of them. `broken` inserts one while a
program runs, and removes it again.

    with broken("published mask"):
        generate(model, requests)

A trap changes a few lines of the repository's own code, and nothing around them. So the reader sees
exactly what is wrong. The tests put in each of them (tests/test_traps.py), and notebooks show some.
The course kit names those that are usual mistakes of students, too (setN/mistakes.txt), and
docs/sources.md says where some were met in the open.
"""
from contextlib import ExitStack, contextmanager

from lab.checks.edits import EditError, function_named, swapped

# Functions are named, not imported, so that this table depends on none of them.
HEAD, ATTENTION = "model.py:Head.forward", "model.py:MultiHeadAttention.forward"
APPEND = "request.py:Request.append"
STATIC = "generate_naive.py:StaticBatch.lay_out"
RECTANGLE, GATHER = (f"generate_dynamic.py:Rectangle.{name}" for name in ("lay_out", "attend"))
PACKED, UNPACK = (f"beyond/prepacked.py:Packed.{name}" for name in ("lay_out", "attend"))
ADMIT, SHARE = (f"scheduler.py:Scheduler.{name}" for name in ("admit", "share_budget"))
PREEMPT = "paging.py:PagedScheduler.preempt"
PAGED, READ = (f"generate_paged.py:Paged.{name}" for name in ("lay_out", "read"))
FIND = "generate_prefix.py:PrefixPages.find"
HASHES, ROOM, UPDATE, CACHE = (f"generate_prefix.py:PrefixScheduler.{name}" for name in (
    "hashes", "grant_room", "update", "cache_filled"))
CHANGE = "beyond/rollout.py:RolloutScheduler.change"
WINDOWS = "beyond/hybrid.py:HybridPaged.lay_out"

TRAPS = {   # name: [(function, code as it stands, code of the trap), ...]
    # which keys a token may see
    "published mask": [(RECTANGLE, "mask[b, ..., P + T - n:] = True", "mask[b, ..., P:] = True")],
    "pads of the past are seen": [
        (RECTANGLE, "mask[b, ..., P - start:P] = True", "mask[b, ..., :P] = True")],
    "no causal rule in a chunk": [
        (HEAD, ".tril(diagonal=S - T)", ".tril(diagonal=S - T if S == T else S)")],
    "causal rule from the top left": [(HEAD, ".tril(diagonal=S - T)", ".tril(diagonal=0)")],
    "NaN for a query without keys": [   # a pad's, which is its value in the next layer
        (HEAD, "weights.masked_fill(~see.any(dim=-1, keepdim=True), 0.0)", "weights"),
        (ATTENTION, "v.masked_fill(lost, 0.0)", "v")],
    "neighbours in a packed row": [
        (PACKED, "(owner[:, :, None] == owner[:, None, :]) & (owner[:, None, :] >= 0)",
         "owner[:, None, :] >= 0")],
    "a stream without boundaries": [
        ("generate_ragged.py:Flat.attend", ", mask=self.mask)", ")")],
    "a chunk reads to the end of its prompt": [   # and there, nothing is written yet
        ("generate_ragged.py:Flat.read", "self.ends[i]",
         "max(self.ends[i], len(self.plan[i][0].prompt))")],
    "a chunk reads pages to the end of its prompt": [
        (READ, "self.key_slots[i]", "self.slots(self.plan[i][0].block_table, "
                                    "max(self.ends[i], len(self.plan[i][0].prompt)))")],
    # positions
    "column positions": [
        (RECTANGLE, "torch.arange(start, start + n)", "torch.arange(P + T - n, P + T)")],
    "static column positions": [
        (STATIC, "columns[self.start:] - self.pads[:, None]",
         "columns[self.start:].expand(B, T).clone()")],
    "right padding": [   # all is right but the last column, which is sampled from
        (STATIC, "tokens[b, T - n:]", "tokens[b, :n]"),
        (STATIC, "- self.pads[:, None]", "- self.pads[:, None] * (self.start > 0)"),
        (STATIC, "(columns >= self.pads[:, None])",
         "((columns < W - self.pads[:, None]) | (columns >= W))"),
        (STATIC, "B, T = len(self.plan), self.end - self.start",
         "B, T, W = len(self.plan), self.end - self.start, "
         "max(len(r.prompt) for r in self.requests)")],
    "positions that run on in a packed row": [
        (PACKED, "torch.arange(lengths[i])", "torch.arange(first, end)")],
    # where keys and values are kept
    "pads written to the cache": [
        (GATHER, "k[b, :, T - n:], v[b, :, T - n:]", "k[b, :, :n], v[b, :, :n]")],
    "pads of the past are not zeros": [   # uninitialised memory may hold NaN, and 0 * NaN is NaN
        (GATHER, "t.new_zeros(*t.shape[:-2], P, t.size(-1))",
         "t.new_full((*t.shape[:-2], P, t.size(-1)), float('nan'))")],
    "caches in packed order": [
        (PACKED, "zip(*self.places)", "zip(*self.places)\n        self.places.sort()")],
    "one-token prompts are lost": [   # as if a prompt were a run of rising positions
        (UNPACK, "k[row, :, first:end], v[row, :, first:end]",
         "*(t[row, :, first:end] * (end - first > 1) for t in (k, v))")],
    "pages read in one piece": [
        (READ, "self.key_slots[i]", "(self.key_slots[i][0] + torch.arange(self.ends[i])) "
                                    "% self.pool.capacity")],
    "pages read in the order of the pool": [   # the causal rule minds
        (READ, "self.key_slots[i]", "self.key_slots[i].sort().values")],
    "new keys in the last page": [   # as if a pass never filled more than one page of a request
        (PAGED, "slots[start:]",
         "slots[-1] - slots[-1] % self.pages.size + slots[start:] % self.pages.size")],
    "slot -1 is a slot": [   # padding to a captured size, as engines do it: -1 means nowhere
        ("generate_paged.py:Paged.write",
         "pool_k[:, self.slot_mapping], pool_v[:, self.slot_mapping] = k, v",
         "slots = torch.cat([self.slot_mapping, self.slot_mapping.new_tensor([-1])])\n"
         "        pool_k[:, slots], pool_v[:, slots] = (\n"
         "            torch.cat([t, t[:, -1:]], dim=1) for t in (k, v))")],
    # tokens, and when they are sampled
    "samples from a partial prefill": [
        ("request.py:indices_due", "if n == request.todo", "if n > 0")],
    "draws for a partial prefill": [   # no token comes of it, but the random stream moves on
        ("request.py:advance", "request.computed += n",
         "n == request.todo or request.draw()\n        request.computed += n")],
    "one random stream for all": [
        ("request.py:Request.draw", "self.random_stream.random()", "random.random()")],
    "the first token for all": [
        ("model.py:sample", "return tokens", "return tokens[:1] * len(tokens)")],
    "end of text is overlooked": [   # if it is the first token
        (APPEND, "if token in self.ends:",
         "if token in self.ends and len(self.generated) > 1:")],
    "one token too many": [
        (APPEND, "self.is_last(len(self.generated))", "self.is_last(len(self.generated) - 1)")],
    "no end at the context limit": [
        (APPEND, "self.is_last(len(self.generated))",
         "len(self.generated) == self.max_new_tokens")],
    # the scheduler
    "prompts before decodes": [
        (SHARE, "for request in self.running if request.todo == 1]",
         "for request in self.running if request.todo == 1\n"
         "            and all(other.todo == 1 for other in self.running)]")],
    "admits beyond the budget": [(ADMIT, " and todo < self.token_budget", "")],
    "admits what can never fit": [
        ("scheduler.py:Scheduler.add", "request.kv_tokens > self.max_kv_tokens", "False")],
    "a preempted request goes to the end": [
        (PREEMPT, "self.waiting.appendleft(request)", "self.waiting.append(request)")],
    "a stale count after preemption": [
        (PREEMPT, "request.computed = 0", "pass")],
    # pages that requests share
    "all of a prompt is found": [   # and no query is left
        (ROOM, "request.todo - 1", "request.todo")],
    "pages known by their own tokens": [(HASHES, "known[-1] if known else b\"\"", "b\"\"")],
    "pages known by the number of the page before": [   # which another may have taken since
        (HASHES, "known[-1] if known else b\"\"", "b\"\""),
        (FIND, "for each in hashes:",
         "for each in hashes:\n            each = found[-1] if found else None, each"),
        (CACHE, "self.pages.cache(request.block_table[i], hashes[i])",
         "found = self.pages.find(hashes[:i])\n"
         "            before = (found + request.block_table[len(found):])[i - 1] if i else None\n"
         "            self.pages.cache(request.block_table[i], (before, hashes[i]))")],
    "page hashes that collide": [   # by chance here; by intent, if the hash can be predicted
        ("generate_prefix.py:page_hash", ".digest()", ".digest()[:1]")],
    "cached a step late": [   # when they may have been freed, and taken by another
        (UPDATE, "for request, n in plan:",
         "last, self.late = vars(self).get('late', []), []\n"
         "        for page, name in last:\n"
         "            self.pages.cache(page, name)\n"
         "        for request, n in plan:"),
        (CACHE, "self.pages.cache(request.block_table[i], hashes[i])",
         "self.late.append((request.block_table[i], hashes[i]))")],
    "cached after finished requests have let go": [
        (UPDATE, "for request, n in plan:",
         "super().update(plan, tokens)\n"
         "        for request, n in [pair for pair in plan if pair[0].block_table]:"),
        (UPDATE, "request.computed, request.computed + n)\n        super().update(plan, tokens)",
         "request.computed - n, request.computed)")],
    "a block table is an alias": [   # no trap before `find` keeps the lists that it hands out
        (FIND, "return found",
         "return vars(self).setdefault('found', {}).setdefault(tuple(found), found)"),
        (ROOM, "self.pages.share(request.block_table, found)",
         "self.pages.share([], found)\n        request.block_table = found")],
    "a duplicate is freed while a table names it": [
        ("generate_prefix.py:PrefixPages.cache", "if name not in self.cached:",
         "if self.cached.get(name, page) != page:\n            self.free([page])\n"
         "        elif name not in self.cached:")],
    # weights that change, sessions that pause, layers with a window
    "the prefix cache outlives the weights": [
        (CHANGE, "self.pages.cached.clear()", "pass"),
        (CHANGE, "self.pages.hash_of.clear()", "pass")],
    "pages of old keys are cached": [
        ("beyond/rollout.py:RolloutScheduler.cache_filled", "if request not in self.stale:",
         "if True:")],
    "what is held is not counted": [
        ("beyond/sessions.py:SessionScheduler.free",
         "self.pages.share(pages, self.pages.find(self.hashes(request, request.computed)[:full]))",
         "pages += self.pages.find(self.hashes(request, request.computed)[:full])")],
    "a page of the window is given back": [
        ("beyond/hybrid.py:HybridScheduler.schedule", "first(window, request.computed)",
         "first(window, request.computed + 1)")],
    "a poisoned null page": [   # stands for all passed pages: hidden, but 0 * NaN is NaN
        (WINDOWS, "page or 0", "self.pages.number if page is None else page"),
        (WINDOWS, "[max(0, start - window + 1):]", ""),
        ("beyond/hybrid.py:generate", "KV(pages * page_size)", "KV((pages + 1) * page_size)"),
        ("beyond/hybrid.py:HybridPaged.attend", "self.write(buffers, k, v)",
         "self.write(buffers, k, v)\n"
         "        for t in self.pool.k[buffers], self.pool.v[buffers]:\n"
         "            t[:, -self.pages.size:] = float('nan')")],
}


@contextmanager
def broken(name, show=True):
    """Inserts a trap for the `with` block, and prints the lines that it changes."""
    changes = {}   # function -> its edits, which are made together
    for function, old, new in edits_of(name):
        changes.setdefault(function_named(function), []).append((old, new))
    with ExitStack() as traps:
        for function, edits in changes.items():
            traps.enter_context(swapped(function, edits, show))
        yield


def edits_of(name):
    """A trap's edits: [(function, old, new), ...]"""
    if name not in TRAPS:
        raise EditError(f"there is no trap {name!r}, only {', '.join(map(repr, TRAPS))}")
    return TRAPS[name]
