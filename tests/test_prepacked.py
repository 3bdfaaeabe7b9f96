"""Stage 5: which prompt goes into which row, and the experiments. (Claims P1 to P10 say more.)"""
import pytest
import torch
from common import STAGES, VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from test_claims import MODEL, close, ready, run, whole

from experiments import prepacking
from generate_prepacked import first_fit_decreasing
from generate_ragged import Flat
from model import GPT, GPTConfig
from request import Request, prepare


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_no_prompt_would_have_fitted_into_an_earlier_row(lengths):
    size = max(lengths)
    bins = first_fit_decreasing(lengths, size)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    full = [sum(lengths[i] for i in members) for members in bins]
    assert max(full) <= size and len(bins) >= -(-sum(lengths) // size)
    for b, members in enumerate(bins):
        assert all(earlier + min(lengths[i] for i in members) > size for earlier in full[:b])


def test_dataset_packing_chooses_which_requests_to_admit_together():
    """16 prompts, 8 and 1 tokens in turn: row by row, 8 at a time make full rows."""
    slots = {}
    for stage in "prepacked", "prepacked_dataset":
        trace = STAGES[stage](MODEL, ready(*[8, 1] * 4, *[7, 1] * 4, new=1), max_batch=8)
        assert all(p.pad_slots == p.padded_keys for p in trace.passes)
        slots[stage] = sum(p.slots for p in trace.passes)
    assert slots["prepacked_dataset"] < slots["prepacked"]


def test_a_bad_pack_is_refused():
    with pytest.raises(ValueError, match="pack must be 'batch' or 'dataset', not 'rows'"):
        STAGES["prepacked"](MODEL, [Request([1])], pack="rows")


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
    counted = prepacking.Bytes()
    with counted:
        a = torch.ones(1000, dtype=torch.float32)
        b = a[:10]
        others = [a + 1]
        del a
        others.append(others[0] + 1)
    assert counted.peak == 3 * 4000 and counted.now == 12000    # b keeps a's memory
    del b
    assert counted.now == 8000


def test_memory_on_the_meta_device_is_that_of_a_real_run():
    config = GPTConfig(block_size=64, vocab_size=100, n_layer=2, n_head=2, n_embd=16)
    with torch.device("meta"):
        meta = GPT(config)
    for method in prepacking.METHODS:
        real, counted = (prepacking.peak_bytes(model, method, [3, 40, 17, 8, 1])
                         for model in (GPT(config), meta))
        assert abs(real - counted) <= 0.02 * real, method
