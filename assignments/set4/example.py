"""The handout's worked example. A part prints its docstring: `pytest set4 -k example -s`."""
import generate_dynamic
from checks.toy import toy
from request import Request, indices_due


def batch():
    """The batch of the handout, whose caches earlier passes have filled."""
    model, plan = toy(), []
    for name, prompt, generated, start, n in (
            ("A", [5, 7, 2], [9], 3, 1), ("B", [4, 8, 6, 1, 3], [], 2, 2),
            ("C", [1, 6, 8], [], 0, 3)):
        request = Request(prompt, 4, name=name)
        request.block_size = 24
        if start:
            before = generate_dynamic.Rectangle([(request, start)])
            model(before.tokens, before.positions, before.attend)
        request.generated, request.computed = generated, start
        plan.append((request, n))
    return model, generate_dynamic.Rectangle(plan)


def rows(tensor):
    return [" ".join(str(int(x)) for x in row.flatten()) for row in tensor]


def part_a():
    """
    0 0 9   0 0 3
    0 6 1   0 2 3
    1 6 8   0 1 2
    P = 3
    """
    _, made = batch()
    for tokens, positions in zip(rows(made.tokens), rows(made.positions)):
        print(tokens, " ", positions)
    print("P =", made.P)


def part_b():
    """
    1 1 1 0 0 1
    0 1 1 0 1 1
    0 0 0 1 1 1
    """
    print(*rows(batch()[1].mask), sep="\n")


def part_c():
    """
    A 4  B 4  C 3
    """
    model, made = batch()
    model(made.tokens, made.positions, made.attend)
    counts = [(r.name, int((r.kv.k[0] != 0).any(-1).any(0).sum())) for r, _ in made.plan]
    print("  ".join(f"{name} {n}" for name, n in counts))   # positions with a key


def part_d():
    """
    [0, 2]  A C
    row 0, column 2
    row 2, column 2
    """
    _, made = batch()
    print(indices_due(made.plan), "", *(r.name for r in made.sampled))
    slots = [[(row, column) for column in range(3)] for row in range(3)]
    places, column = made.wanted
    for i, row in enumerate(places.tolist()):
        at = column if isinstance(column, int) else int(column[i])
        print("row %d, column %d" % slots[row][at])
