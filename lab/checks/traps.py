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
from contextlib import contextmanager

from lab.checks.edits import EditError, put_in

# Functions are named, not imported, so that this table depends on none of them.
HEAD = "model.py:Head.forward"
APPEND = "request.py:Request.append"
STATIC, COLUMNS = (f"generate_naive.py:StaticBatch.{name}" for name in ("lay_out", "attend"))
RECTANGLE, GATHER = (f"generate_dynamic.py:Rectangle.{name}" for name in ("lay_out", "attend"))
PACKED, UNPACK = (f"beyond/prepacked.py:Packed.{name}" for name in ("lay_out", "attend"))
SCHEDULE, UPDATE = (f"scheduler.py:Scheduler.{name}" for name in ("schedule", "update"))
PREEMPT = "paging.py:PagedScheduler.preempt"
PAGED, READ, ATTEND = (f"generate_paged.py:{name}" for name in (
    "Paged.lay_out", "paged_attention", "Paged.attend"))
FIND = "generate_prefix.py:PrefixPool.find"
HASH, ADMIT, MAKE_ROOM, CACHE = (f"generate_prefix.py:PrefixScheduler.{name}" for name in (
    "hash_of_page", "admit", "make_room", "cache_filled"))
CHANGE = "beyond/rollout.py:RolloutScheduler.change"
WINDOWS = "beyond/hybrid.py:HybridPaged.slots_of"

