"""The handout's worked examples. A part prints its docstring: `pytest set3 -k example -s`."""
import request
from request import Request
from scheduler import Scheduler


def requests(*sizes):
    made = [Request([1] * prompt, new, name="ABCD"[i]) for i, (prompt, new) in enumerate(sizes)]
    for each in made:
        each.block_size = 24
    return made


def steps():
    """The table of the handout."""
    queue, step = Scheduler(max_batch=3, token_budget=6, max_kv_tokens=16), 0
    for each in requests((3, 2), (8, 3), (4, 4), (1, 2)):
        queue.add(each)
    while queue.busy:
        plan = queue.schedule(step)
        print(step, *(f"{each.name}{n}" for each, n in plan))
        queue.update(plan, [0] * sum(n == each.todo for each, n in plan))
        step += 1


def part_a():
    """
    A1 C1 B5 D1
    0 A3 B3
    1 A1 B5
    2 B1
    3 B1
    4 D1 C4
    5 C1 D1
    6 C1
    7 C1
    """
    queue = Scheduler(max_batch=4, token_budget=8)
    queue.running = requests((1, 2), (5, 2), (1, 2), (4, 2))
    print(*(f"{each.name}{n}" for each, n in queue.share_budget()))
    steps()


def part_b():
    """
    True False
    0 A3 B3
    1 A1 B5
    2 B1
    3 B1
    4 D1 C4
    5 C1 D1
    6 C1
    7 C1
    """
    queue = Scheduler(max_batch=3, token_budget=6, max_kv_tokens=16)
    a, b, c, d = requests((3, 2), (8, 3), (4, 4), (1, 2))
    queue.running = [b]
    print(queue.grant_room(d), queue.grant_room(c))   # in step 2
    steps()


def part_c():
    """
    A 2 []
    B 1 [7]
    C 3 [9]
    0 A3 B3
    1 A1 B5
    2 B1
    3 B1
    4 D1 C4
    5 C1 D1
    6 C1
    7 C1
    """
    a, b, c = requests((5, 2), (1, 2), (3, 2))
    request.advance([(a, 2), (b, 1), (c, 3)], [7, 9])
    for each in a, b, c:
        print(each.name, each.computed, each.generated)
    steps()
