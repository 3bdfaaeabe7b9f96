"""
How many threads a step uses, on a machine that may be busy with something else.

The threads of a step wait for each other some eighty times. Where another program has one of their
cores, all of them wait until it lets go: with one endless loop beside two threads, a step takes
three times as long. One thread alone loses much less.

    quiet   | a a a a | b b b b |            busy    | a . . . a | b x x x b |
              core 1    core 2                         core 1      core 2, shared with x
"""
FIRST_PAUSE, LONGEST_PAUSE = 4, 32   # steps


class Threads:
    """
    The number for the next step. Threads that wait for others spin, so a step that has its cores to
    itself takes `threads` seconds of CPU time per second. If it got much less, the next steps use
    no more threads than it got cores. After a pause all threads are tried again; the pause doubles
    each time that this fails.
    """

    def __init__(self):
        self.limit = None   # threads at present; None: all
        self.pause, self.steps_left = FIRST_PAUSE, 0

    def number(self, most):
        return most if self.limit is None or not self.steps_left else min(self.limit, most)

    def record(self, used, most, seconds, cpu_seconds):
        """What a step with `used` of `most` threads took."""
        cores = cpu_seconds / seconds
        if used > 1 and cores < 0.85 * used:
            if used == most:
                self.pause = FIRST_PAUSE if self.limit is None else min(2 * self.pause, LONGEST_PAUSE)
            self.limit, self.steps_left = max(1, int(cores)), self.pause
        elif used == most:
            self.limit, self.steps_left = None, 0
        else:
            self.steps_left -= 1


threads = Threads()   # one for all models: they share the machine