TRAPS = {   # name: [(function, code as it stands, code of the trap), ...]
    # which keys a token may see
    "published mask": [(RECTANGLE, "mask[b, ..., P + T - n:] = True", "mask[b, ..., P:] = True")],
    "pads of the past are seen": [
        (RECTANGLE, "mask[b, ..., P - start:P] = True", "mask[b, ..., :P] = True")],
    "no causal rule in a chunk": [
        (HEAD, ".tril(diagonal=S - T)", ".tril(diagonal=S - T if S == T else S)")],
    "causal rule from the top left": [(HEAD, ".tril(diagonal=S - T)", ".tril(diagonal=0)")],
    "NaN for a query without keys": [   # a pad's, where nothing zeroes its value in the next layer
        (HEAD, "weights.masked_fill(~see.any(dim=-1, keepdim=True), 0.0)", "weights")],
    "neighbours in a packed row": [
        (PACKED, "(owner[:, :, None] == owner[:, None, :]) & (owner[:, None, :] >= 0)",
         "owner[:, None, :] >= 0")],
    "a stream without boundaries": [
        ("generate_ragged.py:Flat.attend_masked", ", mask=self.mask)", ")")],
    "a chunk reads to the end of its prompt": [   # and there, nothing is written yet
        ("generate_ragged.py:Flat.attend", "request.kv.read(layer, end)",
         "request.kv.read(layer, max(end, len(request.prompt)))")],
    "a chunk reads pages to the end of its prompt": [
        (PAGED, "torch.tensor(self.ends)",
         "torch.tensor([max(end, len(self.plan[i][0].prompt))\n"
         "                                      for i, end in enumerate(self.ends)])")],
    # positions
    "column positions": [
        (RECTANGLE, "[*range(start, start + n)]", "[*range(P + T - n, P + T)]")],
    "static column positions": [
        (STATIC, "columns[self.start:] - self.pads[:, None]",
         "columns[self.start:].expand(len(self.plan), T).clone()")],
    "right padding": [   # all is right but the last column, which is sampled from
        (STATIC, "[request.pad] * (T - n) + request.slice(start, start + n)",
         "request.slice(start, start + n) + [request.pad] * (T - n)"),
        (STATIC, "- self.pads[:, None]", "- self.pads[:, None] * (self.start > 0)"),
        (STATIC, "(columns >= self.pads[:, None])",
         "((columns < W - self.pads[:, None]) | (columns >= W))"),
        (STATIC, "T = self.end - self.start",
         "T, W = self.end - self.start, max(len(r.prompt) for r in self.requests)")],
    "positions that run on in a packed row": [
        (PACKED, "torch.arange(lengths[i])", "torch.arange(first, end)")],
    # where keys and values are kept
    "pads written to the cache": [
        (GATHER, "k[b, :, T - n:], v[b, :, T - n:]", "k[b, :, :n], v[b, :, :n]")],
    "pads of the past are not zeros": [   # uninitialised memory may hold NaN, and 0 * NaN is NaN
        (GATHER, "v.new_zeros(*v.shape[:-2], P, v.size(-1))",
         "v.new_full((*v.shape[:-2], P, v.size(-1)), float('nan'))")],
    "values of new pads reach the sum": [   # a pad's state may overflow, and 0 * inf is NaN
        (COLUMNS, "v.masked_fill(hidden, 0.0)", "v"),
        (GATHER, "v.masked_fill(hidden, 0.0)", "v")],
    "caches in packed order": [
        (PACKED, "zip(*self.places)", "zip(*self.places)\n        self.places.sort()")],
    "one-token prompts are lost": [   # as if a prompt were a run of rising positions
        (UNPACK, "k[row, :, first:end], v[row, :, first:end]",
         "*(t[row, :, first:end] * (end - first > 1) for t in (k, v))")],
    "pages read in one piece": [
        (READ, "block_table[i, :math.ceil(S / page_size)]",
         "(block_table[i, 0] + torch.arange(-(-S // page_size))) % k_pages.size(-3)")],
    "pages read in the order of the pool": [   # the causal rule minds
        (READ, "block_table[i, :math.ceil(S / page_size)]",
         "block_table[i, :math.ceil(S / page_size)].sort().values")],
    "new keys in the last page": [   # as if a pass never filled more than one page of a request
        (PAGED, "self.positions // page_size]", "(self.seq_lens[row] - 1) // page_size]")],
    "request by request, backwards": [   # one may have found pages that this pass still writes
        (ATTEND, "        k_slots[:, self.slot_mapping] = k\n"
                 "        v_slots[:, self.slot_mapping] = v\n", ""),
        (ATTEND, "return self.read_pages(q, k_pages, v_pages)",
         "out = []\n"
         "        for i in reversed(range(len(self.plan))):\n"
         "            new = slice(*self.cu_seqlens[i:i + 2])\n"
         "            k_slots[:, self.slot_mapping[new]] = k[:, new]\n"
         "            v_slots[:, self.slot_mapping[new]] = v[:, new]\n"
         "            out.insert(0, paged_attention(\n"
         "                q[..., new, :], k_pages, v_pages,\n"
         "                self.query_start_loc[i:i + 2] - new.start,\n"
         "                self.seq_lens[i:i + 1], self.block_table[i:i + 1]))\n"
         "        return torch.cat(out, dim=-2)")],
    "slot -1 is a slot": [   # padding to a captured size, as engines do it: -1 means nowhere
        (ATTEND, "k_slots[:, self.slot_mapping] = k\n",
         "slots = torch.cat([self.slot_mapping, self.slot_mapping.new_tensor([-1])])\n"
         "        k_slots[:, slots] = torch.cat([k, k[:, -1:]], dim=1)\n")],
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
        (SCHEDULE, "for request in self.running:",
         "for request in sorted(self.running, key=lambda each: -each.todo):")],
    "admits beyond the budget": [(SCHEDULE, "while budget and", "while")],
    "admits in a step that preempts": [(SCHEDULE, " and not preempted", "")],
    "admits what can never fit": [
        ("scheduler.py:Scheduler.add", "request.kv_capacity > self.max_kv_tokens", "False")],
    "a preempted request goes to the end": [
        (PREEMPT, "self.waiting.appendleft(request)", "self.waiting.append(request)")],
    "a stale count after preemption": [
        (PREEMPT, "request.computed = 0", "pass")],
    # pages that requests share
    "all of a prompt is found": [   # and no query is left
        (ADMIT, "(request.todo - 1) //", "request.todo //")],
    "pages known by their own tokens": [(HASH, "hashes[-1] if hashes else b\"\"", "b\"\"")],
    "pages known by the number of the page before": [   # which another may have taken since
        (HASH, "hashes[-1] if hashes else b\"\"", "b\"\""),
        (FIND, "pages = []",
         "found = []\n"
         "        for each in hashes:\n"
         "            pages = self.cached.get((found[-1] if found else None, each))\n"
         "            if not pages:\n"
         "                break\n"
         "            found.append(next(iter(pages)))\n"
         "        return found"),
        (CACHE, "self.hash_of_page(request, i))",
         "(\n                request.block_table[i - 1] if i else None, "
         "self.hash_of_page(request, i)))")],
    "page hashes that collide": [   # by chance here; by intent, if the hash can be predicted
        ("generate_prefix.py:page_hash", ".digest()", ".digest()[:1]")],
    "cached after finished requests have let go": [   # as if a page were found after its pass
        (MAKE_ROOM, "self.cache_filled(request, request.computed, request.computed + n)",
         "span = request, request.computed, request.computed + n\n"
         "            self.late = [*vars(self).get('late', ()), span]"),
        (UPDATE, "self.release()",
         "self.release()\n"
         "        for request, start, end in vars(self).pop('late', ()):\n"
         "            if request.block_table:\n"
         "                self.cache_filled(request, start, end)")],
    "a failed pass leaves pages that can be found": [
        ("generate_prefix.py:PrefixScheduler.undo", "self.pool.forget(page)", "pass")],
    "a request that found a page of a failed pass goes on": [
        ("generate_prefix.py:PrefixScheduler.undo", "self.preempt(request)", "pass")],
    "an assumed token names a page": [
        (CACHE, "end = min(end, request.num_tokens)", "pass")],
    "a block table is an alias": [   # no trap before `find` keeps the lists that it hands out
        (FIND, "return pages",
         "return vars(self).setdefault('found', {}).setdefault(tuple(pages), pages)"),
        (ADMIT, "request.block_table = []", "request.block_table = found"),
        (ADMIT, "self.pool.share(request.block_table, found)", "self.pool.share([], found)")],
    "a duplicate is freed while a table names it": [
        ("generate_prefix.py:PrefixPool.register", "self.hash_of[page] = digest",
         "if page not in self.cached.get(digest, [page]):\n            self.free([page])\n"
         "        self.hash_of[page] = digest")],
    # orders other than first come, first served; guesses
    "those that run are sorted by rank": [   # an incomplete prompt may stand before decodes
        ("beyond/fairness.py:FairScheduler.schedule", "self.go_on()",
         "self.running.sort(key=self.rank.get)\n        self.go_on()")],
    "pages of accepted guesses have no name": [
        ("beyond/speculative.py:generate",
         "scheduler.cache_filled(request, request.computed, request.computed + n)", "pass")],
    # weights that change, sessions that pause, layers with a window
    "the prefix cache outlives the weights": [
        (CHANGE, "self.pool.cached.clear()", "pass"),
        (CHANGE, "self.pool.hash_of.clear()", "pass")],
    "pages of old keys are cached": [
        ("beyond/rollout.py:RolloutScheduler.cache_filled", "if request not in self.stale:",
         "if True:")],
    "what is held is not counted": [
        ("beyond/sessions.py:SessionScheduler.free",
         "self.pool.share(pages, request.block_table[:full])",
         "pages += request.block_table[:full]")],
    "a page of the window is given back": [
        ("beyond/hybrid.py:HybridScheduler.schedule", "first(window, request.computed)",
         "first(window, request.computed + 1)")],
    "a poisoned null page": [   # stands for all passed pages: hidden, but 0 * NaN is NaN
        (WINDOWS, "page or 0", "self.pool.number if page is None else page"),
        (WINDOWS, "max(0, start - window + 1)", "0"),
        ("beyond/hybrid.py:generate", "KV(number * page_size)", "KV((number + 1) * page_size)"),
        ("beyond/hybrid.py:HybridPaged.attend", "v_slots[:, slot_mapping] = v",
         "v_slots[:, slot_mapping] = v\n"
         "        for t in k_slots, v_slots:\n"
         "            t[:, -self.pool.page_size:] = float('nan')")],
}


@contextmanager
def broken(name, show=True):
    """Inserts a trap for the `with` block, and prints the lines that it changes."""
    with put_in(edits_of(name), show):
        yield


def edits_of(name):
    """A trap's edits: [(function, old, new), ...]"""
    if name not in TRAPS:
        raise EditError(f"there is no trap {name!r}, only {', '.join(map(repr, TRAPS))}")
    return TRAPS[name]
