"""How many threads should compute: one, unless more are clearly faster."""
import time
from statistics import median

import torch

from generate_paged import generate
from request import Request

CLEARLY = 1.2   # more threads wait for each other: beside one busy core, several times slower


def choose_threads(model, max_batch, turns=3):
    """
    1, or all that torch would use. Both compute the same batch in turns, so that what else the
    machine does meets both alike.
    """
    most, vocab = torch.get_num_threads(), model.config.vocab_size
    if most == 1 or model.device.type != "cpu":
        return most
    times = {1: [], most: []}
    for _ in range(turns + 1):   # the first turn is the warm-up
        for threads in times:
            torch.set_num_threads(threads)
            start = time.perf_counter()
            generate(model, [Request([i % vocab] * 8, 4) for i in range(max_batch)], max_batch)
            times[threads].append(time.perf_counter() - start)
    ratio = median(one / all for one, all in zip(times[1][1:], times[most][1:]))
    return most if ratio > CLEARLY else 1
