"""What the README says is so."""
import re
from pathlib import Path

from experiments.ladder import run_stages
from experiments.memory import storm
from toolbox.load import load
from toolbox.report import totals
from toolbox.workload import PROMPTS, make_requests, read_prompts

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_ladder_of_counts():
    """
    Counts depend on what is generated; a row that differs on your machine alone may be a near-tie
    that rounding flipped.
    """
    model, tokenizer = load()
    requests = make_requests(read_prompts(PROMPTS), tokenizer, max_new_tokens=64, temperature=0.7,
                             top_k=None, seed=0)
    traces = run_stages(model, requests)
    prompts = sum(len(request.prompt) for request in requests)
    generated = sum(len(request.generated) for request in traces["naive"].requests)
    assert f"({prompts} prompt tokens, {generated} generated" in README
    for name, trace in traces.items():
        t = totals(trace)
        row = next((line for line in README.splitlines() if re.match(rf"\| {name} \|", line)), "")
        counts = [cell.strip() for cell in row.strip("|").split("|")[1:6]]
        assert counts == [f"{t['forward_passes']:,}", f"{t['slots']:,}",
                          f"{t['useful'] / t['slots']:.0%}", f"{t['score_entries']:,}",
                          f"{t['copied_bytes'] / 1e6:,.0f} MB"], name


def test_files_pictures_and_modules_are_there():
    linked = re.findall(r"\]\(((?!http)[^)#]+)\)", README) + re.findall(r'src="([^"]+)"', README)
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|txt|ipynb))`", README)
    modules = set(re.findall(r"python -m (\w+(?:\.\w+)*)", README)) - {"venv", "pytest"}
    assert linked and named and modules
    for path in [*linked, *named, *(module.replace(".", "/") + ".py" for module in modules)]:
        assert (ROOT / path).exists(), path


def test_line_counts_are_about_right():
    said = re.findall(r"`(\w+\.py)` \((\d+) lines", README)
    assert len(said) >= 9
    for name, lines in said:
        actual = len((ROOT / name).read_text(encoding="utf-8").splitlines())
        assert abs(actual - int(lines)) <= 0.1 * int(lines), name


def test_the_python_example_runs():
    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    scope = {}
    exec(code, scope)
    assert all(request.finish_reason for request in scope["requests"])


def test_the_preemption_storm():
    model, _ = load()
    traces = storm(model)
    reserve, pages = traces["reserve"], traces["pages"]
    steps = [trace.passes[-1].step + 1 for trace in (reserve, pages)]
    assert f"takes {steps[0]} steps" in README and f"is done after {steps[1]}" in README
    assert pages.counts["preemptions"] == 4 and not reserve.counts.get("preemptions")
    t = totals(pages)
    assert f"{t['recomputed'] / t['slots']:.0%} of its slots" in README
