"""
The last notebook: its judge accepts our functions in several styles, names what is wrong and whose
fault it is, and the notebook gives no solution away.
"""
import inspect
import io
import json
import linecache
import re
import sys
from contextlib import redirect_stdout
from unittest.mock import patch

import pytest
import torch
from common import ROOT

from generate_prefix import page_hash
from generate_ragged import Flat
from lab.checks.edits import edited, function_named
from request import indices_due

pytest.importorskip("IPython")
FOLDER = ROOT / "notebooks"
sys.path.insert(0, str(FOLDER))
import capstone  # noqa: E402 (it lies beside the notebooks)

TEXT = (FOLDER / "08_your_engine.ipynb").read_text(encoding="utf-8")
IMPORTED = {"Flat": Flat, "indices_due": indices_due, "page_hash": page_hash, "torch": torch}
PLACES = [place for _, functions in capstone.STEPS.values() for _, place in functions.values()]


def written(place, *edits):
    """Our function, edited, as if it had been written in a cell."""
    text, file = edited(capstone.ours(place), edits), f"<{place}, {edits}>"
    linecache.cache[file] = len(text), None, text.splitlines(True), file
    scope = dict(inspect.unwrap(function_named(place)).__globals__)
    exec(compile(text, file, "exec"), scope)
    return scope[place.rpartition(":")[2].rpartition(".")[2]]


def in_a_cell(text):
    """The names that a cell of the notebook defines."""
    file = f"<a cell, {hash(text)}>"
    linecache.cache[file] = len(text), None, text.splitlines(True), file
    exec(compile(text, file, "exec"), cell := dict(IMPORTED))
    return cell


def nothing_is_right():
    capstone.BUILT.clear()
    capstone.OURS.clear()


def judged(name, step, capsys, *edits):
    nothing_is_right()
    capstone.judge(step, written(capstone.STEPS[step][1][name][1], *edits))
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def all_right():
    """All functions, judged and right; and what was printed."""
    nothing_is_right()
    with redirect_stdout(io.StringIO()) as printed:
        for step, (_, functions) in capstone.STEPS.items():
            capstone.judge(step, *(written(place) for _, place in functions.values()))
    return dict(capstone.BUILT), printed.getvalue()


@pytest.fixture
def built(all_right):
    """All functions are right. What was printed when they were judged."""
    nothing_is_right()
    functions, printed = all_right
    capstone.BUILT.update(functions)
    return printed


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
    ("admit", 4, "request.computed = len(cached_pages) * self.pool.page_size", "pass",
     "as if `computed` stayed 0, although pages are found: they would be computed again"),
    ("admit", 4, "if new_pages + cached_and_free >", "if self.pool.needed(request.todo) >",
     "as if every page had to be new"),
    ("admit", 4, "(self.hash_of_page(request, i) for i in range(full_pages))", "[]",
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
    ("admit", 4, "self.pool.share(request.block_table, cached_pages)",
     "self.pool.share([], cached_pages)\n    self.pool.share(request.block_table, cached_pages)",
     "pages that are counted once more"),
    ("make_room", 3, "self.pool.allocate(request.block_table, more)", "for _ in range(more):\n"
     "        request.block_table.append(self.pool.free_queue.popleft())",
     "not yet. Use self.pool.allocate: "),   # step 4's pool has another queue
    ("preempt", 3, "self.free(request)", "for page in request.block_table:\n"
     "        self.pool.free_queue.append(page)\n    request.block_table = None",
     "not yet. Use self.free: "),
    ("make_room", 3, "while more > len(self.pool.free_queue):", "free = len(self.pool.free_queue)"
     "\n    while more > free:\n        free += len(self.victim().block_table)",
     "as if every page that a victim gives back were free: another table may have it, too"),
    ("cache_filled", 4, "self.pool.register(", "if self.hash_of_page(request, i) not in "
     "self.pool.cached:\n            self.pool.register(",
     "as if a page whose hash another page has need not be cached"),
    ("attend", 2, "return self.attend_varlen(q, caches)", "return 1.5 * self.attend_varlen(q, "
     "caches)", "layer 3, the output for A, token 0, head 0: [0.61, -0.144, 0.675], "
     "expected [0.407, -0.096, 0.45]."),
    ("lay_out", 3, "super(Paged, self).lay_out(device)", "self.lay_out(device)",
     "lay_out calls itself without end. Step 2's is Flat.lay_out(self, device). lay_out, with "),
    ("lay_out", 3, "super(Paged, self).lay_out(device)",
     "self.positions = torch.zeros(self.cu_seqlens[-1], dtype=torch.long)",
     "as if Flat's lay_out had been called"),
    ("hash_of_page", 4, "while len(hashes) <= i:", "while self.hash_of_page(request, i):",
     "hash_of_page calls itself without end. hash_of_page, with "),
    ("attend", 2, "caches = []", "caches, layer = [], 0",
     "layer 3, the keys in A's cache, token 0: nothing, expected head 0 ["),
])
def test_the_judge_names_what_is_wrong(name, step, old, new, said, capsys):
    seconds = 1 if "it does not end" in said else 60   # a loaded machine computes slowly
    with patch.object(capstone, "limited", lambda _, real=capstone.limited: real(seconds)):
        heard = judged(name, step, capsys, (old, new))
    assert heard.startswith(f"{name}: not yet. ") and heard.count("\n") == 1
    assert said.replace("10", "1") in heard, heard


