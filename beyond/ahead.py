"""
Planning ahead: the next pass is planned and queued while the device still computes this one.

Elsewhere host and device take turns, and the device is idle while the host samples and plans:

    host    plan 1           read 1, plan 2            read 2, plan 3
    device         pass 1                    pass 2                    pass 3

    host    plan 1, plan 2   read 1, plan 3   read 2, plan 4
    device         pass 1     pass 2           pass 3                  a token is read a step late

A plan depends on how many tokens there are, hardly on which. So pass t + 1 is laid out with a
*hole* for each token that pass t will give, and the device fills the holes from its own memory.
What the host cannot know is a stop token: a request that ends with pass t is in pass t + 1, too,
which costs it one row. An end by length is known. (AsyncScheduler in vLLM; continuous_async in
transformers.)

The device runs its passes in the order of the queue. So what a request frees may be given away: its
next owner writes after the last pass that was queued with it. Only its name must not be: a pass
publishes a page only if the block table is still the one it was laid out with.

    python -m beyond.ahead     what it gains, calculated
"""
import time
from dataclasses import dataclass, field

import torch

from cache import KV
from generate_paged import Paged
from generate_ragged import Flat
from model import cdf
from paging import PagedScheduler, Pages
from request import prepare
from scheduler import Scheduler
from toolbox.trace import Trace
from toolbox.validate import check_finite, check_pool

HOLE = -1   # no token: an embedding would refuse it


def memory_of(model, max_batch, token_budget, max_kv_tokens, pages, page_size):
    """(scheduler, layout): stage 7's if `pages` is a number, or else stage 6's."""
    if pages is None:
        return (Scheduler(max_batch, token_budget, max_kv_tokens),
                lambda plan: Flat(plan, model.device))
    check_pool(max_batch, pages, page_size, model.config.block_size)
    books, pool = Pages(pages, page_size), KV(pages * page_size)
    return (PagedScheduler(max_batch, token_budget, books),
            lambda plan: Paged(plan, pool, books, model.device))
