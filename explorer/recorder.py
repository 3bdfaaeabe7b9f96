"""
Records a run while it happens, slot by slot, for the explorer (explorer/page.py).

    trace = record(generate, model, requests, max_batch=8)     # trace.recording: a Recorder

The trace knows what a forward pass costs. The recorder is an X-ray, and adds what each pass holds:
which token is in which slot, which keys that slot really sees, and how much memory every request
has. All of it is read from the layout and the caches of the running stage.

A frame, of one forward pass, has for each row of the tensor and each slot in it

    owner      number of the request; -1 for a pad; -2 - number for a slot of a finished request
    position   of the owner's token that is in it; 0 for pads

and, for those slots that see other keys than their own request's up to themselves, by the number
of the slot in the tensor

    sees       [[request, from, to, ...], pads, blanks]: ranges of positions, and numbers of pad
               keys and of keys to which nothing was written
    shift      position given to the model, minus the token's own
    guesses    token that was guessed for a position whose token is not known yet
"""
import inspect
from dataclasses import replace

import numpy as np
import torch

from checks.check import Check
from checks.xray import PAD, XRay, keys_of

# The X-ray gives each token an id, and each key a vector as long as there are ids. Beyond this
# many tokens, prompts and longest answers together, the recorder leaves it out.
MOST_TOKENS = 4000


