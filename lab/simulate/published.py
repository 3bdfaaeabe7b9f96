"""
What others measured, beside what is calculated: `python -m lab.simulate.published`.

published.json has the runs, with their sources, and why others were left out. A run is there if its
source says which model and GPU, in 16 bits, and how requests come. The constants of
lab/simulate/hardware.py were chosen on the runs marked "chosen"; all others test them.
"""
import json
import math
import random
import statistics
from collections import deque
from dataclasses import replace
from pathlib import Path

from lab.loading.stages import STAGES
from lab.simulate.arrivals import workload
from lab.simulate.calculated import figures, simulate
from lab.simulate.hardware import ENGINES, GPUS, MODELS
from lab.views.report import aligned

DATA = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
SOURCES = DATA["sources"]
FRONT_END = 3e-3   # seconds from the HTTP request to the engine: HTTP, tokenization, processes
OVER_HTTP = ("rahman", "IOG", "TensorRT-LLM 0.14")


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


def passes(number, prompt, answer, room, max_batch=2048, token_budget=8192):
    """
    (slots, sampled, scores, keys) of each pass over `number` equal requests that come at once and
    reserve their room: as the Scheduler plans them, but counted, so that 30,000 take a second.
    """
    kv_tokens = prompt + answer - 1
    limit = min(max_batch, max(int(room // kv_tokens), 1))
    admitted = done = past = 0   # past: keys of all that decode
    computed = 0                 # tokens of all prompts: one after another
    begun = deque()              # how many got their first token, in each of the last steps
    while done < number:
        decodes = computed // prompt - done
        while (admitted < min(number, done + limit)
               and decodes + admitted * prompt - computed < token_budget):
            admitted += 1
        past += decodes   # each computes one key
        scores = keys = past
        start, computed = computed, min(computed + token_budget - decodes, admitted * prompt)
        for first in range(start - start % prompt, computed, prompt):   # prompts with a chunk
            end = min(computed - first, prompt)
            keys += end
            scores += end * (end - max(start - first, 0))
        new = computed // prompt - start // prompt   # prompts that are complete
        yield decodes + computed - start, decodes + new, scores, keys
        past += new * prompt
        begun.append(new)
        if len(begun) == answer:   # the first of these have all their tokens
            done += begun[0]
            past -= begun.popleft() * kv_tokens


def counted(run, room):
    """(passes, tokens of all answers) of a run whose requests are equal."""
    kind, number, prompt, answer = run["kind"], run["requests"], run["input"], run["output"]
    many = 2048 if kind == "in-flight" else number
    if kind == "clients":   # each sends three requests, one after another
        number *= 3
    if kind == "static" and number * (prompt + answer) < 1.2 * room:   # it was one batch
        room = 10**9
    return passes(number, prompt, answer, room, many), number * answer


def calculate(run):
    """{figure: value} of a run, a dict."""
    shape = replace(MODELS[run["model"]], tp=run["tp"])
    gpu = replace(GPUS[run["gpu"]], **ENGINES[run["engine"]])
    if (run["output"] and run["figure"] == "tokens_per_s") or run["kind"] == "prompt":
        all_passes, tokens = counted(run, shape.room(gpu))
        seconds = sum(shape.seconds(gpu, *counts) for counts in all_passes)
        return {"tokens_per_s": tokens / seconds, "ttft_ms": 1e3 * seconds}
    kind, number = run["kind"], run["requests"]
    if run["output"]:
        lengths = [(run["input"], run["output"])] * 3 * (number if kind == "clients" else 40)
    else:   # lengths differ: "input" names a function
        lengths = {"nano_vllm": nano_vllm, "rahman": rahman}[run["input"]]()
    load = {kind: number} if kind in ("clients", "rate") else {}
    budget = {"LMDeploy": 8192, "nano-vllm": 16384}.get(run["source"], 2048)
    f = figures(simulate(shape, gpu, STAGES["prefix"], workload(lengths), **load, max_batch=512,
                         token_budget=budget, pages=shape.room(gpu) // 16))
    front = 1e3 * FRONT_END * (run["source"] in OVER_HTTP)
    return {"tokens_per_s": f["tokens_per_s"], "itl_ms": f["itl_ms"]["p50"],
            "ttft_ms": f["ttft_ms"]["mean"] + front}


def compare(sources=SOURCES):
    """[{"source", ..., "figure", "published", "half", "calculated", "error"}, ...]"""
    rows = [dict(zip(DATA["columns"], run)) for run in DATA["runs"]]
    rows = [row for row in rows if row["source"] in sources]
    for row in rows:
        row["calculated"] = calculate(row)[row["figure"]]
        row["error"] = row["calculated"] / row["published"] - 1
    return rows


FIGURES = {"tokens_per_s": "throughput", "ttft_ms": "first token", "itl_ms": "between tokens"}
GROUPS = (   # name, and who belongs to it
    ("one GPU", lambda row: row["tp"] == 1), ("several GPUs", lambda row: row["tp"] > 1),
    *((f"{tp} GPUs", lambda row, tp=tp: row["tp"] == tp) for tp in (2, 4, 8)),
    ("A100, one", lambda row: row["gpu"][:4] == "a100" and row["tp"] == 1),
    ("Hopper, one", lambda row: row["gpu"][0] in "gh" and row["tp"] == 1),
    ("other GPUs, one", lambda row: row["tp"] == 1 and (row["gpu"][0] in "rlt"
                                                        or row["gpu"] == "a10g")),
    ("one request", lambda row: row["requests"] == 1),
    ("static batch", lambda row: row["kind"] == "static" and row["requests"] > 1),
    ("all at once", lambda row: row["kind"] == "in-flight"),
    ("clients that wait", lambda row: row["kind"] == "clients" and row["requests"] > 1))


def summary(rows):
    """A head, and a line for each group: errors on the tested runs, and last on the chosen."""
    yield ["calculated against published", "runs", "median error", "90% within", "largest",
           "on the chosen half"]
    for figure, what in FIGURES.items():
        for name, belongs in GROUPS if figure == "tokens_per_s" else GROUPS[:2]:
            tested, chosen = (sorted(abs(row["error"]) for row in rows if row["half"] == half
                                     and row["figure"] == figure and belongs(row))
                              for half in ("tested", "chosen"))
            if tested:
                yield [f"{what}, {name}", len(tested), f"{statistics.median(tested):.0%}",
                       f"{tested[math.ceil(0.9 * len(tested)) - 1]:.0%}", f"{tested[-1]:.0%}",
                       f"{statistics.median(chosen):.0%} of {len(chosen)}" if chosen else "–"]


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
    compared = compare()
    print(aligned([*cells(compared)]), "* the constants were chosen on these",
          aligned([*summary(compared)]), sep="\n\n")
