"""The pictures of README and docs: from live runs what is counted, from results what is timed."""
from pathlib import Path

from experiments import figures, gpu, ladder, memory, motion, results
from experiments.rows import ARRIVAL
from loading.load import load
from loading.workload import PROMPTS, make_requests, read_prompts
from views import sights

FLAGS = {"--out": dict(default=str(results.FOLDER.parent / "pictures"), metavar="DIR",
                       help="into this folder")}


def draw(args):
    """Draws the pictures of README and docs anew."""
    folder = Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {folder}: {error.strerror}") from None
    model, tokenizer = load()
    small = ladder.run_stages(model, ladder.small_workload(model.config), max_batch=4,
                              token_budget=16)
    shown = ("naive", "dynamic", "chunked", "interleaved", "ragged, varlen")
    figures.timelines([small[name] for name in shown], folder / "timelines.png")
    figures.timelines(list(memory.storm(model).values()), folder / "storm.png")
    figures.pool(memory.filling_pool(model), folder / "pool.png")
    sights.draw(ladder.one_step(model), folder / "mask.png")
    figures.packing(ladder.some_prompts(model), folder / "packing.png")
    requests = make_requests(read_prompts(PROMPTS), tokenizer, max_new_tokens=64, temperature=0.7,
                             top_k=None, seed=0)   # as experiments ladder has them
    counts = {name: ladder.row_of(trace)
              for name, trace in ladder.run_stages(model, requests).items()}
    figures.slots({"stages": counts}, folder / "slots.png")
    figures.rows({"the built-in model, 1.0M parameters": results.load("rows_builtin")["points"],
                  "GPT-2 small, 124M parameters": results.load("rows")["points"]},
                 folder / "rows.png")
    gaps = results.load("gaps")
    figures.itl(gaps["points"], ARRIVAL, gaps["prompt_tokens"], folder / "itl.png")
    figures.prepacking(results.load("prepacking"), folder / "prepacking.png")
    figures.bench([result for result in results.load("bench") if result["model"] == "gpt2"],
                  folder / "bench.png")
    gpu.draw(results.load("gpu"))
    motion.main()
    return 0
