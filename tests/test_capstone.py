"""
The last notebook: its judge accepts our functions in several styles, names what is wrong and whose
fault it is, and the notebook gives no solution away.
"""
import inspect
import json
import linecache
import re
import sys
from unittest.mock import patch

import pytest
from common import ROOT

from lab.checks.edits import edited, function_named

pytest.importorskip("IPython")
FOLDER = ROOT / "notebooks"
sys.path.insert(0, str(FOLDER))
import capstone  # noqa: E402 (it lies beside the notebooks)

TEXT = (FOLDER / "08_your_engine.ipynb").read_text(encoding="utf-8")
PLACES = [place for _, functions in capstone.STEPS.values() for _, place in functions.values()]


def written(place, *edits):
    """Our function, edited, as if it had been written in a cell."""
    text, file = edited(capstone.ours(place), edits), f"<{place}, {edits}>"
    linecache.cache[file] = len(text), None, text.splitlines(True), file
    scope = dict(inspect.unwrap(function_named(place)).__globals__)
    exec(compile(text, file, "exec"), scope)
    return scope[place.rpartition(":")[2].rpartition(".")[2]]


def judged(name, step, capsys, *edits):
    capstone.BUILT.clear()
    capstone.judge(step, written(capstone.STEPS[step][1][name][1], *edits))
    return capsys.readouterr().out


@pytest.fixture
def built(capsys):
    """All functions are right."""
    for step, (_, functions) in capstone.STEPS.items():
        capstone.judge(step, *(written(place) for _, place in functions.values()))
    return capsys.readouterr().out


def test_right_functions_serve_step_by_step_and_the_race_is_a_tie(built, capsys):
    assert built.count(": right.") == len(PLACES)
    assert re.findall(r"(.*): 4/4 requests got the tokens", built) == [
        stage for stage, _ in capstone.STEPS.values()]
    with patch.object(capstone, "timelines"):
        for pages in 64, 40:
            capstone.race(pages=pages)
            yours, ours = (line.split() for line in capsys.readouterr().out.splitlines()
                           if "12/12" in line)
            assert yours[1:] == ours[1:] and all(figure in TEXT for figure in yours[1:3])


@pytest.mark.parametrize("name, step, old, new", [
    ("schedule", 1, "for request in self.running:", "for request in [*self.running]:\n"
     "        if request not in self.running:\n            continue"),
    ("schedule", 1, "return plan", "return tuple(plan)"),
    ("attend_varlen", 2, "q[..., a:b, :]", "q[\n            ..., a:b, :]"),   # no blank
    ("lay_out", 2, "self.sampled = [self.plan[i][0] for i in due]",
     "self.sampled = tuple(self.plan[i][0] for i in due)[:]; self.sampled = [*self.sampled]"),
    ("attend_varlen", 2, "head(q[..., a:b, :], keys, values)", """\
torch.nn.functional.scaled_dot_product_attention(
            q[:, a:b], keys, values, attn_mask=torch.ones(
                b - a, keys.size(1)).bool().tril(keys.size(1) - b + a))"""),
    ("hash_of_page", 4, "while len(hashes) <= i",
     "while len(hashes) < request.num_tokens // size"),
    ("schedule", 1, "self.make_room(request, n)      #", "assert self.make_room(request, n)   #"),
    ("schedule", 1, "budget = self.token_budget",
     "budget = __import__('numpy').int64(self.token_budget)"),
    ("lay_out", 2, 'if self.attention == "mask"', "if False"),   # step 2 does not speak of it
    ("attend", 2, 'if self.attention == "mask":', "if False:"),
    ("attend_varlen", 2, "head(q[..., a:b, :], keys, values)", """\
torch.einsum("hts,hsd->htd", (torch.einsum("htd,hsd->hts", q[:, a:b], keys) / q.size(-1)**.5)
        .masked_fill(torch.ones(b - a, keys.size(1)).tril(keys.size(1) - b + a) == 0, -torch.inf)
        .softmax(-1), values)"""),
])
def test_the_judge_accepts_another_style(name, step, old, new, capsys):
    assert judged(name, step, capsys, (old, new)) == f"{name}: right.\n"