def test_blank_functions_are_named_others_are_judged_and_one_may_give_up(capsys):
    blank = in_a_cell("def schedule(self, step):\n    ...\n")["schedule"]
    nothing_is_right()
    capstone.judge(1, blank, written(capstone.STEPS[1][1]["advance"][1]), len)
    said = capsys.readouterr().out
    assert said.splitlines() == [
        "schedule: replace ... by your code, then run the cell.", "advance: right.",
        "len is no function of step 1, which has schedule, advance."]
    capstone.judge(2, *(written(place) for _, place in capstone.STEPS[2][1].values()))
    assert capsys.readouterr().out.endswith("\nragged, varlen waits for step 1: schedule.\n")
    capstone.race()
    assert capsys.readouterr().out.startswith("The race needs step 1: schedule; step 3: ")
    for step in capstone.STEPS:
        capstone.give_up(step)
    assert "advance" not in capsys.readouterr().out and not capstone.missing(4)


@pytest.mark.parametrize("name", ["hash_of_page", "admit", "cache_filled"])
def test_a_cells_function_may_be_called_as_the_function_that_it_is(name, capsys):
    """Steps 2 and 3 do that: Flat.lay_out(self, device). Here all of step 4's are in one cell."""
    nothing_is_right()
    cell = in_a_cell("""
def hash_of_page(self, request, i):
    hashes = request.page_hashes
    if i < len(hashes):
        return hashes[i]
    size = self.pool.page_size
    before = hash_of_page(self, request, i - 1) if i else b""
    hashes.append(page_hash(before, request.slice(i * size, (i + 1) * size)))
    return hashes[i]

def admit(self, request):
    size = self.pool.page_size
    hashes = [hash_of_page(self, request, i) for i in range((request.todo - 1) // size)]
    found = self.pool.find(hashes)
    taken = self.pool.needed(request.todo) - len(found)
    for page in found:
        taken += page in self.pool.free_queue
    if taken > len(self.pool.free_queue):
        return False
    request.block_table = []
    self.pool.share(request.block_table, found)
    request.computed = len(found) * size
    return True

def cache_filled(self, request, start, end):
    size = self.pool.page_size
    for i in range(start // size, end // size):
        self.pool.register(request.block_table[i], hash_of_page(self, request, i))
""")
    mine = cell["hash_of_page"]
    capstone.judge(4, cell[name])
    assert capsys.readouterr().out == f"{name}: right.\n"
    assert cell["hash_of_page"] is mine


def test_a_function_that_was_right_and_is_broken_does_not_count(built, capsys):
    place = capstone.STEPS[2][1]["attend"][1]
    for edit in ("caches = []", "1 / 0"), ("caches = []", "..."):
        capstone.judge(2, written(place, edit))
        assert capstone.missing(2) == ["step 2: attend"]
        capstone.race()
        assert capsys.readouterr().out.endswith("The race needs step 2: attend. "
                                                "Or give_up(number).\n")
        capstone.judge(2, written(place))
        assert not capstone.missing(4)


