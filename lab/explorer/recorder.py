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
        self.frames = []      # one dict for each forward pass
        self.wrong = 0        # tokens that saw what they must not, or had a wrong position
        self.sentences = []   # what was wrong with the first of them
        self.memory = {}      # {number of a request: what it held in the last pass}

    # --- one forward pass ---

    @torch.inference_mode()
    def look(self, step, batch):
        """Called before each forward pass."""
        if self.left_out:
            frame = self.frame(batch, self.twin_of(batch).tokens.long(), {})
        else:
            super().look(step, batch)
            sight = self.passes.pop()
            frame = self.frame(batch, sight.ids, self.wrong_sights(sight))
            if wrong_slots(frame) and not self.sentences:
                self.sentences = list(self.faults_of(len(self.frames), sight))[:5]
        self.wrong += len(wrong_slots(frame))
        self.frames.append(frame)

    def frame(self, batch, ids, sees):
        """What a forward pass holds. ids: the X-ray's, in the tensor's shape"""
        width = ids.size(-1)
        owner, position = self.slots(batch, ids)
        past = keys_of(batch) - width if ids.dim() == 2 else 0   # key columns of a row
        return {"past": past, "sees": sees, "shift": shifts(batch, owner, position),
                "owner": in_rows(owner, width), "position": in_rows(position, width),
                **self.caches(batch)}

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
            blank = len(self.token_of)
            places = []
            for key in sorted(look.seen.elements()):   # a key that is seen twice stands twice
                if key not in (PAD, blank):
                    places += self.place_of(key)
            wrong[look.slot] = [places, look.seen[PAD], look.seen[blank]]
        return wrong

    def slots(self, batch, ids):
        """(owner, position) of all slots, one after another."""
        width = ids.size(-1)
        owner, position = [], []
        for id in ids.flatten().tolist():
            request_number, place = self.place_of(id)
            owner.append(request_number)
            position.append(place)
        for row, (request, n) in enumerate(batch.plan):
            if n == 0:   # of a static batch; its request has finished
                finished = -2 - self.number[request]
                owner[row * width:(row + 1) * width] = [finished] * width
        return owner, position

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
        pool = getattr(batch, "pool", None)
        self.pool = pool and {"pages": pool.number, "page_size": pool.page_size}
        room = changes_of_memory(self.number, self.memory, batch)
        held = [memory for memory in self.memory.values() if memory]
        if pool:
            pages = set().union(*held)
            reserved = pool.page_size * len(pages)
        else:
            reserved = sum(held)
        is_static = hasattr(batch, "requests")
        columns = batch.end if is_static else 0
        return {"room": room, "at_once": len(held), "reserved": reserved, "columns": columns,
                "cached": cached_pages(pool)}


def wrong_slots(frame):
    return frame["sees"].keys() | frame["shift"].keys()


def shifts(batch, owner, position):
    """{slot: position that the model gets, minus the token's own}, where they differ."""
    differences = {}
    for slot, model_position in enumerate(batch.positions.flatten().tolist()):
        if owner[slot] >= 0 and model_position != position[slot]:
            differences[slot] = model_position - position[slot]
    return differences


def changes_of_memory(number, memory, batch):
    """
    {request: what it holds now}, where that has changed; see `caches`.

    number: {request: its number}; memory: {number: what it held}, which is brought up to date
    """
    changes = {}
    for request, i in number.items():
        holds = memory_of(request, batch)
        if holds != memory.get(i):
            changes[i] = memory[i] = holds
    return changes


def memory_of(request, batch):
    """A request's block table, the capacity of its cache in tokens, or None."""
    if request.block_table is not None:
        return list(request.block_table)
    in_static_batch = getattr(batch, "requests", ())   # which owns the cache
    kv = batch.kv if request in in_static_batch else request.kv
    return getattr(kv, "capacity", None)


def in_rows(values, width):
    return [values[i:i + width] for i in range(0, len(values), width)]


def cached_pages(pool):
    """Of the free queue: those that can still be found."""
    if pool is None or not hasattr(pool, "hash_of"):
        return []
    return [page for page in pool.free_queue if page in pool.hash_of]


def record(generate, model, requests, reference=None, **knobs):
    """
    Runs a stage on copies of `requests` under a Recorder. Returns its trace.

    reference: the model that the outputs are checked against; None: they are not checked
    """
    copies = [replace(request) for request in requests]
    check = reference and Check(reference, copies)
    with Recorder(model, copies, check) as recorder:
        trace = generate(model, copies, on_token=check and check.on_token, **knobs)
    recorder.generate, recorder.knobs = generate, knobs_to_show(generate, knobs)
    trace.recording = recorder
    return trace


def knobs_to_show(generate, knobs):
    """A stage's knobs with their values, its defaults included."""
    parameters = inspect.signature(generate).parameters.values()
    knobs = {parameter.name: parameter.default for parameter in parameters} | knobs
    for name in "model", "requests", "on_token", "scheduler_class", "layout":
        knobs.pop(name, None)   # what the page says otherwise: a class is in the stage's name
    return knobs


def what_ran(trace):
    """All of a run but its times."""
    passes = [(p.step, p.shape, p.work, p.finished) for p in trace.passes]
    return passes, [request.token_steps for request in trace.requests]


def take_times(trace, timed):
    """
    Gives a recorded run the times of one that nothing disturbed, unless that run did something
    else, where rounding flipped a near-tie. Returns the recorded run's trace.
    """
    if what_ran(trace) == what_ran(timed):
        trace.started, trace.step_times = timed.started, timed.step_times
        for p, twin in zip(trace.passes, timed.passes):
            p.seconds = twin.seconds
        for request, twin in zip(trace.requests, timed.requests):
            request.token_times = twin.token_times
    return trace
