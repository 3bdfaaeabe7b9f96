"""
Rollouts: the weights change while requests run. Which keys and values may still be used?

Reinforcement learning samples answers (*rollouts*) from a model that is being trained. New weights
come while some answers are half done. Three modes say what becomes of those:

                           the new weights are there
                           |
    keep         P a a a   b b b b            P: a prompt;  a: tokens of the old weights
    recompute    P a a a   R c c c c          b: of the new ones, but over keys of the old ones
    wait         P a a a   a a a a   P c c    c: of the new ones alone;  R: all computed again
                                     |
                                     only now do they change: all that had begun have ended

In any mode the prefix cache must be emptied. Pages are found by their tokens, and tokens do not say
which weights computed the keys. For the same reason a request that holds old keys, a *stale* one,
must not cache its pages. *Where the reset is forgotten, 19 of 28 requests that began after a change
get wrong tokens, and no error is raised.* (It happened: NeMo-RL #4018, lmdeploy #4917.) What the
modes cost, with three changes while 48 requests get 1,584 tokens:

    mode         passes   tokens computed   sampled over old keys
    keep            130             2,424              51%
    recompute       145             3,443               0%
    wait            171             2,296               0%

What is *identical* then? Each request gets the tokens that it would get alone, if its weights
changed at the same tokens. `request.spans` lists what was computed with which weights. If they are
of one version, this is the contract of all stages.

In vLLM this is pause_generation(mode="abort", "wait" or "keep") and its clear_cache; SGLang aborts,
retracts or pauses in place. PipelineRL (arXiv 2509.19128) updates weights while requests run.

    python -m beyond.rollout     the wrong tokens and the costs, counted
"""
if __spec__ is None:
    raise SystemExit("start it in the folder above: python -m beyond.rollout")

from bisect import bisect_right
from functools import partial
from itertools import pairwise

import generate_prefix
from generate_prefix import PrefixScheduler
from toolbox.validate import check, is_whole, one_of


class Versions:
    """Models in the place of one. They differ in their weights; models[version] computes."""

    def __init__(self, models):
        self.models = models
        self.version = 0
        self.config = models[0].config
        self.device = models[0].device

    def __call__(self, *inputs):
        return self.models[self.version](*inputs)


class RolloutScheduler(PrefixScheduler):
    """
    A PrefixScheduler under which the weights change.

    models, changes, mode: Versions, and the others of `generate`
    stale:                 the running requests that hold keys of older weights
    closed:                whether a change waits for the end of all that have begun
    """

    def __init__(self, max_batch, token_budget, pages, page_size, models, changes, mode):
        super().__init__(max_batch, token_budget, pages, page_size)
        self.models = models
        self.changes = changes
        self.mode = mode
        self.stale = set()
        self.closed = False

    def add(self, request):
        super().add(request)
        request.spans = []   # (version, first, end): tokens that it computed with it, or found

    def schedule(self, step):
        """As PrefixScheduler.schedule; but first, the weights change if it is time."""
        version = bisect_right(self.changes, step)   # as many as are due by now
        if version > self.models.version:
            # a preempted request that has tokens has begun, too
            begun = self.running or any(request.generated for request in self.waiting)
            self.closed = self.mode == "wait" and bool(begun)
            if not self.closed:
                self.change(version)
        return super().schedule(step)

    def change(self, version):
        """The next pass computes with other weights, so no page can be found any more."""
        self.models.version = version
        self.pool.cached.clear()
        self.pool.hash_of.clear()
        if self.mode == "recompute":
            for request in reversed(list(self.running)):   # the first in the queue arrived first
                self.preempt(request)
        self.stale.update(self.running)

    def admit(self, request):
        """As PrefixScheduler.admit; but a request that has no token yet waits if `closed`."""
        if self.closed and not request.generated:
            return False
        if not super().admit(request):
            return False
        if request.computed:   # these tokens were found, so the present weights computed them
            request.spans.append((self.models.version, 0, request.computed))
        return True

    def cache_filled(self, request, start, end):
        """Notes what these weights compute. A stale request's pages cannot be found."""
        request.spans.append((self.models.version, start, end))
        if request not in self.stale:
            super().cache_filled(request, start, end)

    def free(self, request):
        """It has finished; or it is preempted, and all its keys will be new."""
        super().free(request)
        self.stale.discard(request)


def ascend(steps):
    """Whether these are steps, each later than the one before."""
    if not isinstance(steps, (list, tuple)) or not all(is_whole(step, 0) for step in steps):
        return False
    return all(before < after for before, after in pairwise(steps))


def generate(models, changes, requests, mode="keep", **knobs):
    """
    Runs `requests` as prefix does, with the same knobs. Returns the trace; each request has its
    `spans`. ValueError for models or changes that do not match.

    models:  of one config; the first computes until the first change, and so on
    changes: the steps from which on the next model computes, ascending
    mode:    "keep": requests go on over the keys they have. "recompute": all that run are preempted
             at the change. "wait": no new request is admitted until all that have begun have
             ended; then the weights change
    """
    one_of("mode", mode, "keep", "recompute", "wait")
    check("models", models, lambda models: [model.config for model in models], "a list of models")
    check("changes", changes, ascend, "a list of steps, each later than the one before")
    check("scheduler_class", knobs.get("scheduler_class"), lambda _: "scheduler_class" not in knobs,
          "left out: rollout has its own")
    if len(models) != len(changes) + 1:
        raise ValueError(f"{len(changes)} changes need {len(changes) + 1} models, "
                         f"not {len(models)}")
    for i, model in enumerate(models):
        if model.config != models[0].config:
            raise ValueError(f"models[{i}] has another config than models[0]")
    versions = Versions(models)
    scheduler_class = partial(RolloutScheduler, models=versions, changes=changes, mode=mode)
    trace = generate_prefix.generate(versions, requests, **knobs, scheduler_class=scheduler_class)
    trace.stage = f"rollout, {mode}"
    return trace


if __name__ == "__main__":
    from lab.essays import main, rollout
    main(rollout, __doc__)
