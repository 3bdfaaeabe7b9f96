"""
What others measured, beside what is calculated: `python -m beyond.simulate --published`.

A run is here if its source says which model and GPU, in which precision, and how requests come.
What it leaves out is assumed, and named in SOURCES. The three numbers of beyond/hardware.py were
chosen on the two runs that are marked; all others test them.
"""
import random
import statistics
from dataclasses import dataclass, field, replace

from beyond.arrivals import workload
from beyond.hardware import GPUS, MODELS
from loading.stages import STAGES
from toolbox.flags import knobs_of
from views.report import aligned

VLLM = dict(max_batch=256, token_budget=2048)
SOURCES = {
    "nano-vllm": "github.com/GeeeekExplorer/nano-vllm, README and bench.py",
    "gpt-fast": "github.com/pytorch-labs/gpt-fast, README: batch size 1, a prompt of 5 tokens; its "
                "generate.py makes 200 tokens by default",
    "rahman": "mushfiqrahman.dev/?p=1668: 300 prompts of 256 tokens, at most 128 tokens each. "
              "Tokens/s divided by requests/s is 100: some answers ended earlier. Their lengths "
              "are not published; calculated: 22% end after 1 to 4 tokens",
    "musgrave": "johnmusgrave.com/p/vllm-throughput-latency-sweep-on: vLLM 0.23, --ignore-eos, 20 "
                "requests per client",
    "lmdeploy": "github.com/InternLM/lmdeploy, docs/en/benchmark/a100_fp16.md, v0.1.0a1, static "
                "inference; its token budget is not published, calculated with 8,192",
    "nm-vllm": "github.com/neuralmagic/nm-vllm/commit/c13b5c2: benchmark_throughput, 1,000 prompts",
    "TensorRT-LLM": "github.com/NVIDIA/TensorRT-LLM, docs/source/performance.md, v0.6.1 (first "
                    "token: v0.5), static batches, FP16; which A100 is not said, calculated: "
                    "80 GB, SXM",
    "yobitel": "yobitelcomm.github.io/bench/recipes/concurrency-sweep: vLLM 0.21, fp16; the "
               "lengths are not published, and at one client the ITL hardly depends on them",
}


@dataclass
class Run:
    """published: {figure: value}, with tokens_per_s, ttft_ms (mean), itl_ms (p50)."""
    source: str
    what: str
    gpu: str
    model: str
    published: dict
    lengths: list                     # [(prompt, answer), ...]
    stage: str = "paged"
    knobs: dict = field(default_factory=lambda: VLLM)
    clients: int | None = None
    tp: int = 1
    chosen_on: bool = False

    def calculate(self, figures_of):
        """figures_of: beyond.simulate.figures_of"""
        generate = STAGES[self.stage]
        shape, gpu = replace(MODELS[self.model], tp=self.tp), GPUS[self.gpu]
        knobs = dict(self.knobs)
        if self.stage == "paged":
            knobs["pages"] = shape.room(gpu) // 16
        return figures_of(shape, gpu, generate, workload(self.lengths), self.clients,
                          **knobs_of(generate, knobs)[0])


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


NANO = dict(max_batch=512, token_budget=16384)
WHY = {
    "lmdeploy, batch 16, 2,048 in": "its mean first token takes 2.9 s there. 16 prompts, at the "
                                    "139 ms that it publishes for one, would take 2.2 s",
    "nm-vllm": "an engine of early 2024, whose CPU works for more than 1 ms between two passes: "
               "vLLM's blog on 0.6.0 says that scheduling had taken 29% of the time",
    "TensorRT-LLM, batch 52, 2,048 in": "nearly all of it is long prompts, whose matrices come "
                                        "closer to the peak: 70% in the first token of 2,048",
    "rahman, TTFT": "the page's tokens/s fit. First tokens also wait for an HTTP server and for "
                    "clients that fall into step, which depends on lengths that are not published",
}


