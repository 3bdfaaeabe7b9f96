"""
Sessions: an agent's request pauses while a tool runs, and comes back with a longer prompt.

To the scheduler each *turn* is a request of its own. It begins with all tokens of the turn before,
which can be found again if their pages are still there:

    turn 1    prompt answer   (a tool runs)
    turn 2    prompt answer result answer   (a tool runs)
    turn 3    prompt answer result answer result answer

What becomes of a turn's pages during the pause is one number, `keep`. 0: they are free, and the
least recently used is taken first. A number: they are *held* for so many steps. Infinity: until the
session comes back. Held pages make newcomers wait, but nothing that runs: before a running request
is preempted, the oldest hold ends. A hold also ends if nothing is running and the next request
still finds no room.

Holding alone makes it worse. The session comes back, and waits behind a newcomer. The newcomer
waits for room, which that session holds. So a session whose pages are held must also go first:
`by_session` queues turns in the order in which their sessions arrived. 24 sessions of 6 turns, in
pages for six of them:

    keep                   steps   computed again     of what earlier turns had computed
    0 (LRU)                  677             100%
    0, by_session            527              57%
    infinity               2,241              95%     three times slower
    infinity, by_session     612               8%
    30 steps, by_session     539               9%

With pages for all of them 3% is computed again, and `keep` changes nothing. So find out first which
regime you are in. (Proposed for vLLM: #57103 and #52113. Continuum: arXiv 2511.02230. InferCept
found that recomputing takes 37 to 40% of the forward time. Copies in host memory: docs/memory.md.)

    python -m beyond.sessions     the table, counted
"""
if __spec__ is None:
    raise SystemExit("start it in the folder above: python -m beyond.sessions")

from bisect import insort
from collections import deque
from dataclasses import dataclass, field, replace
from operator import index

import torch

from cache import KV
from generate_paged import Paged, pool_size
from generate_prefix import PrefixScheduler
from model import sample
from request import Request, prepare
from toolbox.trace import Trace
from toolbox.validate import as_list, check, check_pool, is_number, is_whole, one_of, plain


@dataclass(eq=False)
class Session:
    """
    first: the Request of its first turn
    then:  for each further turn, (pause in steps, tokens of the tool's result, max_new_tokens)
    turns: its Requests so far
    """
    first: Request
    then: list = field(default_factory=list)
    turns: list = field(default_factory=list, init=False)

    def __post_init__(self):
        check("first", self.first, lambda first: isinstance(first, Request), "a Request")
        self.turns.append(self.first)
        self.first.session = self

    @property
    def over(self):   # this is its last turn
        return len(self.turns) > len(self.then)

    def next(self, step):
        """The next turn's Request. It arrives after the pause, which begins at `step`."""
        last = self.turns[-1]
        number = len(self.turns)   # of turns so far
        pause, result, new = self.then[number - 1]
        turn = replace(last, prompt=last.tokens + result, max_new_tokens=new, seed=last.seed + 1,
                       arrival=step + pause, name=f"{self.first.name}, turn {number + 1}")
        turn.session = self
        self.turns.append(turn)
        return turn

    def longest(self):
        """The Request of its last turn, if all answers are as long as they may be."""
        prompt = self.first.prompt
        answer = self.first.max_new_tokens
        for _, result, new in self.then:
            prompt = prompt + [0] * answer + result
            answer = new
        return Request(prompt, answer, name=f"{self.first.name}, turn {len(self.then) + 1}")


def are_turns(then):
    return isinstance(then, (list, tuple)) and all(is_turn(*turn) for turn in then)


def is_turn(pause, result, new):
    if not isinstance(result, list) or any(index(token) < 0 for token in result):
        return False
    return is_whole(plain(pause), 0) and is_whole(plain(new), 1)


