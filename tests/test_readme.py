"""The figures, pictures and links of README and docs are those that the code gives today."""
import ast
import contextlib
import inspect
import re
import runpy
import textwrap
from xml.etree import ElementTree

import pytest
from common import ROOT, THOROUGH

from lab.experiments import ladder, motion, pictures, results, tables
from lab.experiments.memory import storm
from lab.loading.load import load
from lab.loading.stages import STAGES
from lab.views import plots

PAGES = [*tables.pages(), ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("[!.]*/README.md"))]


def test_the_ladder_of_counts():
    """
    Counts depend on what is generated; a row that differs on your machine alone may be a near-tie
    that rounding flipped. (In the quick size, of some stages.)
    """
    said, (model, tokenizer) = results.load("ladder"), load()
    some = STAGES if THOROUGH else ("ragged, varlen", "prefix")
    requests = ladder.behind_a_beginning(ladder.twelve(tokenizer), tokenizer)
    for name in some:
        trace = results.run(STAGES[name], model, ladder.twelve(tokenizer))
        assert said["generated"] == sum(len(request.generated) for request in trace.requests)
        row, counted = results.row_of(trace), said["stages"][name]
        assert all(row[what] == n for what, n in counted.items() if isinstance(n, int))
        common = results.run(STAGES[name], model, requests, ladder.knobs_for_room(name, requests))
        assert ladder.held_and_computed(common) == said["common"][name]
    for name, figures in ladder.calculated(trace.requests).items():
        for what in "passes", "useful", "tokens_per_s":
            assert said["calculated"][name][what] == pytest.approx(figures[what]), (name, what)
    assert said["ruined"] == ladder.ruined(model, tokenizer, ladder.twelve(tokenizer)) != {}
    for name, gap in said["gap_ms"].items():
        assert gap == pytest.approx(motion.figures(motion.run(name))[0]), name


def test_the_table_of_stages_shows_what_each_is_for():
    said = results.load("ladder")
    gap, common = said["gap_ms"], said["common"]
    assert gap["dynamic"] > 3 * gap["chunked"] > 6 * gap["ragged, varlen"]
    at_once = [common[name]["at_once"] for name in ("ragged, varlen", "paged", "prefix")]
    assert at_once == sorted({*at_once})
    assert common["paged"]["computed"] > 2 * common["prefix"]["computed"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_tables_are_new_links_lead_somewhere(path):
    """If a table is old: python -m lab.experiments tables"""
    text = path.read_text(encoding="utf-8")
    assert tables.renewed(text) == text
    for name in re.findall(r"\]\(((?!http)[^)#]+)\)|src(?:set)?=\"([^\"]+)\"", text):
        assert (path.parent / "".join(name)).exists(), name


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_a_document_says_for_whom_it_is_and_what_one_can_do_after_it(path):
    text = path.read_text(encoding="utf-8")
    assert re.match(r"For .+\.\sAfterwards you can ", text.split("\n\n")[1], re.DOTALL)
    places = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
              for title in re.findall(r"^#+ (.+)$", text, re.M)}
    assert {*re.findall(r"\]\(#([^)]+)\)", text)} <= places


def test_a_figure_of_the_readme_is_that_of_what_it_links_to(capsys, monkeypatch):
    """It stands in the file's text, or its command prints it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("- **Go on**")[1]
    links = re.findall(r"\]\((beyond/\w+\.py|docs/\w+\.md)\): ([^;\n]+)[;.]", text)
    for path, phrase in links:
        said = (ROOT / path).read_text(encoding="utf-8")
        if path in ("beyond/ahead.py", "beyond/in_batch.py"):
            monkeypatch.setattr("sys.argv", [path])
            with contextlib.suppress(SystemExit):
                runpy.run_module(path[:-3].replace("/", "."), run_name="__main__")
            said = capsys.readouterr().out
        for figure in re.findall(r"\d[\d,]*%?", phrase):
            assert figure in said, (path, figure)
    assert len(links) == 8, links


# Italics that stress a word, or name a case of its own file, and are no terms.
STRESSED = {"and", "ahead", "both", "continuous batching", "hash", "identical", "is", "new", "own",
            "steps", "unedited", "up to the end of that page", "Which keys may each of them see?",
            "Which tokens are in this forward pass?"}


def test_the_glossary_has_each_term_that_a_docstring_introduces():
    """It stands there in italics."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))
    files = [path for folder in ("", "toolbox", "beyond", "lab/**")
             for path in (ROOT / folder).glob("*.py")]
    said = [ast.get_docstring(node) or "" for path in files
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    terms = {" ".join(term.split()).rstrip(".") for text in said
             for term in re.findall(r"(?<![*\w])\*([a-zA-Z][^*]{0,40})\*(?![*\w])", text)}
    assert len(terms) > 30
    assert {term for term in terms - STRESSED
            if term.lower().rstrip("s") not in words.lower()} == set()


def test_the_python_example_runs():
    text = inspect.getmodule(load).__doc__
    code, scope = textwrap.dedent(text[text.index("    from"):text.index("trace.passes")]), {}
    exec(code, scope)
    assert all(request.finish_reason for request in scope["requests"])


def test_the_preemption_storm():
    traces = storm(load()[0])
    assert [trace.counts.get("preemptions", 0) for trace in traces.values()] == [0, 4]
    assert traces["pages"].passes[-1].step < traces["reserve"].passes[-1].step
    legend, = plots.timelines([*traces.values()]).legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "prefill", "decode", "computed again", "waiting"]


def test_the_committed_picture_has_every_token_and_is_what_the_command_draws():
    """If it has not: python -m lab.experiments pictures"""
    traces = motion.traces()
    shown = [traces[stage] for stage in motion.PANELS]
    for name, text in motion.pictures(traces).items():
        assert text == (pictures.FOLDER / name).read_text(encoding="utf-8")
        ElementTree.fromstring(text)   # well-formed
        assert all(len(line) < 60 for line in re.findall('<text x="4".*?>(.+?)<', text))   # fits
        ticks = len(re.findall(r"M[\d.]+ \d+v8", text))
        assert ticks == sum(len(r.generated) for trace in shown for r in trace.requests)
    for trace in shown:   # the prompt comes at the same time everywhere
        seen = trace.step_times[trace.requests[-1].arrival]
        assert motion.ARRIVAL <= seen < motion.ARRIVAL + max(p.seconds for p in trace.passes)
    stalled, chunked, flowing = (motion.figures(trace)[0] for trace in shown)
    assert stalled > 3 * chunked > 6 * flowing
