"""All-reduces over the ranks of a group, counted; and what a forward pass sends."""
import time
from collections import Counter

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from generate_ragged import Flat
from request import Request, prepare


class Traffic:
    """
    all_reduces, bytes: how many, and of how many bytes the tensors were
    seconds:            spent in them; on a GPU only launching them, unless `clock` synchronizes
    """

    def __init__(self, group=None):
        self.group, self.clock = group, time.perf_counter
        self.reset()

    def reset(self):
        self.all_reduces, self.bytes, self.seconds = 0, 0, 0.0

    def all_reduce(self, tensor):
        """Sums a tensor over all ranks, in place. ConnectionError if one of them is lost."""
        if dist.get_world_size(self.group) == 1:
            return
        start = self.clock()
        try:
            dist.all_reduce(tensor, group=self.group)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise ConnectionError(f"rank {dist.get_rank()}: an all-reduce failed; "
                                  f"another rank has stopped or hangs ({reason:.120})") from None
        self.all_reduces += 1
        self.bytes += tensor.nbytes
        self.seconds += self.clock() - start


class Collectives(TorchDispatchMode):
    """Counts the operations that reach torch.distributed, whatever code calls them."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(model, tokens, requests):
    """{operation: times} of one forward pass over `tokens` tokens of `requests` requests."""
    sizes = [tokens // requests + (i < tokens % requests) for i in range(requests)]
    prompts = [[i % model.config.vocab_size for i in range(size)] for size in sizes]
    waiting = prepare([Request(prompt, name=f"r{i}") for i, prompt in enumerate(prompts)],
                      model.config)
    batch = Flat([(request, len(request.prompt)) for request in waiting], model.device)
    with torch.inference_mode(), Collectives() as counter:
        model(batch.tokens, batch.positions, batch.attend, batch.wanted)
    return counter.counts


def count_examples(model):
    """The number of collectives in passes of very different sizes, in words."""
    size, counts = min(model.config.block_size, 256), []   # Llama's contexts are long
    for tokens, n in (10, 1), (size, 1), (10, 5), (20 * size, 50):
        count = sum(count_collectives(model, tokens, n).values())
        counts.append(f"{count} for {tokens:,} tokens of {n} request{'s' * (n > 1)}")
    return ", ".join(counts)
