"""
Stage 5: which prompt goes into which row, that the unpacked caches are exactly those of each prompt
alone, and the experiments.
"""
import json

import pytest
import torch
from common import BLOCK_SIZE, STAGES, VOCAB, examples, toy
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import prepacking
from generate_prepacked import Packed, first_fit_decreasing
from generate_ragged import Flat
from model import GPT, GPTConfig
from request import Request, prepare

MODEL = toy()
LENGTHS = st.lists(st.integers(1, BLOCK_SIZE), min_size=1, max_size=9)


def plan_of(lengths):
    requests = [Request([(7 * i + 3 * j + j * j) % VOCAB for j in range(n)], 4, name=f"r{i}")
                for i, n in enumerate(lengths)]
    return [(request, len(request.prompt)) for request in prepare(requests, MODEL.config)]


@torch.inference_mode()
def run(batch):
    return MODEL(batch.tokens, batch.positions, batch.attend, batch.rows)


def assert_close(mine, theirs):
    assert mine.shape == theirs.shape
    assert (mine - theirs).abs().max() <= 1e-10 * theirs.abs().max()


@pytest.mark.parametrize("lengths, size, bins", [
    ([6, 3, 2, 1], 6, [[0], [1, 2, 3]]),          # the docstring's
    ([1, 2, 3, 6], 6, [[3], [2, 1, 0]]),
    ([5, 5, 5], 5, [[0], [1], [2]]),              # equal lengths: r = k
    ([4], 4, [[0]]),                              # a single prompt
    ([7, 4, 3], 7, [[0], [1, 2]]),                # fills the row exactly
    ([1, 1, 1], 1, [[0], [1], [2]]),              # one-token prompts
    ([8, 1, 1, 1], 8, [[0], [1, 2, 3]]),
    ([6, 5, 4, 3], 9, [[0, 3], [1, 2]]),          # the first row that has room
])
def test_first_fit_decreasing(lengths, size, bins):
    assert first_fit_decreasing(lengths, size) == bins


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


@settings(max_examples=examples(80), deadline=None, derandomize=True)
@given(lengths=LENGTHS)
def test_unpacked_caches_are_those_of_each_prompt_alone(lengths):
    plan, alone = plan_of(lengths), plan_of(lengths)
    logits = run(Packed(plan))
    for i, ((request, n), (single, _)) in enumerate(zip(plan, alone)):
        assert_close(logits[i], run(Flat([(single, n)]))[0])
        for layer in range(MODEL.config.n_layer):
            for mine, theirs in zip(request.kv.read(layer, n), single.kv.read(layer, n)):
                assert_close(mine, theirs)


@pytest.mark.parametrize("lengths, rows", [
    ([5, 5, 5], 3), ([7], 1), ([1, 1, 1, 1], 4), ([9, 4, 5], 2), ([6, 1, 1, 1, 1, 1, 1], 2)])
def test_shape_and_padding(lengths, rows):
    m = max(lengths)
    batch = Packed(plan_of(lengths))
    assert batch.tokens.shape == (rows, m)
    assert batch.cost() == {"score_entries": rows * m * m,
                            "padded_keys": rows * m - sum(lengths)}
    forward, = STAGES["prepacked"](MODEL, [Request([1] * n, 1) for n in lengths]).passes
    assert forward.shape == (rows, m)
    assert forward.pad_slots == forward.padded_keys == rows * m - sum(lengths)


def test_dataset_packing_chooses_which_requests_to_admit_together():
    """16 prompts, 8 and 1 tokens in turn: row by row, 8 at a time make full rows."""
    lengths = [8, 1] * 4 + [7, 1] * 4
    slots = {}
    for stage in "prepacked", "prepacked_dataset":
        trace = STAGES[stage](MODEL, [Request([1] * n, 1) for n in lengths], max_batch=8)
        slots[stage] = sum(p.slots for p in trace.passes)
    assert slots["prepacked_dataset"] < slots["prepacked"]


def test_a_bad_pack_is_refused():
    with pytest.raises(ValueError, match="pack must be 'batch' or 'dataset', not 'rows'"):
        STAGES["prepacked"](MODEL, [Request([1])], pack="rows")


@pytest.mark.parametrize("method", prepacking.METHODS)
def test_every_method_of_the_experiments_prefills_each_prompt_right(method):
    """The same logits as alone, whatever is measured."""
    lengths, found = [3, 9, 1, 7, 7, 2, 12, 5], {}
    group, layout = prepacking.METHODS[method]
    for requests in group(prepare(prepacking.requests_of(lengths, VOCAB), MODEL.config), 3):
        batch = layout(requests, None)
        for request, logits in zip(batch.sampled, run(batch)):
            found[request.name] = logits
    for request in prepare(prepacking.requests_of(lengths, VOCAB), MODEL.config):
        assert_close(found[request.name], run(Flat([(request, len(request.prompt))]))[0])


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
        lengths = [3, 40, 17, 8, 1]
        real = prepacking.peak_bytes(GPT(config), method, lengths)
        counted = prepacking.peak_bytes(meta, method, lengths)
        assert abs(real - counted) <= 0.02 * real, method


def test_the_command(tmp_path, capsys, monkeypatch):
    """All of it, with a tiny model, prompts of at most 24 tokens, and memory for some of them."""
    def tiny(**sizes):
        return GPTConfig(**{**sizes, "vocab_size": 97, "n_head": 2, "n_embd": 32})

    def fewer(model, prompts, repeats, predictors=prepacking.predictors):
        return predictors(model, 400, repeats)

    monkeypatch.setattr(prepacking, "GPTConfig", tiny)
    monkeypatch.setattr(prepacking, "predictors", fewer)
    monkeypatch.setattr(prepacking, "CONTEXT", 24)
    file, picture, texts = tmp_path / "p.json", tmp_path / "p.png", tmp_path / "prompts.txt"
    texts.write_text("one\n\ntwo words\n\n" + "three " * 9)
    flags = ["--quick", "--prompts", texts, "--memory", 0.0003, "--json", file, "--plot", picture]
    assert prepacking.main([str(flag) for flag in flags]) == 0
    said = capsys.readouterr().out
    for words in (*prepacking.METHODS, "3 prompts", "correlation with r/k", "the largest k",
                  "1.6x to 3.5x", "up to 16x"):
        assert words in said
    result = json.loads(file.read_text())
    assert set(result["kinds"]) == {str(texts)}
    assert [path.stem for path in sorted(tmp_path.glob("p-*.png"))] == [
        "p-batch-size", "p-kinds", "p-latency", "p-memory", "p-predictors"]
    for points in result["predictors"].values():
        assert all(r_k <= 1 and speedup > 0 for r_k, _, speedup in points)
    for found in result["largest"].values():
        assert 1 < found["full batching"] <= found["prepacking, batch"] < 64
