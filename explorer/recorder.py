"""
Records a run while it happens, slot by slot, for the explorer (explorer/page.py).

    trace = record(generate, model, requests, max_batch=8)     # trace.recording: a Recorder

The trace knows what a forward pass costs. The recorder is an X-ray, and adds what each pass holds:
which token is in which slot, which keys that slot really sees, and how much memory every request
has. All of it is read from the layout and the caches of the running stage.

A *run of slots* is a list, as long as its last value that is not the default:

    [owner, first, n, sees, grows, pads, blanks, shift]

    owner    number of the request; -1 for pads; -2 - number for slots of a finished request
    first, n token positions first .. first + n - 1 of the owner, in n neighbouring slots
    sees     [request, from, to, ...]: the keys that the first slot sees, as ranges of positions
    grows    1: each further slot sees one key more, at the end of the last range. 0: the same keys
    pads     pad keys that each slot sees;  blanks: keys seen to which nothing was written
    shift    position given to the model, minus the token's own; 0 where all is right
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
DEFAULTS = (1, 0, 0, 0)   # of grows, pads, blanks and shift


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
        self.first_id = np.array([*self.first.values()])     # of a request, by its number
        self.frames = []                                     # one dict for each forward pass
        self.wrong, self.sentences = 0, []                   # what the X-ray found, see faults
        self.memory, self.expected, self.kept = {}, {}, []

    # --- one forward pass ---

    @torch.inference_mode()
    def look(self, model, arguments):
        """Called before each pass with the the model's arguments."""
        _, given, attend, _ = arguments
        batch, seen, same = attend.__self__, None, None
        if self.left_out:
            ids = self.ids_of(batch)
        else:
            same = super().look(model, arguments)
            sight = self.passes.pop()
            ids, seen = sight.ids, self.ranges(sight)
            self.note_faults(sight, seen)
        past = keys_of(batch) - ids.size(-1) if ids.dim() == 2 else 0
        self.frames.append({"past": past, **self.changes(batch),   # past: key columns of a row
                            "rows": self.rows(batch, ids, given.flatten().tolist(), seen)})
        return same

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

    def note_faults(self, sight, seen):
        """Counts the tokens that see what they should not, or are at a wrong position."""
        slots = zip(sight.ids.flatten().tolist(), sight.positions.flatten().tolist(), seen)
        wrong = sum(
            (sees, given) != (([int(self.owner[id]), 0, int(self.position[id]) + 1], 0, 0),
                              int(self.position[id])) for id, given, sees in slots if id != PAD)
        if wrong and not self.sentences:
            self.sentences = list(self.faults_of(len(self.frames), sight))[:5]
        self.wrong += wrong

    def rows(self, batch, ids, given, seen):
        """The slots of a pass, row by row, as runs."""
        width, ids, rows = ids.size(-1), ids.flatten().tolist(), []
        for start in range(0, len(ids), width):
            row = []
            for slot in range(start, start + width):
                owner, position, shift = int(self.owner[ids[slot]]), 0, 0
                if ids[slot] != PAD:
                    position = int(self.position[ids[slot]])
                    shift = given[slot] - position
                elif len(batch.plan) * width == len(ids) and not batch.plan[start // width][1]:
                    owner = -2 - self.number[batch.plan[start // width][0]]
                sees, pads, blanks = seen[slot] if seen else (None, 0, 0)
                one = [owner, position, 1, sees, 1, pads, blanks, shift]
                if not (row and extend(row[-1], one)):
                    row.append(one)
            rows.append([trimmed(run) for run in row])
        return rows

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

    timed:     the trace of an undisturbed run, whose times count, unless it did something else
               because rounding flipped a near-tie; None: it runs first
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
        for what in "passes", "started", "step_times":
            setattr(trace, what, getattr(timed, what))
        for request, twin in zip(trace.requests, timed.requests):
            request.token_times = twin.token_times
    trace.recording = recorder
    return trace


def work_of(trace):
    """What a run did, whatever time it took."""
    return ([replace(p, seconds=0) for p in trace.passes],
            [(request.name, request.generated) for request in trace.requests])


def extend(run, one):
    """Whether a run of slots goes on with the next slot `one`; if so, adds it."""
    owner, first, n, sees, grows, *rest = run
    if owner != one[0] or rest != one[5:] or one[1] != (first + n if owner >= 0 else 0):
        return False
    further = one[3]
    if n == 1 and sees and further == sees:
        run[4] = grows = 0
    if further != (sees and [*sees[:-1], sees[-1] + grows * n]):
        return False
    run[2] += 1
    return True


def trimmed(run):
    """Without the defaults at its end."""
    n = len(run)
    while n > 4 and run[n - 1] == DEFAULTS[n - 5]:
        n -= 1
    return run[:n] if n > 4 or run[3] is not None else run[:3]
