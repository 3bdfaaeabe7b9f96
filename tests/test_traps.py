"""
Each known bug of lab/checks/traps.py is put in, and then what our code passes must fail: the
contract on some drawn workload, in a stage that has the bug; or, for bugs of the schedulers, what
holds of their plans and pages. The X-ray names layout bugs, drawn in red.
"""
import re
from dataclasses import replace

import pytest
import test_paging
import test_scheduler
import torch
from common import (
    POOLED,
    RAGGED,
    ROOT,
    STAGES,
    assert_a_pad_may_overflow,
    assert_contract,
    assert_seen,
    backend,
    knobs_of,
    mixed,
    toy,
    workloads,
)
from matplotlib.colors import to_hex
from test_essays import ESSAYS

from lab.checks.edits import EditError, swapped
from lab.checks.mistakes import mistakes_in
from lab.checks.traps import TRAPS, broken, edits_of
from lab.checks.xray import XRay, sights_at
from lab.views import sights
from model import Head
from request import Request

MODEL, KNOWN = backend("float64").model, backend("float64").known
STAGE = {   # a file, or a function: the stages in which its bugs are looked for
    "model.py": ("interleaved",), "request.py": ("interleaved",), "generate_naive.py": ("naive",),
    "generate_dynamic.py": ("dynamic", "chunked", "interleaved"),
    "beyond/prepacked.py": ("prepacked",), "generate_ragged.py": RAGGED,
    "generate_ragged.py:Flat.attend_masked": ("ragged_mask",),
    "generate_ragged.py:Flat.attend": ("ragged_varlen",),   # to "mask", it is a mask too small
    "generate_paged.py": ("paged",), "generate_paged.py:Paged.attend": POOLED,
    "generate_prefix.py:page_hash": ("prefix",)}
LOOKED_FOR_IN = {"an assumed token names a page": "beyond/ahead.py"}
UNDO = "generate_prefix.py:PrefixScheduler.undo"
ERRORS = {   # those that an error may show before any comparison does, and what it says
    "values of new pads reach the sum": "the model's logits are not finite",
    "pads of the past are not zeros": "the model's logits are not finite",
    "a poisoned null page": "the model's logits are not finite",
    "caches in packed order": "tokens cannot take tokens",
    "one token too many": "tokens cannot take tokens",
    "no end at the context limit": "index out of range",
    "admits what can never fit": "nothing can go on",
    "all of a prompt is found": "nothing can go on"}


def a_query_without_keys_yields_zeros():
    """Head alone promises it: the rectangles give pads values of zero, whatever Head yields."""
    q, k, v = torch.ones(3, 2, 4)
    mask = torch.tensor([[False, False], [True, True]])
    assert torch.equal(Head()(q, k, v, mask=mask), torch.tensor([[0.0] * 4, [1.0] * 4]))


def pads_may_overflow():
    for stage in ("naive", "dynamic", "chunked", "interleaved"):
        assert_a_pad_may_overflow(STAGES[stage], **knobs_of(stage, max_batch=3, token_budget=20))


JUDGES = {   # of traps that no drawn workload shows
    "NaN for a query without keys": a_query_without_keys_yields_zeros,
    "values of new pads reach the sum": pads_may_overflow}


@pytest.mark.parametrize("name", JUDGES)
def test_the_judge_of_a_known_bug_passes_without_it(name):
    JUDGES[name]()


