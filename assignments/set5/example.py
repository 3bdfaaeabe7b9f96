"""The handout's worked examples. A part prints its docstring: `pytest set5 -k example -s`."""
import torch

import generate_prepacked
from generate_ragged import Flat
from request import Request


def request(name, prompt, generated=(), computed=0):
    made = Request(prompt, 4, name=name)
    made.block_size, made.generated, made.computed = 24, [*generated], computed
    return made


def rows(tensor):
    return [" ".join(str(int(x)) for x in row.flatten()) for row in tensor]


def part_a():
    """
    [[1, 4], [3, 0], [5, 2]]
    """
    rows = generate_prepacked.first_fit_decreasing([2, 6, 3, 5, 1, 4], 7)
    print([[int(i) for i in row] for row in rows])


def part_b():
    """
    5 7 2 9   0 1 2 3
    1 6 4 0   0 1 0 0
    A (0, 0, 4)  B (1, 2, 3)  C (1, 0, 2)
    last tokens: (0, 3) (1, 2) (1, 1)
    row 1, with the causal rule: 1 0 0 0 / 1 1 0 0 / 0 0 1 0
    """
    plan = [(request("A", [5, 7, 2, 9]), 4), (request("B", [4]), 1), (request("C", [1, 6]), 2)]
    made = generate_prepacked.Packed(plan)
    for tokens, positions in zip(rows(made.tokens), rows(made.positions)):
        print(tokens, " ", positions)
    print("  ".join(f"{r.name} {tuple(place)}" for (r, _), place in zip(plan, made.places)))
    print("last tokens:", *zip(*(each.tolist() for each in made.wanted)))
    print("row 1, with the causal rule:", " / ".join(rows(made.mask[1, 0].tril()[:3])))


def stream(attention="mask"):
    return Flat([(request("A", [5, 7], [9], 2), 1), (request("B", [4, 8, 6]), 2),
                 (request("C", [1, 6, 3], computed=1), 2)], None, attention)


def part_c():
    """
    tokens 9 4 8 6 3  positions 2 0 1 1 2
    sampled A C at 0 4
    1 1 1 0 0 0 0 0
    0 0 0 1 0 0 0 0
    0 0 0 1 1 0 0 0
    0 0 0 0 0 1 1 0
    0 0 0 0 0 1 1 1
    """
    made = stream()
    print("tokens", *made.tokens.tolist(), " positions", *made.positions.tolist())
    print("sampled", *(r.name for r in made.sampled), "at", *made.wanted.tolist())
    print(*rows(made.block_diagonal()), sep="\n")


def part_d():
    """
    mask and varlen agree: True
    """
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 3).double()
    masked, skipped = (stream(way).attend(0, q, k, v) for way in ("mask", "varlen"))
    print("mask and varlen agree:", torch.allclose(masked, skipped))


