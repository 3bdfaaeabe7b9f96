"""The handout's worked examples. A part prints its docstring: `pytest set6 -k example -s`."""
import torch

from cache import KV
from generate_paged import Paged
from paging import PagedScheduler, Pages
from request import Request


def show(step, pages):
    print(step, "free", *pages.free, " holders", *pages.holders, " published",
          *sorted(pages.published.values()))


def part_a():
    """
    1 free 3 4 5  holders 1 1 1 0 0 0  published 0 1
    2 free 4 5  holders 2 2 1 1 0 0  published 0 1 3
    3 free 4 5 2  holders 1 1 0 1 0 0  published 0 1 3
    4 free 4 5 2 3 1 0  holders 0 0 0 0 0 0  published 0 1 3
    5 free 0  holders 0 1 1 1 1 1  published 0
    [4, 5, 2, 3, 1] find [0]
    """
    pages, a, b, c = Pages(6, 2), [], [], []
    pages.allocate(a, 3)
    pages.publish(a, 0, [5, 7])
    pages.publish(a, 1, [2, 9])
    show(1, pages)
    pages.hold(b, pages.find([5, 7, 2, 9, 6]))
    pages.allocate(b, 1)
    pages.publish(b, 2, [6, 1])
    show(2, pages)
    pages.give_back(a)
    show(3, pages)
    pages.give_back(b)
    show(4, pages)
    pages.allocate(c, 5)
    show(5, pages)
    print(c, "find", pages.find([5, 7, 2, 9, 6, 1]))


def part_b():
    """
    [9, 10, 11, 3, 4, 5, 12, 13]
    keys in slots 9 and 3: 1.0 2.0
    """
    batch = object.__new__(Paged)
    batch.pages = Pages(5, 3)
    print(batch.slots([3, 1, 4], 8).tolist())
    batch.pool, batch.slot_mapping = KV(15), torch.tensor([9, 3])
    new = torch.tensor([[[1.0], [2.0]]])
    batch.write(0, new, new)
    print("keys in slots 9 and 3:", *batch.pool.k[0][0, [9, 3], 0].tolist())


def part_c():
    """
    names 1 2 3
    (0, (5, 7)) (1, (2, 9)) (2, (6, 1))
    equal pages: names 1 1, find [0, 2]
    """
    pages, table = Pages(6, 2), [0, 1, 3]
    for i, tokens in enumerate(([5, 7], [2, 9], [6, 1])):
        pages.publish(table, i, tokens)
    print("names", *(pages.name_of[page] for page in table))
    print(*(pages.key_of[page] for page in table))
    pages = Pages(3, 1)
    for table, i, token in ([0], 0, 5), ([1, 2], 0, 5), ([1, 2], 1, 6):
        pages.publish(table, i, [token])
    print(f"equal pages: names {pages.name_of[0]} {pages.name_of[1]}, find {pages.find([5, 6])}")


def part_d():
    """
    running A B  waiting C D
    C has computed 0, generated 2, todo 5
    """
    queue = PagedScheduler(3, 64, Pages(40, 2))
    for name in "ABCD":
        request = Request([1, 2, 3], 9, name=name)
        request.block_size = 24
        queue.add(request)
    queue.schedule(0)
    c = queue.running[2]
    c.generated, c.computed = [7, 7], 4
    queue.preempt(c)
    print("running", *(r.name for r in queue.running), " waiting", *(r.name for r in queue.waiting))
    print(f"C has computed {c.computed}, generated {len(c.generated)}, todo {c.todo}")