@pytest.mark.parametrize("name", TRAPS)
def test_a_known_bug_is_seen(name):
    function = TRAPS[name][0][0]
    file = LOOKED_FOR_IN.get(name, function.split(":")[0])
    stages = STAGE.get(function) or STAGE.get(file)
    with_the_bug = broken(name, show=False)   # a decorator

    def contract(case):
        requests, pressure = case
        for stage in stages:   # the oracle runs without the bug
            assert_contract(MODEL, with_the_bug(STAGES[stage]), [*map(replace, requests)],
                            known=KNOWN, **knobs_of(stage, **pressure))

    @with_the_bug
    def plans_and_pages(case, cancel):
        test_scheduler.plans_are_right(case, cancel)
        test_scheduler.test_what_can_never_fit_is_refused_by_name_with_the_numbers()
        test_scheduler.test_golden_plans(*test_scheduler.TWINS, ())

    @with_the_bug
    def failed_passes(case, events):
        test_paging.every_step(case, True, events)

    @with_the_bug
    def essay(case):
        ESSAYS[file][1](*case)

    if name in JUDGES:
        error = assert_seen(with_the_bug(JUDGES[name]))
    elif file in ESSAYS:
        error = assert_seen(essay, ESSAYS[file][0])
    elif function == UNDO:
        error = assert_seen(failed_passes, workloads(), test_paging.EVENTS)
    elif stages:
        error = assert_seen(contract, workloads())
    else:
        error = assert_seen(plans_and_pages, workloads(), test_scheduler.CANCELS)
    assert isinstance(error, AssertionError) or ERRORS.get(name, "no error") in str(error), error


def test_what_cannot_be_put_in_is_not_seen():
    """EditError is none of the errors by which a test sees a bug."""
    outer = 1

    def closure():
        return outer

    for function, old, said in ((Head.forward, "no such code", "'no such code' occurs 0 times"),
                                (Head.forward, "q", "'q' occurs .* times instead of once"),
                                (closure, "outer", "uses names of the function around it")):
        def check():
            with swapped(function, [(old, "1")]):
                pass

        with pytest.raises(EditError, match=said):
            assert_seen(check)
    with pytest.raises(EditError, match="no trap 'x', only 'published mask', "), broken("x"):
        pass


LIST = """# why there is such a list

@@ a paging.py:PagePool.free

first
# its reason
-a part
+of a line

second
+statements that
+    come first

third
-one
-two
+three
-four
+
@@ scheduler.py:Scheduler.add
-five
+six


@@ request.py:advance

fourth
trap: published mask
"""


def test_a_list_of_mistakes_is_read(tmp_path):
    file, free = tmp_path / "mistakes.txt", "paging.py:PagePool.free"
    file.write_text(LIST, encoding="utf-8")
    assert mistakes_in(file, edits_of) == [
        ("a", free, "first", [(free, "a part", "of a line")]),
        ("a", free, "second", [(free, "", "statements that\n    come first")]),
        ("a", free, "third", [(free, "one\ntwo", "three"), (free, "four", ""),
                              ("scheduler.py:Scheduler.add", "five", "six")]),
        ("", "request.py:advance", "fourth", TRAPS["published mask"])]


@pytest.mark.parametrize("text, error, said", [
    ("a sentence", ValueError, "no edit stands below 'a sentence'"),
    ("a sentence\nold\n+new", ValueError, "'old' is no line of an edit"),
    ("a sentence\ntrap: x", EditError, "no trap 'x', only 'published mask', ")])
def test_what_is_no_list_of_mistakes_is_told(text, error, said, tmp_path):
    (tmp_path / "mistakes.txt").write_text(text, encoding="utf-8")
    with pytest.raises(error, match=said):
        mistakes_in(tmp_path / "mistakes.txt", edits_of)


def test_the_sources_tell_of_traps_that_there_are():
    text = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")
    table = text.split("| trap |")[1].split("\n\n")[0]
    named = re.findall(r"^\| (\w[^|]*) \|", table, re.MULTILINE)
    assert len(named) >= 7 and {*named} <= {*TRAPS}


def test_a_trap_is_shown_and_taken_out_even_if_the_block_fails(capsys):
    with pytest.raises(KeyError), broken("published mask"):
        raise KeyError
    assert capsys.readouterr().out.splitlines() == [
        "generate_dynamic.py, Rectangle.lay_out:",
        "  - mask[b, ..., P + T - n:] = True",
        "  + mask[b, ..., P:] = True"]
    assert_contract(MODEL, STAGES["interleaved"], mixed())
    seen = []   # a trap may use names of its own
    with swapped(Head.forward, [("scores = q", "scores = seen.append(q.shape) or q")],
                 seen=seen):
        Head()(*torch.zeros(3, 2, 4))
    Head()(*torch.zeros(3, 2, 4))
    assert seen == [(2, 4)] and "seen" not in Head.forward.__globals__


# --- what the X-ray says of them (that it finds no fault in our code: test_contract.py) -----------

