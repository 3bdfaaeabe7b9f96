"""Figures, pictures, links and commands of README and docs are those of the code today."""
import inspect
import re
import runpy
import shlex
import sys
import textwrap
from argparse import ArgumentParser
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
from common import ROOT, THOROUGH
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

import generate_prefix
from lab.checks.check import run
from lab.experiments import __main__ as runner
from lab.experiments import bench, motion, pictures, results, stages
from lab.experiments.memory import storm
from lab.loading.load import load
from lab.loading.recorded import recorded
from lab.loading.stages import STAGES
from lab.views import stage_table

PAGES = [*results.PAGES, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("[!.]*/README.md"))]


# --- figures --------------------------------------------------------------------------------------

def test_the_counts_of_the_stages():
    """
    Counts depend on what is generated; a row that differs on your machine alone may be a near-tie
    that rounding flipped. (In the quick size, of some stages.)
    """
    said, (model, tokenizer) = results.load("stages"), load()
    some = STAGES if THOROUGH else ("ragged, varlen", "prefix")
    for name in some:
        trace = run(STAGES[name], model, stages.twelve(tokenizer),
                    **stages.limits(name, model, stages.twelve(tokenizer)))
        assert said["generated"] == sum(len(request.generated) for request in trace.requests)
        row, counted = results.row_of(trace), said["stages"][name]
        assert all(row[what] == n for what, n in counted.items() if isinstance(n, int))
    assert said["stage_table"] == stage_table.rows(trace.requests, model.config)
    assert said["ruined"] == stages.ruined(model, tokenizer, stages.twelve(tokenizer)) != {}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_tables_are_those_of_the_results(path):
    """If one is not: python -m lab.experiments tables"""
    text = path.read_text(encoding="utf-8")
    assert results.renewed(text, runner.TABLES) == text


def test_prose_has_the_figures_of_the_results():
    """Those that it computes from them, however it puts them."""
    found, rows = results.load("bench"), dict(results.load("rows")["points"])
    ragged, paged = "ragged, varlen", "paged"
    fast, fast_paged = ragged + bench.COMPILED, paged + bench.COMPILED

    def times(result, name, than):
        return bench.speed(result, name) / bench.speed(result, than)

    w1, _, w3 = found
    ours, shares = [], []
    for machine in bench.all_machines([*found, *results.load("machines")]):
        for figures in machine["workloads"].values():
            ours += [figures["ragged"], figures["paged"]]
            shares.append(100 * figures["of_roofline"])
    for result, figures in zip(found, bench.all_machines(found)[0]["workloads"].values()):
        assert figures["ragged"] == min(times(result, fast, peer) for peer in result["peers"])
    said = {
        "README.md": [f"{min(ours):.2f} to {max(ours):.2f}"],
        "docs/measurements.md": [
            f"{min(ours):.2f} to {max(ours):.2f}",
            f"{rows[32] / rows[1]:.1f}", f"{32 * rows[1] / rows[32]:.0f}",
            f"{times(w1, 'chunked', 'unbatched'):.1f}", f"{times(w1, ragged, 'unbatched'):.1f}",
            f"{times(w3, 'naive', 'unbatched'):.1f}"],
        "docs/memory.md": [f"{max(times(result, *pair) for result in found):.1f}"
                           for pair in ((ragged, paged), (fast, fast_paged))]}
    for page, figures in said.items():
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert [figure for figure in figures if f" {figure} times" not in text] == [], page
        assert page != "docs/measurements.md" or f"{min(shares):.0f} to {max(shares):.0f}%" in text


def test_a_figure_of_an_essay_stands_in_the_essay():
    text = (ROOT / "docs" / "beyond.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[`\w+`\]\(\.\./(beyond/\w+\.py)\) \|.*\| (.*) \|$", text, re.M)
    assert {path for path, _ in rows} == {
        f"beyond/{path.name}" for path in (ROOT / "beyond").glob("[!_]*.py")}
    for path, phrase in rows:
        said = (ROOT / path).read_text(encoding="utf-8")
        for figure in re.findall(r"\d[\d,]*%?", phrase):
            assert figure in said, (path, figure)


def test_sizes_and_workloads_are_counted():
    """Of the path in README; of the recorded plans in README and docs/vllm.md."""
    path = [*ROOT.glob("*.py")]
    lines = {file.name: len(file.read_text(encoding="utf-8").splitlines()) for file in path}
    _, works = recorded()
    passes = {mode: sum(len(work["plans"][mode]) for work in works)
              for mode in ("fcfs", "ahead", "priority")}
    readme, vllm = ((ROOT / page).read_text(encoding="utf-8")
                    for page in ("README.md", "docs/vllm.md"))
    assert f"{len(path)} files, {sum(lines.values()):,} lines" in readme
    assert readme.count(f"| {sum(lines.values()):,} |") == 1 and readme.count("\n") <= 75
    last = sum(lines[name] for name in ("scheduler.py", "paging.py", "generate_prefix.py"))
    assert f"{round(last, -1)} lines" in readme and f"{round(last, -1)} lines" in vllm
    for page in readme, vllm, generate_prefix.__doc__:
        assert f"{len(works):,} of {len(works):,}" in " ".join(page.split())
    for number in passes.values():
        assert f"{number:,} passes" in " ".join(vllm.split())


