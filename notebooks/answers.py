"""
The answers to the notebooks' questions, kept out of their cells: predict first.

    ANSWERS["2.1"] = (function, reason)     the first question of notebook 2

Each answer is computed by the repository's code. A function takes `nb`, which has the names of
lesson.py, and those that the cells of the notebook define.
"""
from types import SimpleNamespace

import torch

from beyond.simulate import figures
from cache import KV
from experiments import memory
from generate_paged import Paged
from generate_prepacked import first_fit_decreasing
from paging import Pages


def answer_of_3_3(nb):
    right = nb.survivors("prompts before decodes", "interleaved", nb.three, token_budget=5)
    return len(nb.three) - len(right.split(", "))


def answer_of_3_4(nb):
    example = nb.letters(A=22, B=15, C=9, D=16, new=3, arrivals={"D": 1})
    return int((nb.look("interleaved", example, step=1).ids == 0).sum())


def answer_of_5_3(nb):
    """Only the prompt's 144 tokens count, not the generated ones."""
    return sum(n for p in nb.alike(True).passes for name, first, n in p.work
               if name == "r15" and first < 144)


def answer_of_6_1(nb):
    return next(rows for rows in range(1, 1000)
                if nb.linears(rows)[1] / nb.PEAK > nb.linears(rows)[0] / nb.BANDWIDTH)


def answer_of_6_2(nb):
    token = KV(capacity=1)
    for layer in range(12):   # of 12 heads of 64
        token.write(layer, 0, torch.zeros(12, 1, 64), torch.zeros(12, 1, 64))
    return 32 * 300 * token.bytes_per_token / 1e6


def answer_of_6_3(nb):
    dynamic, chunked = (figures(nb.on_a100(stage))["itl_ms"]["p99"]
                        for stage in ("dynamic", "chunked"))
    return "yes" if chunked < dynamic else "no"


ANSWERS = {
    "0.1": (
        lambda nb: nb.survivors("published mask", "interleaved", nb.eight, max_batch=4,
                                token_budget=16),
        "Its prompt is the widest row of its step, and when it decodes, no prompt is beside it. "
        "(In its line of the timeline there is no grey.)"),

    "1.1": (
        lambda nb: nb.moved_rows(changed_token=3)[-1],
        "The new token's own row, and all rows after it: they see it. Rows 0, 1 and 2 stay as "
        "they were, in every layer."),
    "1.2": (
        lambda nb: nb.run("unbatched", nb.letters(A=70, new=1)).passes[0].score_entries,
        "Ten times the tokens, a hundred times the scores."),
    "1.3": (
        lambda nb: nb.moved_rows(changed_token=6)[-1],
        "Only its own: no earlier token sees it."),
    "1.4": (
        lambda nb: nb.cache_bytes(32 * 4096, layers=32, heads=32, head_size=128) / 1e9,
        "The weights take 13.5 GB. It is the caches that fill a GPU, not the model."),

    "2.1": (
        lambda nb: nb.survivors("right padding", "naive", nb.requests),
        "A is the longest: its last column holds its last token. For B and C it holds a pad."),
    "2.2": (
        lambda nb: nb.survivors("static column positions", "naive", nb.requests),
        "A has no pads, so its columns are its positions. A test with one prompt sees nothing."),
    "2.3": (
        lambda nb: sum(p.finished_slots for p in nb.run("naive", nb.uneven).passes),
        "8 steps for the first, 5 for the second."),
    "2.4": (
        lambda nb: nb.survivors("column positions", "dynamic", nb.eight, max_batch=4),
        "Each of them is the longest row of every rectangle that it is in."),

    "3.1": (
        lambda nb: nb.plans(nb.letters(A=3, B=2, C=12, new=6), token_budget=8)[:3],
        "Decodes come first, at one token each; C gets what is left. C's prompt is done in step "
        "2."),
    "3.2": (
        lambda nb: nb.run("interleaved", nb.letters(A=3, B=2, C=12, new=20),
                          token_budget=4).requests[2].token_steps[0],
        "Step 0 goes to A and B. From step 1 on each of them takes one token and leaves two to "
        "C."),
    "3.3": (answer_of_3_3, "A scheduling choice changes when a token comes, never which."),
    "3.4": (
        answer_of_3_4,
        "The rectangle is as wide as the chunk: three decode rows of one token each, 3 x 15 pads."),
    "3.5": (
        lambda nb: nb.pads(200, 8),
        "199 x 7: about twice as many. If it were quadratic, it would be four times."),

    "4.1": (
        lambda nb: len(first_fit_decreasing([8, 7, 5, 4, 3, 2, 1], 9)),
        "30 tokens need at least 4 rows of 9, and 8 + 1, 7 + 2, 5 + 4 and 3 fit."),
    "4.2": (
        lambda nb: nb.survivors("neighbours in a packed row", "prepacked", nb.five),
        "The first prompt of each row has no neighbour before it."),
    "4.3": (
        lambda nb: nb.look("ragged, mask", nb.three, step=0).record.score_entries,
        "60 x 60: more than twice as many as before."),
    "4.4": (
        lambda nb: nb.look("ragged, varlen", nb.three, step=0).record.score_entries,
        "100 + 900 + 400: C adds its own block only."),
    "4.5": (
        lambda nb: nb.scores(*[50] * 20),
        "20 x 2,500: half of those of ten requests of 100."),

    "5.1": (
        lambda nb: max(len(p.work) for p in memory.storm(nb.model)["reserve"].passes),
        "A token's keys are computed when the next token is generated, so the last one needs no "
        "room. Each reserves 6 + 26 - 1 = 31 tokens, and 128 / 31 is a little more than 4."),
    "5.2": (
        lambda nb: Paged.slots(SimpleNamespace(pages=Pages(6, 4)), [3, 0, 5], 11)[10].item(),
        "Position 10 is in the third page of the table, page 5, at offset 2: 5 x 4 + 2."),
    "5.3": (answer_of_5_3, "Eight full pages are found; what is left is its own."),
    "5.4": (
        lambda nb: next(pages for pages in range(4, 40) if not nb.preemptions(pages)),
        "Each comes to 17 tokens, of which the last needs no room. 16 tokens fill 4 pages."),

    "6.1": (
        answer_of_6_1,
        "In float32 each row is half an operation per byte of weights. So it takes twice as many "
        "rows as the machine can do operations while it reads a byte."),
    "6.2": (
        answer_of_6_2,
        "Tokens x 2 x 12 layers x 768 x 4 bytes. That is more than the 494 MB of weights."),
    "6.3": (
        answer_of_6_3,
        "The workload is the reason, not the processor: all requests arrive at once. Dynamic "
        "computes all prompts in its first step, when nobody waits for a second token yet. With "
        "chunks, the first requests decode and wait for the chunks of the others."),
    "6.4": (
        lambda nb: [int(nb.counts()[i].split()[0]) for i in (3, 6)],
        "Two in each of the 4 blocks, whatever is in the batch; only their size grows."),
    "6.5": (
        lambda nb: (torch.tensor(1e8) + (torch.tensor(-1e8) + 1)).item(),
        "Near 1e8 two neighbouring float32 numbers are 8 apart, so -1e8 + 1 is rounded to -1e8."),
}