def test_prints_are_held_back_and_ten_lines_of_the_case_that_fails_are_shown(built, capsys):
    place = capstone.STEPS[1][1]["schedule"][1]
    talks = "plan = []\n    for i in range(30):\n        print('line', i)"
    capstone.judge(1, written(place, ("plan = []", talks)))
    assert capsys.readouterr().out == (
        "schedule: right.\nchunked: 4/4 requests got the tokens that the model gives each alone\n")
    with patch.object(capstone, "timelines"):
        capstone.race()
    assert "line" not in capsys.readouterr().out
    capstone.judge(1, written(place, ("plan = []", talks), ("return plan", "return plan[1:]")))
    first, *printed = capsys.readouterr().out.splitlines()
    assert first.startswith("schedule: not yet. schedule, with step ")
    assert first.endswith(". In this case your code prints:")
    assert printed == [f"  line {i}" for i in range(10)] + ["  ..."]
    shouts = "plan = []\n    print('x' * 5000)"
    capstone.judge(1, written(place, ("plan = []", shouts), ("return plan", "return plan[1:]")))
    _, printed = capsys.readouterr().out.splitlines()
    assert printed.endswith("xxx...") and len(printed) < 250


def test_a_line_that_is_left_above_finished_code_is_named(capsys):
    said = judged("advance", 1, capsys, ("due = indices_due(plan)", "...\n    due = "
                                         "indices_due(plan)"))
    assert said == ("advance: your code still has the line `...` (line 3 of the cell): delete it, "
                    "then run the cell.\n")
    capstone.judge(3, in_a_cell("def lay_out(self, device):\n    ...\n")["lay_out"])
    assert capsys.readouterr().out == "lay_out: replace ... by your code, then run the cell.\n"
    said = judged("advance", 1, capsys, ("request.append(token)", "..."))   # that is no end
    assert said == "advance: replace ... by your code, then run the cell.\n"


def test_a_function_of_another_step_is_named_and_takes_nothing_away(built, capsys):
    lay_out = {step: written(capstone.STEPS[step][1]["lay_out"][1]) for step in (2, 3)}
    admit = {step: written(capstone.STEPS[step][1]["admit"][1]) for step in (3, 4)}
    capstone.judge(2, lay_out[3])
    capstone.judge(3, admit[4])
    said = capsys.readouterr().out
    assert "lay_out: this is step 3's, which is judged by judge(3, lay_out, admit, " in said
    assert "admit: this is step 4's, which is judged by judge(4, free, hash_of_page, " in said
    assert not capstone.missing(4)
    capstone.judge(3, lay_out[2])
    capstone.judge(4, admit[3])
    said = capsys.readouterr().out
    assert "It looks like step 2's lay_out: have you run this step's cell?" in said
    assert "It looks like step 3's admit: have you run this step's cell?" in said


def test_judging_nothing_and_giving_up_first_say_what_is_missing(capsys):
    nothing_is_right()
    capstone.judge(4)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Hand in the functions of step 4: judge(4, free, hash_of_page, admit, "\
        "cache_filled)"
    assert said[1].startswith("prefix waits for step 1: schedule, advance; step 2: lay_out, ")
    assert len(said) == 2
    capstone.give_up(2)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "Nothing of step 2 is right yet, so all of it is ours now."
    assert last == "ragged, varlen waits for step 1: schedule, advance."
    capstone.give_up(1)
    assert "chunked: 4/4 requests got the tokens" in capsys.readouterr().out
    capstone.give_up(1)
    assert capsys.readouterr().out.startswith("Step 1 has all its functions: ")


def test_ours_serves_until_the_readers_is_right(capsys):
    nothing_is_right()
    capstone.give_up(1)
    capsys.readouterr()
    place = capstone.STEPS[1][1]["advance"][1]
    capstone.judge(1, written(place, ("request.computed += n", "pass")))
    said = capsys.readouterr().out
    assert said.startswith("advance: not yet. ")
    assert "\nOurs serves until yours is right.\nchunked: 4/4 " in said
    capstone.judge(1, written(place))
    capstone.judge(1, written(place, ("request.computed += n", "pass")))
    assert capstone.missing(1) == ["step 1: advance"]   # it was right, and is broken


def test_the_pictures_of_the_race_say_whose_they_are(built):
    with patch.object(capstone, "timelines") as timelines:
        capstone.race(pages=64)
    assert [trace.stage for trace in timelines.call_args[0][0]] == ["yours", "prefix"]


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