# --- pictures -------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """What the command draws: {name: a figure, or the text of an SVG}."""
    made, folder = {}, tmp_path_factory.mktemp("pictures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "FOLDER", folder)
        patch.setattr(Figure, "savefig", lambda figure, path: made.update({path.name: figure}))
        assert runner.main(["pictures"]) == 0
    return made | {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_the_command_draws_what_is_committed(drawn):
    """If it does not: python -m lab.experiments pictures"""
    assert {*drawn} == {path.name for path in pictures.FOLDER.iterdir()}
    for name, picture in drawn.items():
        if isinstance(picture, str):
            assert picture == (pictures.FOLDER / name).read_text(encoding="utf-8")


def test_a_picture_says_what_was_measured_and_where(drawn):
    for name, model in (("itl.png", "GPT-2, 124M"), ("rows.png", "GPT-2, 124M"),
                        ("bench.png", "GPT-2, W1")):
        words = " ".join(text.get_text() for text in drawn[name].findobj(Text))
        assert model in words and results.load("bench")[0]["measured"]["machine"] in words


def contrast(*colors):
    """WCAG's contrast of two colours."""
    def luminance(color):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
                  for c in to_rgb(color)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(luminance(color) + 0.05 for color in colors)
    return high / low


def test_pictures_can_be_read_on_a_light_and_on_a_dark_page(drawn):
    """GitHub shows a README 830 pixels wide, on a phone 358; a file's name says which it is for."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    widths = dict(re.findall(r'src="docs/pictures/(\S+)" width="(\d+)"', readme))
    for name, picture in drawn.items():
        wide = 358 if "-narrow" in name else int(widths.get(name.replace("-dark", ""), 830))
        page = "#0d1117" if "-dark" in name else "#ffffff"
        if isinstance(picture, str):
            _, _, box_wide, box_high = map(int, re.search(r'Box="(.*?)"', picture)[1].split())
            assert min(map(int, re.findall(r"(\d+)px", picture))) * wide >= 11 * box_wide
            assert wide < 830 or box_high <= 260, name   # it stands in the first screen
            inks = {*re.findall(r"^\.frozen .*?fill: (#\w+)|^text .*?fill: (#\w+)", picture, re.M)}
            inks = {ink for pair in inks for ink in pair if ink}
        else:
            assert plt.imread(pictures.FOLDER / name)[0, 0, 3] == 0   # transparent
            texts = [text for text in picture.findobj(Text) if text.get_text()]
            pixels = wide / picture.get_figwidth() / 72   # a point's
            assert all(text.get_fontsize() * pixels >= 11 for text in texts), name
            inks = {text.get_color() for text in texts if len(text.get_text()) > 3}   # of no cell
            for line in picture.findobj(Line2D):
                assert contrast(line.get_color(), page) > 3 or len(line.get_xdata()) == 2, name
        assert inks
        for ink in inks:
            assert contrast(ink, page) >= 4.5, (name, ink)


def test_a_document_shows_each_picture_in_its_four_forms():
    """A file that no document shows would not be missed; one without its dark form would."""
    shown = set()
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for picture in re.findall(r"<picture>.*?</picture>", text):
            files = re.findall(r'src(?:set)?="\S*?pictures/(\S+?)"', picture)
            stem, end = files[-1].split(".")
            assert files == [f"{stem}{form}.{end}" for form in (
                "-narrow-dark", "-narrow", "-dark", "")], path
            assert "alt=" in picture
            shown.update(files)
        assert text.count("<img") == text.count("<picture>")
    assert shown == {path.name for path in pictures.FOLDER.iterdir()}


def test_marks_that_are_to_come_can_be_seen():
    """In the moving picture: a faint token against its page."""
    for name, page in ("motion.svg", "#ffffff"), ("motion-dark.svg", "#0d1117"):
        picture = (pictures.FOLDER / name).read_text(encoding="utf-8")
        share = float(re.search(r'fill="#fff" opacity="([\d.]+)"', picture)[1])
        token, ground = to_rgb(re.search(r"\.token \{ stroke: (#\w+)", picture)[1]), to_rgb(page)
        faint = [share * a + (1 - share) * b for a, b in zip(token, ground)]
        assert contrast(faint, page) > 1.9, name


def test_the_first_screen_is_a_sentence_a_picture_and_the_commands():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    kinds = [line[:2] for line in lines if line[:2] in ("**", "<p", "``", "- ")]
    assert lines[0] == "# nanoBatch"
    assert kinds[:7] == ["**", "<p", "``", "``", "- ", "- ", "- "]
    assert max(map(len, lines[5:10])) <= 96   # of the commands: none is cut


def test_no_table_of_the_readme_is_wider_than_a_phone():
    """A cell's padding takes 26 pixels of 358, and a table of words wraps."""
    tables = re.findall(r"(?:^\|.*\n)+", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert len(tables) == 3
    for table in tables:
        head = table.splitlines()[0].strip("|").split("|")
        assert len(head) <= 4


def test_the_preemption_storm():
    traces = storm(load()[0])
    assert [trace.counts.get("preemptions", 0) for trace in traces.values()] == [0, 4]
    assert traces["pages"].passes[-1].step < traces["reserve"].passes[-1].step


def test_the_moving_picture_has_every_token():
    traces = motion.traces()
    shown = [traces[stage] for stage in motion.PANELS]
    for text in motion.pictures(traces).values():
        ElementTree.fromstring(text)   # well-formed
        wide = int(re.search(r'Box="0 0 (\d+)', text)[1])
        for line in re.findall(r'<text x="4.0".*?>(.+?)<', text):
            assert 6.5 * len(line) < wide, line   # it fits
        ticks = len(re.findall(r"M[\d.]+ [\d.]+v5.5", text))
        assert ticks == sum(len(r.generated) for trace in shown for r in trace.requests)
    gap = {stage: motion.figures(traces[stage])[0] for stage in motion.PANELS}
    assert gap["dynamic"] > 3 * gap["chunked"] > 6 * gap["ragged, varlen"]
    for trace in shown:   # the prompt comes at the same time everywhere
        seen = trace.step_times[trace.requests[-1].arrival]
        assert motion.ARRIVAL <= seen < motion.ARRIVAL + max(p.seconds for p in trace.passes)


# --- links and commands ---------------------------------------------------------------------------

def places(path):
    """The anchors of a document's titles."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"src(?:set)?=\"([^\"]+)\"", text):
        assert (path.parent / name).exists(), name
    for name, place in re.findall(r"\]\(((?!http)[^)#]*)(?:#([^)]+))?\)", text):
        target = path.parent / name if name else path
        assert target.exists(), name
        if place and target.suffix == ".md":
            assert place in places(target), (name, place)


def test_the_python_example_runs():
    text = inspect.getmodule(load).__doc__
    code, scope = textwrap.dedent(text[text.index("    from"):text.index("trace.passes")]), {}
    exec(code, scope)
    assert all(request.finish_reason for request in scope["requests"])


ROOMS = "lab", "beyond", "notebooks", "docs", "assignments"
DOCUMENTS = [*results.PAGES, ROOT / "CONTRIBUTING.md", ROOT / "assignments" / "README.md",
             *(path for room in ROOMS for path in sorted((ROOT / room).glob("**/*.py")))]
SAYS = re.compile(r"(?:python3?|torchrun [-\w ]+) -m ((?:lab|beyond|toolbox)[\w.]*)"
                  r"((?: (?! )(?:[^\s`#)\\[]|\\\n *)+)*)")
NAMED = sorted({(module, " ".join(flags.replace("\\\n", " ").strip(";,.").split()))
                for path in DOCUMENTS
                for module, flags in SAYS.findall(path.read_text(encoding="utf-8"))
                if not module.endswith("NAME")})


def test_documents_name_commands():
    assert ("lab.experiments", "gaps --model random --json lab/experiments/results/gaps.json"
            ) in NAMED and ("beyond.tensor_parallel", "") in NAMED and len(NAMED) > 25


@pytest.mark.parametrize("module, flags", NAMED)
def test_a_command_that_a_document_names_can_be_run(module, flags, monkeypatch):
    """There is such a module, it does something when it is run, and it knows these flags."""
    if find_spec(module).submodule_search_locations:   # a package
        module += ".__main__"
    assert 'if __name__ == "__main__":' in Path(find_spec(module).origin).read_text()
    if flags:
        class Known(BaseException):
            """The flags have been read; nothing runs."""

        def read(parser, argv=None, parse_args=ArgumentParser.parse_args):
            raise Known(parse_args(parser, argv))

        monkeypatch.setattr(ArgumentParser, "parse_args", read)
        monkeypatch.setattr("sys.argv", [module, *shlex.split(flags.replace("NAME", "rows"))])
        monkeypatch.delitem(sys.modules, module, raising=False)
        with pytest.raises(Known):
            runpy.run_module(module, run_name="__main__")
