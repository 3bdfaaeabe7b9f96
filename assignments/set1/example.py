"""The handout's worked examples. A part prints its docstring: `pytest set1 -k example -s`."""
import math

import torch

import cache
import generate_unbatched
from checks.toy import toy
from model import Head
from request import Request


def numbers(tensor):
    return [round(x, 3) for x in tensor.flatten().tolist()]


def part_a():
    """
    no mask [6.0, 9.0]
    mask (False, True, True) [8.0, 10.667]
    mask (False, False, True) [0.0, 12.0]
    """
    q, k, v = torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(3, 4)
    q[:, 0], k[:, 0] = torch.tensor([0, 2.0]), torch.tensor([0, 0, math.log(2)])
    v[:, 0] = torch.tensor([4.0, 8, 12])
    for mask in None, (False, True, True), (False, False, True):
        out = Head()(q, k[1:], v[1:], k[:1], v[:1], mask and torch.tensor(mask))
        print(f"mask {mask}" if mask else "no mask", numbers(out[:, 0]))


def part_b():
    """
    buffer [1.0, 2.0, 0.0, 0.0]
    buffer [1.0, 2.0, 3.0, 0.0]
    read(0, 3) [1.0, 2.0, 3.0]  read(0, 1) [1.0]
    read(0, 3) [1.0, 7.0, 8.0]
    ValueError
    """
    kv = cache.KV(4)

    def write(start, *keys):
        new = torch.tensor(keys, dtype=torch.float64)[:, None]
        kv.write(0, start, new, new)

    write(0, 1, 2)
    print("buffer", numbers(kv.k[0]))
    write(2, 3)
    print("buffer", numbers(kv.k[0]))
    print("read(0, 3)", numbers(kv.read(0, 3)[0]), " read(0, 1)", numbers(kv.read(0, 1)[0]))
    write(1, 7, 8)
    print("read(0, 3)", numbers(kv.read(0, 3)[0]))
    try:
        write(3, 5, 6)
    except ValueError:
        print("ValueError")


def part_c():
    """
    0 3 [[5, 6, 7]] [[0, 1, 2]]
    3 4 [[6]] [[3]]
    4 5 [[9]] [[4]]
    [6, 9, 1]
    """
    model, request = toy(), Request([5, 6, 7], 3)
    hook = model.register_forward_pre_hook(lambda _, arguments: print(
        arguments[2].__self__.start, arguments[2].__self__.end, arguments[0].tolist(),
        arguments[1].tolist()))
    generate_unbatched.generate(model, [request])
    hook.remove()
    print(request.generated)
