"""
Other devices. On "meta", tensors have a shape and no numbers: whoever reads one (.item(), a mask in
an `if`) fails there, as a layout would stall on a GPU. A real GPU runs the contract.
"""
import pytest
import torch
from common import toy

from cache import KV
from generate_dynamic import Rectangle
from generate_naive import StaticBatch
from generate_paged import Paged
from generate_prepacked import Packed
from generate_ragged import Flat
from generate_unbatched import Alone
from paging import Pages
from request import Request, advance, prepare

META = torch.device("meta")
POOL = KV(48)


def paged(plan):
    for i, (request, _) in enumerate(plan):
        request.block_table = [3 * i + 2, 3 * i, 3 * i + 1]
    return Paged(plan, POOL, Pages(12, 4), META)


LAYOUTS = {   # of a plan; the other passes of a static batch, and those of a packed one, differ
    "Alone": lambda plan: Alone(plan[0][0], True, META),
    "StaticBatch": lambda plan: StaticBatch([request for request, _ in plan], META),
    "Rectangle": lambda plan: Rectangle(plan, META),
    "Packed": lambda plan: Packed(plan, META),
    "Flat, mask": lambda plan: Flat(plan, META, "mask"),
    "Flat, varlen": lambda plan: Flat(plan, META),
    "Paged": paged}


def tensors(thing):
    if isinstance(thing, (list, tuple)):
        for part in thing:
            yield from tensors(part)
    elif isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, KV):
        yield from (*thing.k.values(), *thing.v.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("name", LAYOUTS)
@torch.inference_mode()
def test_a_pass_stays_on_its_device_and_in_its_dtype(name, dtype):
    """A pass over prompts, one cut short; then one over decodes and the rest of that prompt."""
    model, batch = toy().to(META, dtype), None
    requests = prepare([Request([1] * n, 5) for n in (7, 1, 4)], model.config)
    POOL.k.clear(), POOL.v.clear()
    for number in range(2):
        cut = 0 if number or name in ("Alone", "StaticBatch", "Packed") else 2
        if name == "StaticBatch" and number:
            batch.add_columns()
        elif name != "Packed" or not number:
            batch = LAYOUTS[name]([(r, r.todo - cut * (r is requests[0])) for r in requests])
        logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)
        assert logits.shape == (len(batch.sampled), model.config.vocab_size)
        caches = [request.kv for request, _ in batch.plan]
        for tensor in tensors([*vars(batch).values(), *caches, logits]):
            assert tensor.device == META
            assert tensor.dtype in (torch.long, torch.bool, dtype)
        assert all(isinstance(number, int) for number in batch.cost().values())
        if name != "Packed":
            advance(batch.plan, [1] * len(batch.sampled))
