"""
How many threads a step uses, on a machine that may be busy with something else.

The threads of a step wait for each other some eighty times. Where another program shares one of
their cores, they all wait while that program runs. With one endless loop beside two threads a step
takes three times as long; one thread alone loses much less.

    two threads, core 1    a a . . a a . .        one thread    a a a a a a a a
                 core 2    b b x x b b x x                      x x x x x x x x

    x: the other program    .: a waits for b
"""
import time
from contextlib import contextmanager

import torch

FIRST_PAUSE, LONGEST_PAUSE = 4, 32   # steps


class Threads:
    """
    Chooses the number for the next step. Threads that wait for each other spin. So a step that has
    its cores to itself takes as many seconds of CPU time per second as it has threads. If a step
    gets much less, the next ones use no more threads than it got cores. After a pause all are tried
    again; the pause doubles each time that they still get less.
    """

    def __init__(self):
        self.limit = None   # threads at present; None: all
        self.pause, self.steps_left = FIRST_PAUSE, 0

    def number(self, most):
        return min(self.limit, most) if self.limit and self.steps_left else most

    def record(self, used, most, cores):
        """What a step with `used` of `most` threads got: seconds of CPU time per second."""
        if used > 1 and cores < 0.85 * used:
            if used == most:
                longer = min(2 * self.pause, LONGEST_PAUSE)
                self.pause = longer if self.limit else FIRST_PAUSE
            self.limit, self.steps_left = max(1, int(cores)), self.pause
        elif used == most:
            self.limit, self.steps_left = None, 0
        else:
            self.steps_left -= 1

    @contextmanager
    def chosen(self):
        """The number of threads for the step inside the `with` block, which is then judged."""
        most = torch.get_num_threads()
        used = self.number(most)
        start, cpu = time.perf_counter(), time.process_time()
        yield used
        seconds = time.perf_counter() - start
        self.record(used, most, (time.process_time() - cpu) / max(seconds, 1e-9))


threads = Threads()   # one for all models: they share the machine
