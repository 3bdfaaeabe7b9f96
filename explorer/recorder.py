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
import time
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from toolbox.check import Check
from toolbox.xray import PAD, XRay

# The X-ray gives each token an id, and each key a vector as long as there are ids. Beyond this
# many tokens, prompts and longest answers together, the recorder leaves it out.
MOST_TOKENS = 4000
DEFAULTS = (1, 0, 0, 0)   # of grows, pads, blanks and shift


class Recorder(XRay):
    """
    Hooks on any model that the stages run, for one run of `requests`.

    check: a toolbox.check.Check that listens to the same run; None: outputs are not checked
    """

    def __init__(self, model, requests, check=None, most_tokens=MOST_TOKENS):
        super().__init__(model, requests)
        self.check = check
        self.number = {request: i for i, request in enumerate(self.requests)}
        tokens = len(self.token_of) - 1
        self.has_sights = tokens <= most_tokens
        self.left_out = "" if self.has_sights else (
            f"prompts and longest answers have {tokens:,} tokens, more than {most_tokens:,}")
        owners = [self.number[request] for request, _ in self.token_of[1:]]
        positions = [position for _, position in self.token_of[1:]]
        self.owner = np.array([-1, *owners, -1])             # of an id; -1 for PAD and for blanks
        self.position = np.array([0, *positions, 0])
        self.first_id = np.array([*self.first.values()])     # of a request, by its number
        self.same_as = np.arange(len(self.token_of) + 1)     # id -> the first id with equal prefix
        self.prefixes, self.known = {}, [0] * len(self.requests)
        self.frames = []                                     # one dict for each forward pass
        self.spent = []                                      # (start, end) of each look
        self.wrong, self.sentences = 0, []                   # what the X-ray found, see faults
        self.memory, self.expected, self.kept = {}, {}, []

    # --- one forward pass ---

    @torch.inference_mode()
    def look(self, model, arguments):
        """Called before each pass with the model's arguments: (tokens, positions, attend, rows)."""
        began = time.perf_counter()
        _, given, attend, _ = arguments
        batch, seen, same = attend.__self__, None, None
        if self.has_sights:
            same = super().look(model, arguments)
            sight = self.passes.pop()
            ids, seen = sight.ids, self.ranges(sight)
            self.note_faults(sight, seen)
        else:
            ids = self.ids_of(batch)
        width, past = ids.size(-1), 0
        if ids.dim() == 2:   # key columns before the new ones, of every row
            keys = batch.mask.size(-1) if hasattr(batch, "mask") else batch.end
            past = keys - width
        self.frames.append({"past": past, **self.changes(batch),
                            "rows": self.rows(batch, ids.flatten().tolist(),
                                              given.flatten().tolist(), width, seen)})
        self.spent.append((began, time.perf_counter()))
        return same

    def ranges(self, sight):
        """What each slot sees: ([request, from, to, ...], pads, blanks)."""
        ids = sight.ids.flatten().cpu().numpy()
        counts = sight.seen.flatten(0, -2).cpu().numpy()
        slots, keys = counts[:, 1:-1].nonzero()
        keys = keys + 1
        if hasattr(sight.batch, "pages"):   # a page that equal beginnings share counts as one's own
            self.learn_prefixes()
            mine = self.first_id[self.owner[ids[slots]]] + self.position[keys]
            mine = np.minimum(mine, len(self.token_of))
            keys = np.where(self.same_as[mine] == self.same_as[keys], mine, keys)
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

    def learn_prefixes(self):
        """Brings same_as up to date: two tokens are the same if all before them are equal, too."""
        for request, i in self.number.items():
            start = self.known[i]
            for position, token in enumerate(request.slice(start, len(request.tokens)), start):
                id = self.first[request] + position
                before = self.same_as[id - 1] if position else None
                self.same_as[id] = self.prefixes.setdefault((before, token), id)
            self.known[i] = len(request.tokens)

    def note_faults(self, sight, seen):
        """Counts the tokens that see what they should not, or are at a wrong position."""
        slots = zip(sight.ids.flatten().tolist(), sight.positions.flatten().tolist(), seen)
        wrong = sum(
            (sees, given) != (([int(self.owner[id]), 0, int(self.position[id]) + 1], 0, 0),
                              int(self.position[id])) for id, given, sees in slots if id != PAD)
        if wrong and not self.sentences:
            shared = dict(enumerate(self.same_as.tolist()))
            self.sentences = list(self.faults_of(len(self.frames), sight, shared))[:5]
        self.wrong += wrong

    def rows(self, batch, ids, given, width, seen):
        """The slots of a pass, row by row, as runs."""
        rows = []
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
        kept:     published pages that are in no block table; None: the same as before
        columns:  filled columns of a cache that belongs to the whole batch, pads included; else 0
        """
        room, computed = {}, {}
        rows = getattr(batch, "requests", ())   # of a static batch, which owns the cache
        for request, i in self.number.items():
            kv = batch.kv if request in rows else request.kv
            now = list(kv) if isinstance(kv, list) else getattr(kv, "capacity", None)
            if now != self.memory.get(i):
                room[i] = self.memory[i] = now
            if request.computed != self.expected.get(i, 0):
                computed[i] = self.expected[i] = request.computed
        for request, n in batch.plan:
            self.expected[self.number[request]] = request.computed + n
        kept = list(getattr(getattr(batch, "pages", None), "kept", ()))
        frame = {"room": room, "computed": computed, "kept": kept if kept != self.kept else None,
                 "columns": batch.end if rows else 0}
        self.kept = kept
        if not self.frames:
            pages = getattr(batch, "pages", None)
            self.pool = pages and {"pages": pages.number, "page_size": pages.size}
        return frame

    # --- the whole run ---

    def finish(self, trace, timed=None, **knobs):
        """
        Attaches itself to the trace. knobs: those of the run, for the page to show.

        timed: the trace of an undisturbed run of the same requests. If both did the same, its
               times replace the recorded ones, from which only the recorder's own are subtracted:
               after each look the processor's caches are cold.
        """
        if timed and self.same_work(trace, timed):
            trace.started, trace.step_times = timed.started, timed.step_times
            for p, q in zip(trace.passes, timed.passes):
                p.seconds = q.seconds
            for request, twin in zip(trace.requests, timed.requests):
                request.token_times = twin.token_times
        else:
            self.subtract_own_time(trace)
        self.trace, self.knobs, trace.recording = trace, knobs, self
        return trace

    def same_work(self, trace, timed):
        def work(trace):
            return ([replace(p, seconds=0) for p in trace.passes],
                    [(r.name, r.generated) for r in trace.requests])
        return work(trace) == work(timed)

    def subtract_own_time(self, trace):
        ends = [end for _, end in self.spent]
        total = [0.0, *accumulate(end - start for start, end in self.spent)]

        def undisturbed(t):
            return t - total[bisect_right(ends, t)]

        for p, (start, end) in zip(trace.passes, self.spent):
            p.seconds -= end - start
        trace.step_times = {step: undisturbed(t) for step, t in trace.step_times.items()}
        for request in self.requests:
            request.token_times = [undisturbed(t) for t in request.token_times]


def record(generate, model, requests, timed=None, reference=None, **knobs):
    """
    Runs a stage on copies of `requests` under a Recorder. Returns its trace.

    timed:     the trace of an undisturbed run; its times count, see Recorder.finish
    reference: the model that the outputs are checked against; None: they are not checked
    """
    copies = [replace(request) for request in requests]
    check = reference and Check(reference, copies)
    with Recorder(model, copies, check) as recorder:
        trace = generate(model, copies, on_token=check and check.on_token, **knobs)
    known = inspect.signature(generate).parameters
    defaults = {name: p.default for name, p in known.items()
                if name not in ("model", "requests", "on_token")}
    recorder.generate = generate
    return recorder.finish(trace, timed, **{**defaults, **knobs})


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
