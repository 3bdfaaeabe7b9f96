"""The handout's worked examples. A part prints its docstring: `pytest set2 -k example -s`."""
import generate_dynamic
import generate_naive
from checks.toy import toy
from request import Request


def part_a():
    """
    pass 0  A3 B1  5 6 7 / 0 0 8  positions of B's token: 0  mask 111 / 001  sampled A B
    pass 1  A1 B1  6 / 2  positions of B's token: 1  mask 1111 / 0011  sampled A B
    pass 2  A0 B1  0 / 6  positions of B's token: 2  mask any / 00111  sampled B
    pass 3  A0 B1  0 / 6  positions of B's token: 3  mask any / 001111  sampled B
    A [6, 9]  B [2, 6, 6, 3]
    """
    model, passes = toy(), []

    def show(_, arguments):
        batch = arguments[2].__self__
        rows = [" ".join(map(str, row)) for row in batch.tokens.tolist()]
        seen = ["".join(str(int(x)) for x in row.flatten()) if n else "any"
                for row, (_, n) in zip(batch.mask, batch.plan)]
        print(f"pass {len(passes)}  {' '.join(f'{r.name}{n}' for r, n in batch.plan)} ",
              " / ".join(rows), f" positions of B's token: {batch.positions[1, -1]}  mask",
              " / ".join(seen), " sampled", *(r.name for r in batch.sampled))
        passes.append(batch)

    a, b = Request([5, 6, 7], 2, name="A"), Request([8], 4, name="B")
    hook = model.register_forward_pre_hook(show)
    generate_naive.generate(model, [a, b], max_batch=2)
    hook.remove()
    print("A", a.generated, " B", b.generated)


def part_b():
    """
    [1, 1, 1] length
    """
    request = Request([1] * 6, 5)
    request.block_size, request.computed = 8, 6
    while not request.finished:
        request.append(1)
        request.computed += 1
    print(request.generated, request.finish_reason)


def part_c():
    """
    D E | A B C
    B keeps its place
    """
    a, b, c, d, e = (Request([1], 2, name=name, arrival=arrival)
                     for name, arrival in zip("ABCDE", (0, 0, 1, 1, 4)))
    waiting, running = generate_dynamic.admit([b, c, d, e], [a], 2, 3)
    print(*(r.name for r in waiting), "|", *(r.name for r in running))
    a.finish_reason = c.finish_reason = "stop"
    print(*(r.name for r in generate_dynamic.leave(running)), "keeps its place")
