"""The notebooks' devices: traps, X-ray pictures, questions, exercises."""
import inspect
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from common import STAGES, alone, toy
from matplotlib.colors import to_hex

from generate_dynamic import Rectangle
from model import Head
from request import Request
from toolbox import sights
from toolbox.traps import broken, swapped
from toolbox.xray import XRay, sights_at

sys.path.insert(0, str(Path(__file__).parent.parent / "notebooks"))
import lesson  # noqa: E402 (it lies beside the notebooks)

MODEL = toy()
STEM = [1, 2, 3, 4]
KNOBS = dict(max_batch=4, token_budget=8, page_size=2, pages=26)


def workload():
    """Prompts of all kinds of lengths; some begin alike, one with another one's middle."""
    prompts = [[5, 6], [*STEM, 7], [*STEM, 8, 9], [3, 4, 7, 1], [2] * 11, [9], [*STEM, 8, 9, 1, 3],
               [4, 7, 2, 9, 1]]
    return [Request(prompt, 3 + i, name="ABCDEFGH"[i], arrival=i // 4)
            for i, prompt in enumerate(prompts)]


def run(stage):
    """The generated tokens of each request, and what the X-ray says; an error counts, too."""
    requests = workload()
    names = inspect.signature(STAGES[stage]).parameters
    with XRay(MODEL, requests) as xray:
        try:
            STAGES[stage](MODEL, requests, **{k: v for k, v in KNOBS.items() if k in names})
        except Exception as error:
            return repr(error), []
    return [request.generated for request in requests], xray.faults()


RIGHT = [alone(MODEL, request)[0] for request in workload()]
STRIKES = {   # trap: a stage in which it changes tokens, and what the X-ray says of it
    "published mask": ("interleaved", "pad slot"),
    "pads written to the cache": ("interleaved", "pad slot"),
    "column positions": ("dynamic", "as if at position"),
    "static column positions": ("naive", "as if at position"),
    "right padding": ("naive", None),    # every token sees what it should
    "no causal rule in a chunk": ("chunked", "sees position"),
    "causal rule from the top left": ("unbatched", "does not see position"),
    "samples from a partial prefill": ("chunked", None),
    "prompts before decodes": (None, None),
    "neighbours in a packed row": ("prepacked", "of request"),
    "positions that run on in a packed row": ("prepacked", "as if at position"),
    "a stream without boundaries": ("ragged_mask", "of request"),
    "pages read in one piece": ("paged", "sees position"),
    "pages known by their own tokens": ("paged", "sees positions"),
}


@pytest.mark.parametrize("name", STRIKES)
def test_a_trap_strikes_and_is_taken_out_again(name, capsys):
    stage, sentence = STRIKES[name]
    with broken(name):
        outcomes = {each: run(each) for each in ([stage] if stage else STAGES)}
    if stage is None:   # it changes when a token comes, never which
        assert all(tokens == RIGHT and not faults for tokens, faults in outcomes.values())
    else:
        tokens, faults = outcomes[stage]
        assert tokens != RIGHT
        assert bool(faults) == bool(sentence) and all(sentence in fault for fault in faults[:1])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith(":") and {line[:4] for line in printed} >= {"  - ", "  + "}
    for each in outcomes:
        assert run(each) == (RIGHT, [])


def test_a_trap_is_taken_out_when_the_block_fails():
    with pytest.raises(KeyError):
        with broken("published mask", show=False):
            raise KeyError
    assert run("interleaved") == (RIGHT, [])


def test_an_unknown_trap_and_a_line_that_is_not_there():
    with pytest.raises(ValueError, match="no trap 'x', only 'published mask', "):
        with broken("x"):
            pass
    with pytest.raises(ValueError, match="Head.forward: 'no such code' occurs 0 times"):
        with swapped(Head.forward, [("no such code", "")]):
            pass


def test_swapped_code_may_use_other_names_and_leaves_none_behind():
    changes = [("scores = q @", "scores = seen.append(q.shape) or q @")]
    seen = []
    with swapped(Head.forward, changes, seen=seen):
        Head()(*torch.zeros(3, 2, 4))
    assert seen == [(2, 4)] and "seen" not in Head.forward.__globals__
    Head()(*torch.zeros(3, 2, 4))
    assert len(seen) == 1


# --- who sees whom, drawn -------------------------------------------------------------------------

def decode_beside_a_chunk():
    return [Request([1, 2], 4, name="A"), Request([3], 4, name="B"),
            Request([7, 8, 9, 10], 1, name="C", arrival=1)]


def test_a_step_that_really_ran():
    sight, = sights_at(STAGES["interleaved"], MODEL, decode_beside_a_chunk(), step=1)
    a, b, c = sights.panels(sight)
    assert (a.name, a.queries, a.keys) == ("A", ["·", "·", "·", "A2"],
                                           ["A0", "A1", "·", "·", "·", "A2"])
    assert a.cells[3] == ["past", "past", "pad", "pad", "pad", "new"]
    assert b.keys == ["·", "B0", "·", "·", "·", "B1"]
    assert c.cells == [["pad"] * 2 + ["new"] * (i + 1) + [""] * (3 - i) for i in range(4)]
    flat, = sights_at(STAGES["ragged_mask"], MODEL, decode_beside_a_chunk(), step=1)
    panel, = sights.panels(flat)
    assert panel.keys == ["A0", "A1", "A2", "B0", "B1", "C0", "C1", "C2", "C3"]
    assert panel.cells[1] == ["", "", "", "past", "new", "", "", "", ""]
    with pytest.raises(ValueError, match="no forward pass in step 99, the last step is 3"):
        sights_at(STAGES["interleaved"], MODEL, decode_beside_a_chunk(), step=99)


@pytest.mark.parametrize("stage", [name for name in STAGES if name != "no_cache"])
def test_no_stage_draws_a_wrong_key(stage):
    names = inspect.signature(STAGES[stage]).parameters
    knobs = {k: v for k, v in KNOBS.items() if k in names}
    for step in range(3):
        for sight in sights_at(STAGES[stage], MODEL, workload(), step, **knobs):
            for panel in sights.panels(sight):
                kinds = {kind for row in panel.cells for kind in row}
                assert not kinds & {"wrong", "missing"}
                assert all(len(row) == len(panel.keys) for row in panel.cells)


def test_seen_pads_are_red_and_unseen_keys_are_marked():
    with broken("published mask", show=False):
        sight, = sights_at(STAGES["interleaved"], MODEL, decode_beside_a_chunk(), step=1)
    panels = sights.panels(sight)
    assert panels[0].cells[3] == ["past", "past", "wrong", "wrong", "wrong", "new"]
    figure = sights.draw({"as published": sight})
    colors = [to_hex(patch.get_facecolor()).upper() for patch in figure.axes[0].patches]
    assert colors.count(sights.RED) == 3
    with broken("causal rule from the top left", show=False):
        sight, = sights_at(STAGES["unbatched"], MODEL, [Request([1, 2, 3], 2, name="A")], step=1)
    assert sights.panels(sight)[0].cells == [["past", "missing", "missing", "missing"]]
    with broken("neighbours in a packed row", show=False):
        requests = [Request([1] * n, 1, name=name) for n, name in ((5, "A"), (3, "B"), (2, "C"))]
        sight, = sights_at(STAGES["prepacked"], MODEL, requests, step=0)
    assert sights.panels(sight)[1].cells[3] == ["wrong"] * 3 + ["new", ""]


# --- questions and sources ------------------------------------------------------------------------

@pytest.mark.parametrize("right, guesses, wrong", [
    (12, [12, 12.0, "12", "12"], [11, "twelve", None, [12]]),
    (1600, ["1,600", 1600], [160]),
    (68.72, [68.7, 69, "68.7"], [72, "?"]),
    ("A, C", ["A, C", "C A", ["C", "A"], "a,c"], ["A", "A, B, C"]),
    ([3, 4], [[3, 4], (3, 4), ["3", "4"]], [[4, 3], [3], 3]),
])
def test_a_guess_is_judged_by_what_it_says(right, guesses, wrong):
    assert all(lesson.same(guess, right) for guess in guesses)
    assert not any(lesson.same(guess, right) for guess in wrong)


def test_source_prints_a_whole_short_function_without_its_docstring(capsys):
    lesson.source(Rectangle.attend)
    printed = capsys.readouterr().out
    assert printed.startswith("# generate_dynamic.py\ndef attend(self, layer, q, k, v):")
    assert printed.endswith("return out\n") and '"""' not in printed
    with pytest.raises(ValueError, match="Head.forward has 17 lines, .* at most 12"):
        lesson.source(Head.forward)


def test_check_and_survivors_agree(capsys):
    requests = lesson.letters(A=4, B=2, D=9, arrivals={"D": 1})
    with broken("published mask", show=False):
        lesson.check("interleaved", requests)
    assert "1/3 requests identical" in capsys.readouterr().out
    assert lesson.survivors("published mask", "interleaved", requests) == "D"
    assert [replace(request).generated for request in requests] == [[]] * 3   # copies ran


def test_show_draws_a_run_as_a_page():
    requests = lesson.letters(A=4, B=2)
    trace = lesson.run("interleaved", requests, token_budget=4)
    frame = lesson.show(trace)._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and "&quot;token_budget&quot;:4" in frame
    assert trace.recording.wrong == 0 and not requests[0].generated
    with lesson.broken("published mask", show=False):
        wrong = lesson.run("interleaved", requests, token_budget=4)
    both = lesson.show({"right": trace, "wrong": wrong})._repr_html_()   # after the bug has gone
    assert wrong.recording.wrong > 0 and both.count("&quot;idea&quot;") == 2


def test_show_refuses_a_run_that_was_not_recorded():
    trace = lesson.STAGES["naive"](lesson.model, lesson.letters(A=4))
    with pytest.raises(ValueError, match="was not recorded"):
        lesson.show(trace)
