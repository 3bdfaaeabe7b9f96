"""The pictures of README and docs: from live runs what is counted, from results what is timed."""
from lab.checks.traps import broken
from lab.experiments import figures, memory, motion, results, stages
from lab.loading.load import load
from lab.views import plots, sights

FOLDER = results.ROOT / "docs" / "pictures"


VARIANTS = {   # the end of a file's name: (its ink, its width in inches)
    "": (plots.INKS["light"], plots.WIDTH), "-dark": (plots.INKS["dark"], plots.WIDTH),
    "-narrow": (plots.INKS["light"], plots.NARROW),
    "-narrow-dark": (plots.INKS["dark"], plots.NARROW)}


def drawings():
    """{name: what draws the picture into a path}. The runs that they show are made once."""
    model, _ = load()
    right = stages.one_step(model)
    with broken("published mask", show=False):
        published = stages.one_step(model)
    wrong_pass = {"published: new slots are all valid": published["interleaved: rectangle"]}
    both = {**wrong_pass, "right": right["interleaved: rectangle"]}
    storm, seen = list(memory.storm(model).values()), memory.filling_pool(model)
    prompts = stages.some_prompts(model)

    def bug(path):
        sights.draw(wrong_pass if plots.LOOK.narrow else both, path)

    return {
        "bug": bug,
        "mask": lambda path: sights.draw(right, path),
        "storm": lambda path: plots.timelines(storm, path),
        "pool": lambda path: figures.pool(seen, path),
        "packing": lambda path: figures.packing(prompts, path),
        "slots": lambda path: figures.slots(results.load("stages"), path),
        "rows": lambda path: figures.rows(
            results.load("rows_builtin"), results.load("rows"), path=path),
        "itl": lambda path: figures.gaps(results.load("gaps"), path),
        "bench": lambda path: figures.bench(*results.load("bench"), path=path)}


def draw(args):
    """
    Draws the pictures of README and docs anew, into docs/pictures: each for a page and for a phone,
    for light and for dark.
    """
    for name, draw_into in drawings().items():
        for end, (ink, width) in VARIANTS.items():
            with plots.look(ink, width):
                draw_into(FOLDER / f"{name}{end}.png")
    for name, text in motion.pictures(motion.traces()).items():
        (FOLDER / name).write_text(text, encoding="utf-8", newline="\n")
    return 0
