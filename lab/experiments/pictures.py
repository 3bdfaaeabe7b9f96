"""The pictures of README and docs: from live runs what is counted, from results what is timed."""
from lab.checks.traps import broken
from lab.experiments import figures, memory, motion, results, stages
from lab.loading.load import load
from lab.views import plots, sights

FOLDER = results.ROOT / "docs" / "pictures"


def draw(args):
    """Draws the pictures of README and docs anew, into docs/pictures."""
    model, _ = load()
    right = stages.one_step(model)
    with broken("published mask", show=False):
        published = stages.one_step(model)
    sights.draw({"published: new slots are all valid": published["interleaved: rectangle"],
                 "right": right["interleaved: rectangle"]}, FOLDER / "bug.png")
    sights.draw(right, FOLDER / "mask.png")
    plots.timelines(list(memory.storm(model).values()), FOLDER / "storm.png")
    figures.pool(memory.filling_pool(model), FOLDER / "pool.png")
    figures.packing(stages.some_prompts(model), FOLDER / "packing.png")
    figures.slots(results.load("stages"), FOLDER / "slots.png")
    figures.rows(results.load("rows_builtin"), results.load("rows"), path=FOLDER / "rows.png")
    figures.gaps(results.load("gaps"), FOLDER / "itl.png")
    figures.bench(*results.load("bench"), path=FOLDER / "bench.png")
    for name, text in motion.pictures(motion.traces()).items():
        (FOLDER / name).write_text(text, encoding="utf-8", newline="\n")
    return 0