def runs():
    """All published runs."""
    found = [
        Run("nano-vllm", "256 requests at once", "rtx-4070-laptop", "qwen3-0.6b",
            {"tokens_per_s": 1434.13}, nano_vllm(), knobs=NANO),
        Run("nano-vllm", "the same on vLLM", "rtx-4070-laptop", "qwen3-0.6b",
            {"tokens_per_s": 1361.84}, nano_vllm(), knobs=NANO),
    ]
    for tp, speed in (1, 104.9), (2, 168.84), (4, 254.02), (8, 328.43):
        found.append(Run("gpt-fast", f"one request, {tp} GPU{'s' * (tp > 1)}", "a100", "llama-2-7b",
                         {"tokens_per_s": speed}, [(5, 200)], "unbatched", {}, tp=tp,
                         chosen_on=tp == 1))
    for tp, speed in (2, 21.32), (4, 38.01), (8, 62.50):
        found.append(Run("gpt-fast", f"one request, {tp} GPUs", "a100", "llama-2-70b",
                         {"tokens_per_s": speed}, [(5, 200)], "unbatched", {}, tp=tp))
    for clients, speed, ttft in ((4, 210, 63), (8, 377, 79), (16, 644, 155), (32, 975, 362),
                                 (48, 1190, 667)):
        found.append(Run("rahman", f"{clients} clients", "rtx-4090", "mistral-7b",
                         {"tokens_per_s": speed, "ttft_ms": ttft}, rahman(), clients=clients))
    for clients, speed in (1, 75), (8, 6.6 * 75):
        found.append(Run("musgrave", f"{clients} client{'s' * (clients > 1)}", "a100-40gb",
                         "llama-3.1-8b", {"tokens_per_s": speed}, [(1024, 128)] * 20 * clients,
                         clients=clients))
    for batch, prompt, speed in ((1, 128, 102.21), (16, 128, 1272.47), (32, 128, 2125.47),
                                 (64, 128, 3024.07), (1, 2048, 86.1), (16, 2048, 348.87),
                                 (32, 2048, 450.43), (64, 2048, 493.46)):
        found.append(Run("lmdeploy", f"batch {batch}, {prompt:,} in, 128 out", "a100", "llama-2-7b",
                         {"tokens_per_s": speed}, [(prompt, 128)] * 3 * batch, clients=batch,
                         knobs=dict(max_batch=256, token_budget=8192)))
    found.append(Run("nm-vllm", "1,000 requests at once", "a10g", "llama-2-7b",
                     {"tokens_per_s": 3.8028 * 128}, [(256, 128)] * 1000,
                     knobs=dict(max_batch=256, token_budget=4096)))
    for batch, prompt, answer, speed in ((384, 128, 128, 5586), (60, 128, 2048, 1928),
                                         (52, 2048, 128, 591)):
        found.append(Run("TensorRT-LLM", f"batch {batch}, {prompt:,} in, {answer:,} out", "a100",
                         "llama-2-7b", {"tokens_per_s": speed}, [(prompt, answer)] * batch, "naive",
                         dict(max_batch=batch), chosen_on=batch == 384))
    for model, tp, prompt, ttft in (("llama-2-7b", 1, 128, 16), ("llama-2-7b", 1, 2048, 133),
                                    ("llama-2-70b", 4, 128, 47), ("llama-2-70b", 4, 2048, 377)):
        found.append(Run("TensorRT-LLM",
                         f"first token of {prompt:,} in, {tp} GPU{'s' * (tp > 1)}", "a100", model,
                         {"ttft_ms": ttft}, [(prompt, 1)], "unbatched", {}, tp=tp))
    found.append(Run("yobitel", "1 client", "h100", "llama-3.1-8b", {"itl_ms": 6.48},
                     [(256, 128)] * 4, clients=1))
    return found


def compare(runs, figures_of):
    """[{"source", "run", ..., "figure", "published", "calculated", "error"}, ...]"""
    rows, done = [], {}   # two systems may have run the same
    for run in runs:
        same = (run.gpu, run.model, run.tp, run.stage, run.clients, str(run.knobs), *run.lengths)
        calculated = done[same] = done.get(same) or run.calculate(figures_of)
        for name, value in run.published.items():
            mine = {"tokens_per_s": calculated["tokens_per_s"],
                    "ttft_ms": calculated["ttft_ms"]["mean"],
                    "itl_ms": calculated["itl_ms"]["p50"]}[name]
            rows.append({"source": run.source, "run": run.what, "gpu": run.gpu, "model": run.model,
                         "tp": run.tp, "figure": name, "published": value, "calculated": mine,
                         "error": mine / value - 1, "chosen_on": run.chosen_on})
    return rows


def summary(rows):
    """A line for each figure, without the two that were chosen: "throughput: median error ..."."""
    names = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tokens_per_s": "throughput"}
    for figure, name in names.items():
        errors = [abs(row["error"]) for row in rows if row["figure"] == figure
                  and not row.get("chosen_on")]
        if errors:
            yield (f"{name}: median error {statistics.median(errors):.0%}, largest "
                   f"{max(errors):.0%}, of {len(errors)} run{'s' * (len(errors) > 1)}")


def cells(rows):
    """The table of `compare`: its head, then a line for each row."""
    yield ["source", "run", "GPU", "model", "figure", "published", "calculated", "error"]
    for r in rows:
        yield [r["source"] + "*" * r["chosen_on"], r["run"], r["gpu"], r["model"], r["figure"],
               f"{r['published']:,.1f}", f"{r['calculated']:,.1f}",
               f"{r['error']:+.0%}".replace("-0%", "+0%")]


def report(rows):
    """The table of `compare`, the sources, why an error is large, and the errors: lines."""
    yield aligned([*cells(rows)])
    yield "* the three numbers were chosen on these two\n"
    yield from (f"{source}: {text}" for source, text in SOURCES.items())
    yield from (f"why the error is large: {where}: {why}" for where, why in WHY.items())
    yield from summary(rows)