NAMED = {   # what the sentence must hold for each layout bug of the known traps
    "published mask": "pad slot", "pads of the past are seen": "empty key slot",
    "pads written to the cache": "pad slot",
    "no causal rule in a chunk": "sees position",
    "causal rule from the top left": "does not see position",
    "neighbours in a packed row": "of request 'r", "a stream without boundaries": "of request 'r",
    "column positions": "as if at position", "static column positions": "as if at position",
    "positions that run on in a packed row": "as if at position",
    "pages read in one piece": "sees position", "pages known by their own tokens": "sees position",
}


@pytest.mark.parametrize("name", NAMED)
def test_a_layout_bug_is_named(name):
    file, model = TRAPS[name][0][0].split(":")[0], toy(block_size=64)   # wrong positions exist
    stage, requests = STAGE.get(file, ("prefix",))[0], [replace(r, arrival=0) for r in mixed()]
    knobs = knobs_of(stage, max_batch=4, token_budget=8, page_size=3)
    with broken(name, show=False), XRay(model, requests) as xray:
        STAGES[stage](model, requests, **knobs)
    assert any(NAMED[name] in sentence for sentence in xray.faults())
    assert not model._forward_pre_hooks   # it leaves nothing behind


# --- who sees whom, drawn -------------------------------------------------------------------------

def drawn(stage, requests=None, step=1, **knobs):
    """The panels of that step's only pass."""
    requests = requests or [Request([1, 2], 4, name="A"), Request([3], 4, name="B"),
                            Request([7, 8, 9, 10], 1, name="C", arrival=1)]   # a chunk, in step 1
    sight, = sights_at(STAGES[stage], MODEL, requests, step, **knobs)
    return sights.panels(sight), sight


def test_a_step_that_really_ran():
    (a, b, c), _ = drawn("interleaved")
    assert (a.name, a.queries, a.keys) == ("A", ["·", "·", "·", "A2"],
                                           ["A0", "A1", "·", "·", "·", "A2"])
    assert a.cells[3] == ["past", "past", "pad", "pad", "pad", "new"]
    assert b.keys == ["·", "B0", "·", "·", "·", "B1"]
    assert c.cells == [["pad"] * 2 + ["new"] * (i + 1) + [""] * (3 - i) for i in range(4)]
    (panel,), _ = drawn("ragged_mask")
    assert panel.keys == ["A0", "A1", "A2", "B0", "B1", "C0", "C1", "C2", "C3"]
    assert panel.cells[1] == ["", "", "", "past", "new", "", "", "", ""]
    with pytest.raises(ValueError, match="no forward pass in step 99, the last step is 3"):
        drawn("interleaved", step=99)


@pytest.mark.parametrize("stage", [name for name in STAGES if name != "no_cache"])
def test_no_stage_draws_a_wrong_key(stage):
    knobs = knobs_of(stage, max_batch=4, token_budget=8, page_size=2, pages=26)
    for step in range(3):
        for sight in sights_at(STAGES[stage], MODEL, mixed(), step, **knobs):
            for panel in sights.panels(sight):
                assert not {kind for row in panel.cells for kind in row} & {"wrong", "missing"}
                assert all(len(row) == len(panel.keys) for row in panel.cells)


def test_seen_pads_are_red_and_unseen_keys_are_marked():
    with broken("published mask", show=False):
        panels, sight = drawn("interleaved")
    assert panels[0].cells[3] == ["past", "past", "wrong", "wrong", "wrong", "new"]
    colors = [to_hex(patch.get_facecolor()).upper()
              for patch in sights.draw({"as published": sight}).axes[0].patches]
    assert colors.count(sights.RED) == 3
    with broken("causal rule from the top left", show=False):
        panels, _ = drawn("unbatched", [Request([1, 2, 3], 2, name="A")])
    assert panels[0].cells == [["past", "missing", "missing", "missing"]]
    with broken("neighbours in a packed row", show=False):
        panels, _ = drawn("prepacked", step=0, requests=[
            Request([1] * n, 1, name=name) for n, name in ((5, "A"), (3, "B"), (2, "C"))])
    assert panels[1].cells[3] == ["wrong"] * 3 + ["new", ""]
