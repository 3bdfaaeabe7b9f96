"""
How many threads a step uses, on a machine that may be busy with something else.

The threads of a step wait for each other some hundred times. Where another program shares one of
their cores, they all wait while that program runs. With one endless loop beside two threads a step
takes three times as long; one thread alone loses much less.

    two threads, core 1    a a . . a a . .        one thread    a a a a a a a a
                 core 2    b b x x b b x x                      x x x x x x x x

    x: the other program    .: a waits for b
"""
import time
from contextlib import contextmanager

import torch

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0   # seconds


class Threads:
    """
    Chooses the number for the next step. Threads that wait for each other spin. So a step that has
    its cores to itself takes as many seconds of CPU time per second as it has threads. If two steps
    in a row get much less, the next ones use no more threads than they got cores. One step alone is
    no evidence: it may have waited for memory. After a pause all threads are tried again, for one
    step; the pause doubles each time that it still gets less.
    """

    def __init__(self):
        self.limit = None      # threads at present; None: all
        self.doubted = False   # whether the last step with all threads got too little
        self.pause = self.until = 0.0
        self.used = 0          # threads of the last step

    def number(self, most, now):
        return min(self.limit, most) if self.limit and now < self.until else most

    def record(self, used, most, cores, now):
        """What a step with `used` of `most` threads got: seconds of CPU time per second."""
        if used > 1 and cores < 0.85 * used:
            if self.doubted:
                if used == most:
                    self.pause = min(2 * self.pause, LONGEST_PAUSE) if self.limit else FIRST_PAUSE
                self.limit, self.until = max(1, int(cores)), now + self.pause
            self.doubted = True
        elif used == most:
            self.limit, self.doubted = None, False

    @contextmanager
    def chosen(self):
        """The number of threads for the step inside the `with` block, which is then judged."""
        most = torch.get_num_threads()
        start, cpu = time.perf_counter(), time.process_time()
        used = self.used = self.number(most, start)
        yield used
        now = time.perf_counter()
        self.record(used, most, (time.process_time() - cpu) / max(now - start, 1e-9), now)


FEW, MANY = Threads(), Threads()   # for all models: they share the machine


def threads_of(tokens):
    """
    For a step of so many tokens. What disturbs decodes, a client that takes its token at each of
    them, for instance, says nothing about the long step of a prompt.
    """
    return FEW if tokens < 64 else MANY