@pytest.mark.parametrize("name, step, old, new, said", [   # mistakes are test_assignments.py's
    ("advance", 1, "request.computed += n", "request.computed += 1 / 0",
     "ZeroDivisionError: division by zero (this cell, line "),
    ("schedule", 1, "if n and self.make_room(request, n):", "if n:", "as if nobody had to ask for"),
    ("schedule", 1, "plan = []", "while True:\n        pass", "it does not end: 10 seconds"),
    ("schedule", 1, "while budget and not preempted and len(self.running) < self.max_batch:",
     "for _ in self.waiting:", "nobody (deque mutated during iteration)"),
    ("lay_out", 2, "self.plan[i][0] for", "self.plan[i][0].name for", "sampled: ['A'], expected"),
    ("attend_varlen", 2, "out = []",
     "keys, values = (torch.cat(t, 1) for t in zip(*caches))\n    return "
     "head(q, keys, values, mask=self.block_diagonal())",
     "as if all scores were computed"),
    ("attend_varlen", 2, "return torch.cat(out, dim=-2)", "return torch.cat(out[::-1], dim=-2)",
     "as if the outputs stood one behind the other in the wrong order"),
    ("schedule", 1, "(self, step)", "(step)",
     "A method's first parameter is `self`: def schedule(self, step)."),
    ("advance", 1, "(plan, tokens)", "(plan)", "with 2 arguments: def advance(plan, tokens)."),
    ("schedule", 1, "for request in self.running:", "for request in sorted(self.running, "
     "key=lambda r: r.todo):", "as if decodes came first: those that run go on in their own"),
    ("attend", 2, "k[:, a:b], v[:, a:b])", "k[:, start:end], v[:, start:end])",
     "as if start and end were places in the stream"),
    ("lay_out", 3, "super(Paged, self)", "super()",
     "`super()` works only inside a class, so name the class that you mean. lay_out, with "),
    ("make_room", 3, "if victim is request:\n            return False", "pass",
     "as if a request that was preempted itself could go on"),
    ("free", 4, "if self.ref_count[page] == 0", "if self.ref_count[page] == 1",
     "as if a page that one other table has were free"),
    ("admit", 4, "request.computed = len(found) * self.pool.page_size", "pass",
     "as if `computed` stayed 0, although pages are found: they would be computed again"),
    ("admit", 4, "if new + found_free >", "if self.pool.needed(request.todo) >",
     "as if every page had to be new"),
    ("admit", 4, "self.hash_of_page(request, i) for i in range(full)", "[]",
     "as if nothing were looked up"),
    ("cache_filled", 4, "end // size)", "-(-end // size))", "a page that is not full"),
    ("free", 4, "if page not in self.hash_of", "if False", "pages that nobody can find"),
    ("free", 4, "reversed(table)", "sorted(reversed(table), key=lambda page: page not in "
     "self.hash_of and page)", "free_queue: [2, 1, 3, 0], expected [1, 2, 3, 0]"),
    ("lay_out", 2, "[self.plan[i][0] for i in due]", "{self.plan[i][0] for i in due}", "a set"),
    ("lay_out", 2, "due = indices_due(self.plan)", "due = indices_due(self.plan)\n    "
     "self.plan[0][0].computed += 1", "and computed: [1, 0, 1], expected [1, 0, 0]"),
    ("lay_out", 3, "page_size = self.pool.page_size", "page_size = 4", "not yet. lay_out, with "),
    ("admit", 3, "request.block_table = []", "request.block_table = ()", "(), expected 0"),
    ("admit", 3, "request.block_table = []", "request.block_table = globals().setdefault("
     "'one', [])", "pages becomes: 1, expected 0"),
    ("preempt", 3, "self.free(request)", "request.block_table = request.block_table",
     "A's pages becomes: what it was, expected None"),
    ("hash_of_page", 4, "hashes[-1] if hashes else b\"\"", "b\"\"", "a page were known by its own"),
    ("hash_of_page", 4, "hashes = request.page_hashes", "hashes = []", "hold it: False"),
    ("hash_of_page", 4, "hashes = request.page_hashes",
     "hashes = vars(self).setdefault(request.name, [])",
     "as if hashes were kept with the scheduler, not with the request"),
    ("make_room", 3, "self.pool.allocate(request.block_table, more)", "self.pool.allocate("
     "request.block_table, more)\n    request.block_table.reverse()", "pages stay where they are"),
    ("preempt", 3, '["preemptions"] += 1', '["preemptions"] = 1', "preemptions: 1, expected 3"),
    ("admit", 3, "self.pool.needed(request.todo)", "-(-request.todo // 4)", "page_size 2"),
    ("admit", 4, "self.pool.share(request.block_table, found)", "self.pool.share([], found)\n    "
     "self.pool.share(request.block_table, found)", "pages that are counted once more"),
])
def test_the_judge_names_what_is_wrong(name, step, old, new, said, capsys):
    with patch.object(capstone, "limited", lambda _, real=capstone.limited: real(1)):
        heard = judged(name, step, capsys, (old, new))
    assert heard.startswith(f"{name}: not yet. ") and heard.count("\n") == 1
    assert said.replace("10", "1") in heard, heard


def test_blank_functions_are_named_others_are_judged_and_one_may_give_up(capsys):
    place = capstone.STEPS[1][1]["schedule"][1]
    blank = written(place, ("plan = []", "..."))
    capstone.BUILT.clear()
    capstone.judge(1, blank, written(capstone.STEPS[1][1]["advance"][1]), len)
    said = capsys.readouterr().out
    assert said.splitlines() == [
        "schedule: still blank: replace ... by your code", "advance: right.",
        "len is no function of step 1, which has schedule, advance."]
    capstone.judge(2, *(written(place) for _, place in capstone.STEPS[2][1].values()))
    assert capsys.readouterr().out.endswith("\nragged, varlen waits for step 1: schedule.\n")
    capstone.race()
    assert capsys.readouterr().out.startswith("The race needs step 1: schedule; step 3: ")
    for step in capstone.STEPS:
        capstone.give_up(step)
    assert "advance" not in capsys.readouterr().out and not capstone.missing(4)


def test_wrong_tokens_are_seen_in_the_race(built, capsys):
    place = capstone.STEPS[4][1]["hash_of_page"][1]
    with patch.object(capstone, "timelines"), patch.dict(capstone.BUILT, {
            place: lambda self, request, i: b"all pages are one"}):
        capstone.race(pages=64)
    [yours] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("yours")]
    assert "12/12" not in yours


def test_the_notebook_shows_no_solution_but_in_second_hints():
    text = re.sub(r"<details>.*?</details>", "", "\n".join(
        "".join(cell["source"]) + str(cell.get("outputs")) for cell in json.loads(TEXT)["cells"]),
        flags=re.DOTALL)
    for place in PLACES:
        lines = [line.strip() for line in capstone.ours(place).splitlines()[1:]]
        assert not [line for line in lines if len(line) > 30 and '"""' not in line and line in text]
