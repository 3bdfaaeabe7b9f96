"""The pictures of README and docs: from live runs what is counted, from results what is timed."""
from experiments import figures, gpu, ladder, memory, motion, results
from loading.load import load
from loading.workload import PROMPTS, make_requests, read_prompts
from views import sights

FOLDER = results.FOLDER.parent / "pictures"


def draw(args):
    """Draws the pictures of README and docs anew, into experiments/pictures."""
    model, tokenizer = load()
    figures.timelines(list(memory.storm(model).values()), FOLDER / "storm.png")
    figures.pool(memory.filling_pool(model), FOLDER / "pool.png")
    sights.draw(ladder.one_step(model), FOLDER / "mask.png")
    figures.packing(ladder.some_prompts(model), FOLDER / "packing.png")
    requests = make_requests(read_prompts(PROMPTS), tokenizer, max_new_tokens=64, temperature=0.7,
                             top_k=None, seed=0)   # as a stage's script has them
    traces = ladder.run_stages(model, requests)
    figures.slots({name: ladder.row_of(trace) for name, trace in traces.items()},
                  FOLDER / "slots.png")
    figures.rows({"the built-in model, 1.0M parameters": results.load("rows_builtin")["points"],
                  "GPT-2 small, 124M parameters": results.load("rows")["points"]},
                 FOLDER / "rows.png")
    figures.itl(results.load("gaps"), FOLDER / "itl.png")
    prepacked = results.load("prepacking")
    figures.kinds(prepacked["kinds"], FOLDER / "prepacking-kinds.png")
    figures.predictors(prepacked["predictors"], FOLDER / "prepacking-predictors.png")
    figures.bench(results.load("bench"), FOLDER / "bench.png")
    gpu.draw(results.load("gpu"), FOLDER)
    motion.main()
    return 0