class Recorder(XRay):
    """
    For one run of `requests`, on any model that the stages run.

    check: a checks.check.Check that listens to the same run; None: outputs are not checked
    """

    def __init__(self, model, requests, check=None):
        super().__init__(model, requests)
        self.check = check
        self.number = {request: i for i, request in enumerate(self.requests)}
        tokens = len(self.token_of) - 1
        self.left_out = "" if tokens <= MOST_TOKENS else (
            f"prompts and longest answers have {tokens:,} tokens, more than {MOST_TOKENS:,}")
        owners = [self.number[request] for request, _ in self.token_of[1:]]
        positions = [position for _, position in self.token_of[1:]]
        self.owner = np.array([-1, *owners, -1])             # of an id; -1 for PAD and for blanks
        self.position = np.array([0, *positions, 0])
        self.length = np.bincount(owners).tolist()           # of ids that a request has
        self.first_id = np.array([*self.first.values()])     # of a request, by its number
        self.frames = []                                     # one dict for each forward pass
        self.wrong, self.sentences = 0, []                   # what the X-ray found, see faults
        self.memory, self.expected, self.kept = {}, {}, []

    # --- one forward pass ---

    @torch.inference_mode()
    def look(self, model, arguments):
        """Called before each pass with the model's arguments."""
        _, given, attend, _ = arguments
        batch, seen, same = attend.__self__, None, None
        if self.left_out:
            ids = self.ids_of(batch)
        else:
            same = super().look(model, arguments)
            sight = self.passes.pop()
            ids, seen = sight.ids, self.ranges(sight)
        past = keys_of(batch) - ids.size(-1) if ids.dim() == 2 else 0
        frame = {"past": past, **self.slots(batch, ids, given, seen), **self.changes(batch)}
        wrong = sum(frame["owner"][slot // ids.size(-1)][slot % ids.size(-1)] >= 0
                    for slot in frame["sees"].keys() | frame["shift"].keys())
        if wrong and not self.sentences:
            self.sentences = list(self.faults_of(len(self.frames), sight))[:5]
        self.wrong += wrong
        self.frames.append(frame)        # past: key columns of a row
        return same

    def stand_in(self, request):
        """With ids for guesses, too, which are laid out before any is known to be right."""
        twin, length = super().stand_in(request), self.length[self.number[request]]
        known = len(request.tokens)
        twin.generated += range(self.first[request] + known, self.first[request] + length)
        return twin

    def ranges(self, sight):
        """What each slot sees: ([request, from, to, ...], pads, blanks)."""
        ids = sight.ids.flatten().cpu().numpy()
        counts = sight.seen.flatten(0, -2).cpu().numpy()
        slots, keys = counts[:, 1:-1].nonzero()
        keys = keys + 1
        if hasattr(sight.batch, "pages"):   # a page that equal beginnings share counts as one's own
            same_as = np.array(self.shared_keys(sight.batch))
            mine = self.first_id[self.owner[ids[slots]]] + self.position[keys]
            mine = np.minimum(mine, len(self.token_of))
            keys = np.where(same_as[mine] == same_as[keys], mine, keys)
            order = np.lexsort((keys, slots))
            slots, keys = slots[order], keys[order]
        seen = [([], int(row[PAD]), int(row[-1])) for row in counts]
        if len(keys):
            goes_on = ((np.diff(slots) == 0) & (np.diff(keys) == 1)
                       & (np.diff(self.owner[keys]) == 0))
            starts = np.flatnonzero(np.append(True, ~goes_on))
            ends = np.append(starts[1:], len(keys)) - 1
            for slot, a, b in zip(slots[starts].tolist(), keys[starts], keys[ends]):
                seen[slot][0].extend(
                    (int(self.owner[a]), int(self.position[a]), int(self.position[b]) + 1))
        return seen

    def slots(self, batch, ids, given, seen):
        """Owner and position of each slot, and what is not as it should be."""
        width, flat = ids.size(-1), ids.flatten().numpy(force=True)
        owner, position = self.owner[flat], self.position[flat]
        rows = batch.plan if len(batch.plan) * width == len(flat) else ()
        for row, (request, n) in enumerate(rows):
            if not n:   # of a static batch; its request has finished
                owner[row * width:(row + 1) * width] = -2 - self.number[request]
        shift = np.where(owner >= 0, given.flatten().numpy(force=True) - position, 0)
        tokens, known = batch.tokens.flatten().tolist(), [len(r.tokens) for r in self.requests]
        guesses = {slot: tokens[slot] for slot, (i, at) in enumerate(zip(owner, position))
                   if i >= 0 and at >= known[i]}
        sees = {slot: each for slot, each in enumerate(seen or ()) if each != (
            [int(owner[slot]), 0, int(position[slot]) + 1], 0, 0)}
        return {"owner": owner.reshape(-1, width).tolist(), "sees": sees, "guesses": guesses,
                "position": position.reshape(-1, width).tolist(),
                "shift": {int(slot): int(shift[slot]) for slot in shift.nonzero()[0]}}

    def changes(self, batch):
        """
        What the caches look like at this pass, as far as it differs from the last one.

        room:     {request: capacity in tokens, or block table; None: it holds nothing}
        computed: {request: tokens in its cache}, where that does not follow from its last pass
        kept:     free pages that can still be found, oldest first; None: the same as before
        columns:  filled columns of a cache that belongs to the whole batch, pads included; else 0
        """
        room, computed = {}, {}
        rows = getattr(batch, "requests", ())   # of a static batch, which owns the cache
        for request, i in self.number.items():
            kv, table = batch.kv if request in rows else request.kv, request.block_table
            now = getattr(kv, "capacity", None) if table is None else list(table)
            if now != self.memory.get(i):
                room[i] = self.memory[i] = now
            if request.computed != self.expected.get(i, 0):
                computed[i] = self.expected[i] = request.computed
        for request, n in batch.plan:
            self.expected[self.number[request]] = request.computed + n
        pages, before = getattr(batch, "pages", None), self.kept
        self.kept = [page for page in pages.free if page in pages.key_of] if pages else []
        self.pool = pages and {"pages": pages.number, "page_size": pages.size}
        return {"room": room, "computed": computed, "columns": batch.end if rows else 0,
                "kept": self.kept if self.kept != before else None}


def record(generate, model, requests, timed=None, reference=None, **knobs):
    """
    Runs a stage on copies of `requests` under a Recorder. Returns its trace.

    timed:     the trace of another run, whose times count, unless it did something else because
               rounding flipped a near-tie; None: an undisturbed run comes first
    reference: the model that the outputs are checked against; None: they are not checked
    """
    if timed is None:
        timed = generate(model, [replace(request) for request in requests], **knobs)
    copies = [replace(request) for request in requests]
    check = reference and Check(reference, copies)
    with Recorder(model, copies, check) as recorder:
        trace = generate(model, copies, on_token=check and check.on_token, **knobs)
    defaults = {name: p.default for name, p in inspect.signature(generate).parameters.items()
                if name not in ("model", "requests", "on_token")}
    recorder.generate, recorder.knobs = generate, defaults | knobs
    if work_of(trace) == work_of(timed):
        trace.started, trace.step_times = timed.started, timed.step_times
        for p, twin in zip(trace.passes, timed.passes):
            p.seconds = twin.seconds
        for request, twin in zip(trace.requests, timed.requests):
            request.token_times = twin.token_times
    trace.recording = recorder
    return trace


def work_of(trace):
    """What a run did, whatever time it took."""
    return ([(p.step, p.shape, p.work, p.finished) for p in trace.passes],
            [(request.name, request.token_steps) for request in trace.requests])
