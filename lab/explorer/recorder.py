"""
Records a run while it happens, slot by slot, for the explorer (lab/explorer/page.py).

The trace knows what a forward pass costs. The recorder is an X-ray, and adds what each pass holds:
which token is in which slot, which keys that slot really sees, and how much memory every request
has. All of it is read from the layout and the caches of the running stage.

A frame, of one forward pass, has for each row of the tensor and each slot in it

    owner      number of the request; -1 for a pad; -2 - number for a slot of a finished request
    position   of the owner's token that is in it; 0 for pads

and, by the number of the slot in the tensor, for those tokens of which it is not as it should be

    sees       [[request, position, request, position, ...], pads, blanks]: the keys that it sees,
               and numbers of pad keys and of keys to which nothing was written
    shift      position given to the model, minus the token's own
"""
import inspect
from dataclasses import replace

import torch

from lab.checks.check import Check
from lab.checks.xray import PAD, XRay, keys_of

# The X-ray gives each token an id, and each key a vector as long as there are ids. Beyond this
# many tokens, prompts and longest answers together, the recorder leaves it out.
MOST_TOKENS = 4000


class Recorder(XRay):
    """
    For one run of `requests`, on any model that the stages run.

    check: a lab.checks.check.Check that listens to the same run; None: outputs are not checked
    """

    def __init__(self, model, requests, check=None):
        super().__init__(model, requests)
        self.check = check
        self.number = {request: i for i, request in enumerate(self.requests)}
        tokens = len(self.token_of) - 1
        self.left_out = "" if tokens <= MOST_TOKENS else (
            f"prompts and longest answers have {tokens:,} tokens, more than {MOST_TOKENS:,}")
        self.frames = []                           # one dict for each forward pass
        self.wrong, self.sentences = 0, []         # what the X-ray found, see faults
        self.memory = {}

    # --- one forward pass ---

    @torch.inference_mode()
    def look(self, step, batch):
        """Called before each forward pass."""
        sees = {}
        if self.left_out:
            ids = self.twin_of(batch).tokens.long()
        else:
            super().look(step, batch)
            sight = self.passes.pop()
            ids, sees = sight.ids, self.wrong_sights(sight)
        past = keys_of(batch) - ids.size(-1) if ids.dim() == 2 else 0   # key columns of a row
        frame = {"past": past, "sees": sees, **self.slots(batch, ids),
                 **self.caches(batch)}
        wrong = len(sees.keys() | frame["shift"].keys())
        if wrong and not self.sentences and not self.left_out:
            self.sentences = list(self.faults_of(len(self.frames), sight))[:5]
        self.wrong += wrong
        self.frames.append(frame)

    def place_of(self, id):
        """(number of the request, position) of the token that an id names; of a pad (-1, 0)."""
        if id == PAD:
            return -1, 0
        request, position = self.token_of[id]
        return self.number[request], position

    def wrong_sights(self, sight):
        """What the tokens see that do not see exactly their own request up to themselves."""
        wrong = {}
        for look in self.looks(sight):
            if look.is_right:
                continue
            pads, blanks = look.seen[PAD], look.seen[len(self.token_of)]
            places = []
            for key in sorted(look.seen.elements()):   # a key that is seen twice stands twice
                if key not in (PAD, len(self.token_of)):
                    places += self.place_of(key)
            wrong[look.slot] = [places, pads, blanks]
        return wrong

    def slots(self, batch, ids):
        """Owner and position of each slot, and shifts."""
        width, given = ids.size(-1), batch.positions.flatten().tolist()
        owner, position = map(list, zip(*map(self.place_of, ids.flatten().tolist())))
        for row, (request, n) in enumerate(batch.plan):
            if not n:   # of a static batch; its request has finished
                owner[row * width:(row + 1) * width] = [-2 - self.number[request]] * width
        shift = {slot: told - own for slot, (i, own, told) in enumerate(zip(owner, position, given))
                 if i >= 0 and told != own}
        rows = range(0, len(owner), width)
        return {"owner": [owner[i:i + width] for i in rows],
                "position": [position[i:i + width] for i in rows], "shift": shift}

    def caches(self, batch):
        """
        What the caches look like before this pass.

        room:     {request: capacity in tokens, block table, or None}, where it differs from the
                  last pass
        cached:   pages in the free queue that can still be found, the next to be taken first
        at_once:  requests that hold memory
        reserved: tokens that have room in it; a page in several tables counts once
        columns:  filled columns of a cache that belongs to the whole batch, pads included; else 0
        """
        room = {}
        rows = getattr(batch, "requests", ())   # of a static batch, which owns the cache
        for request, i in self.number.items():
            kv, table = batch.kv if request in rows else request.kv, request.block_table
            now = getattr(kv, "capacity", None) if table is None else list(table)
            if now != self.memory.get(i):
                room[i] = self.memory[i] = now
        pool = getattr(batch, "pool", None)
        self.pool = pool and {"pages": pool.number, "page_size": pool.page_size}
        held = [now for now in self.memory.values() if now]
        reserved = pool.page_size * len(set().union(*held)) if pool else sum(held)
        return {"room": room, "at_once": len(held), "reserved": reserved,
                "columns": batch.end if rows else 0,
                "cached": [page for page in pool.free_queue
                           if page in getattr(pool, "hash_of", ())] if pool else []}


def record(generate, model, requests, reference=None, **knobs):
    """
    Runs a stage on copies of `requests` under a Recorder. Returns its trace.

    reference: the model that the outputs are checked against; None: they are not checked
    """
    copies = [replace(request) for request in requests]
    check = reference and Check(reference, copies)
    with Recorder(model, copies, check) as recorder:
        trace = generate(model, copies, on_token=check and check.on_token, **knobs)
    defaults = {name: p.default for name, p in inspect.signature(generate).parameters.items()
                if name not in ("model", "requests", "on_token")}
    recorder.generate, recorder.knobs = generate, defaults | knobs
    for knob in "scheduler_class", "layout":   # classes; the stage's name says which
        recorder.knobs.pop(knob, None)
    trace.recording = recorder
    return trace


def take_times(trace, timed):
    """
    Gives a recorded run the times of one that nothing disturbed, unless that run did something
    else, where rounding flipped a near-tie. Returns the recorded run's trace.
    """
    did, again = ([[(p.step, p.shape, p.work, p.finished) for p in run.passes],
                   [request.token_steps for request in run.requests]] for run in (trace, timed))
    if did == again:
        trace.started, trace.step_times = timed.started, timed.step_times
        for p, twin in zip(trace.passes, timed.passes):
            p.seconds = twin.seconds
        for request, twin in zip(trace.requests, timed.requests):
            request.token_times = twin.token_times
    return trace
