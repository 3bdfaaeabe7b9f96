"""How prepacking is measured: the methods that are compared, and memory. (Claims P5 to P10.)"""
import pytest
import torch
from common import VOCAB
from test_claims import MODEL, Bytes, close, run, whole

from experiments import prepacking
from generate_ragged import Flat
from request import prepare


@pytest.mark.parametrize("method", prepacking.METHODS)
def test_every_method_of_the_experiments_prefills_each_prompt_right(method):
    """The same logits as alone, whatever is measured."""
    group, layout = prepacking.METHODS[method]
    requests = prepare(prepacking.requests_of([3, 9, 1, 7, 7, 2, 12, 5], VOCAB), MODEL.config)
    batches = [layout(part, None) for part in group(requests, 3)]
    found = {request: logits for batch in batches
             for request, logits in zip(batch.sampled, run(batch))}
    for request in requests:
        request.computed = 0
        assert close(found[request], run(Flat(whole([request])))[0])


def test_memory_is_counted_as_by_hand():
    counted = Bytes()
    with counted:
        a = torch.ones(1000, dtype=torch.float32)
        b = a[:10]
        others = [a + 1]
        del a
        others.append(others[0] + 1)
    assert counted.peak == 3 * 4000 and counted.now == 12000    # b keeps a's memory
    del b
    assert counted.now == 8000