class SessionScheduler(PrefixScheduler):
    """
    A PrefixScheduler whose requests have a `session`. keep, by_session: see `generate`

    held: session -> (pages, the last step for which they are held), the oldest first
    """

    def __init__(self, max_batch, token_budget, pages, page_size, keep=0, by_session=False):
        super().__init__(max_batch, token_budget, pages, page_size)
        self.keep = keep
        self.by_session = by_session
        self.held = {}
        self.step = 0

    def add(self, request):
        super().add(request)
        if self.by_session:   # a stable sort
            in_order = sorted(self.waiting, key=lambda turn: turn.session.first.arrival)
            self.waiting = deque(in_order)

    def schedule(self, step):
        """As PrefixScheduler.schedule; but first, holds end that are over."""
        self.step = step
        while self.held:
            _, last_step = self.held[self.oldest]
            if last_step >= step:
                break
            self.let_go(self.oldest)
        return super().schedule(step)

    def make_room(self, request, n):
        """As PrefixScheduler.make_room; but before it preempts a request, holds end."""
        more = self.pool.needed(request.computed + n) - len(request.block_table)
        while self.held and more > len(self.pool.free_queue):
            self.let_go(self.oldest)
        return super().make_room(request, n)

    def admit(self, request):
        """As PrefixScheduler.admit; but if nothing runs, holds end until there is room."""
        while not super().admit(request):
            if self.running or not self.held:
                return False
            self.let_go(self.oldest)
        if request.session in self.held:   # now the turn itself has what was held for it
            self.let_go(request.session)
        return True

    def free(self, request):
        """As PrefixScheduler.free; but when a turn ends, its full pages are held."""
        if self.keep and request.finished and not request.session.over:
            pages = []
            full = request.computed // self.pool.page_size
            self.pool.share(pages, request.block_table[:full])
            self.held[request.session] = (pages, self.step + self.keep)
        super().free(request)

    @property
    def oldest(self):
        return next(iter(self.held))

    def let_go(self, session):
        """Ends a hold. The pages can be found until they are taken."""
        pages, _ = self.held.pop(session)
        self.pool.free(pages)


@torch.inference_mode()
def generate(model, sessions, max_batch=8, token_budget=64, pages=64, page_size=16, keep=0,
             by_session=False, on_token=None):
    """
    Runs all turns of `sessions` as prefix does. Returns the trace; each session has its `turns`.
    ValueError, before anything runs, for a session whose last turn might find too little room.

    keep:       for how many steps a turn's pages are held after its end; math.inf: until the next
    by_session: the queue is in the order of the sessions' arrivals, not of their turns'
    """
    sessions = as_list(sessions, Session, "sessions")
    check_pool(max_batch, pages, page_size, SessionScheduler, model.config.block_size)
    check("keep", keep, lambda n: is_number(n) and n >= 0, "a number of steps, at least 0")
    one_of("by_session", by_session, False, True)
    for session in sessions:
        check(f"{session.first}: then", session.then, are_turns,
              "a list of (pause in steps, list of tokens, max_new_tokens)")
    coming = prepare([session.first for session in sessions], model.config)   # by arrival
    # No turn fills more pages than its session's last one.
    last_turns = [prepare(session.longest(), model.config)[0] for session in sessions]
    turns = 1 + max((len(session.then) for session in sessions), default=0)
    number = min(pages, turns * pool_size(last_turns, len(sessions), page_size))
    trial = PrefixScheduler(1, 1, max(1, number), page_size)
    for last_turn in last_turns:
        trial.add(last_turn)   # refuses what never fits
    scheduler = SessionScheduler(max_batch, token_budget, number, page_size, keep, by_session)
    kv = KV(number * page_size)
    trace = Trace("sessions", list(coming), model, scheduler.pool.counts)
    step = 0
    while scheduler.busy or coming:
        # 0. turns that have arrived join the queue
        if not scheduler.busy:
            step = max(step, coming[0].arrival)
        while coming and coming[0].arrival <= step:
            scheduler.add(coming.pop(0))
        # 1. which requests compute how many tokens in this step
        plan = scheduler.schedule(step)
        # 2. one forward pass for decodes and chunks together
        batch = Paged(plan, kv, scheduler.pool, model.device)
        with trace.forward_pass(step, batch):
            logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)   # (R, V)
        # 3. one token for each request that has nothing more to compute
        tokens = sample(logits, batch.sampled)
        scheduler.update(plan, tokens)
        trace.record_tokens(step, batch.sampled, tokens, logits, on_token)
        step += 1
        # 4. a session whose turn has ended pauses; its next turn will come
        for request in batch.sampled:
            if request.finished and not request.session.over:
                [turn] = prepare(request.session.next(step), model.config)
                insort(coming, turn, key=lambda turn: turn.arrival)
                trace.requests.append(turn)
    return trace


if __name__ == "__main__":
    from lab.essays import main, sessions
    main(sessions, __doc__)
