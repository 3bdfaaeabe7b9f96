"""
What others measured, beside what is calculated: `python -m lab.simulate.published`.

published.json has the runs, with their sources, and why others were left out. A run is there if its
source says which model and GPU, in 16 bits, and how requests come. The constants of
lab/simulate/hardware.py were chosen on the runs marked "chosen"; all others test them.
"""
import json
import random
from dataclasses import replace
from pathlib import Path

from lab.loading.arrivals import poisson, workload
from lab.loading.stages import STAGES
from lab.simulate.calculated import runner
from lab.simulate.hardware import ENGINES, GPUS, MODELS
from lab.views.report import aligned, figures

DATA = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
SOURCES = DATA["sources"]
FRONT_END = 3e-3   # of vLLM 0.8.5 and a Triton server; today's vLLM: sheets.json
OVER_HTTP = ("rahman", "IOG", "TensorRT-LLM 0.14")
BUDGETS = {"LMDeploy": 8192, "nano-vllm": 16384}


def nano_vllm():
    """The lengths that nano-vllm's bench.py draws with seed 0: 133,966 tokens of answers."""
    stream = random.Random(0)
    prompts = [len([stream.randint(0, 10000) for _ in range(stream.randint(100, 1024))])
               for _ in range(256)]
    return [(prompt, stream.randint(100, 1024)) for prompt in prompts]


def rahman():
    """Answers of 128 tokens, but 22% of them end after 1 to 4: 100 on average."""
    stream = random.Random(0)
    return [(256, 128 if stream.random() < 0.78 else stream.randint(1, 4)) for _ in range(300)]


def calculate(run):
    """{figure: value} of a run, a dict."""
    # some ran beyond the context that the model was trained on
    shape = replace(MODELS[run["model"]], tp=run["tp"], block_size=10**6)
    gpu = GPUS[run["gpu"]]
    kind, number, prompt, answer = (run[name] for name in ("kind", "requests", "input", "output"))
    engine = ENGINES[run["engine"]]
    if run["source"] in OVER_HTTP:
        engine = replace(engine, front_end=FRONT_END)
    clients = number if kind == "clients" else 0
    many = {"clients": 3 * number, "rate": 120}.get(kind, number)
    lengths = ([(prompt, answer or 1)] * many if isinstance(prompt, int) else
               {"nano_vllm": nano_vllm, "rahman": rahman}[prompt]())
    times = [*poisson(many, number, 0)] if kind == "rate" else [0.0] * len(lengths)
    room = shape.room(gpu)
    if clients or kind == "rate" or not answer:
        stage, make, knobs = "prefix", workload, dict(
            max_batch=512, pages=room // 16, token_budget=BUDGETS.get(run["source"], 2048))
    else:   # an engine that reserves room; a static batch was one batch, if it nearly fits
        fits = kind == "static" and number * (prompt + answer) < 1.2 * room
        stage, make, knobs = "ragged, varlen", by_length, dict(
            max_batch=2048 if kind == "in-flight" else number, token_budget=8192,
            max_kv_tokens=10**9 if fits else room)
    f = figures(runner(shape, gpu, STAGES[stage], engine, **knobs)(
        lambda: make(lengths), times, clients))
    return {"tokens_per_s": f["tokens_per_s"], "itl_ms": f["itl_ms"]["p50"],
            "ttft_ms": f["ttft_ms"]["mean"]}


def by_length(lengths):
    """Requests for [(tokens of the prompt, of the answer), ...], without a list of each prompt."""
    for (prompt, _), request in zip(lengths, workload((1, answer) for _, answer in lengths)):
        request.prompt = range(prompt)
        yield request


def compare(sources=SOURCES):
    """[{"source", ..., "figure", "published", "half", "calculated", "error"}, ...]"""
    rows = [dict(zip(DATA["columns"], run)) for run in DATA["runs"]]
    rows = [row for row in rows if row["source"] in sources]
    for row in rows:
        row["calculated"] = calculate(row)[row["figure"]]
        row["error"] = row["calculated"] / row["published"] - 1
    return rows


def cells(rows):
    """The table of `compare`: its head, then a line for each row."""
    yield ["source", "run", "GPU", "model", "figure", "published", "calculated", "error"]
    for r in rows:
        size = f"{r['input']:,} in, {r['output']:,} out" if r["output"] else "mixed"
        yield [r["source"] + "*" * (r["half"] == "chosen"),
               f"{r['kind']} {r['requests']:,}, {size}",
               f"{r['tp']} x {r['gpu']}", r["model"], r["figure"], f"{r['published']:,.1f}",
               f"{r['calculated']:,.1f}", f"{r['error']:+.0%}".replace("-0%", "+0%")]


if __name__ == "__main__":
    print(aligned([*cells(compare())]), "* the constants were chosen on these", sep="\n\n")
