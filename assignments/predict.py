"""
Numbers that students predict before they run anything. The student's id decides the parameters, and
the repository's own code computes the answers.
"""
import random
from itertools import count

from kit import given


def run_of(stage, *sizes, **knobs):
    """The trace of a run; sizes: (prompt tokens, new tokens, arrival) of each request."""
    from lab.checks.toy import toy
    from lab.loading.stages import STAGES
    return STAGES[stage](toy(block_size=128), given(*sizes), **knobs)


def set_1(rng):
    n, g, past, new = rng.randint(5, 9), rng.randint(4, 8), rng.randint(5, 9), rng.randint(3, 6)
    layers, heads, size, tokens = (rng.choice(each) for each in (
        (24, 32, 40), (16, 32), (64, 128), (1024, 2048)))
    yield (f"A prompt of {n} tokens, {g} tokens to generate, with a KV cache: how many score "
           "entries, per head and layer, do all forward passes compute together?",
           sum(p.score_entries for p in run_of("unbatched", (n, g)).passes))
    yield ("The same without a cache: how many tokens do all passes compute together?",
           sum(p.slots for p in run_of("unbatched, no cache", (n, g)).passes))
    yield (f"A chunk of {new} tokens with {past} tokens in the cache: how many entries of its mask "
           "are True?", sum(past + i + 1 for i in range(new)))
    yield (f"{layers} layers, {heads} heads of {size} features, 2-byte numbers: how many bytes "
           f"does the cache of {tokens} tokens take?", 2 * layers * heads * size * 2 * tokens)


def set_2(rng):
    a, b, c = rng.sample(range(2, 25), 3)
    x, y, z = rng.sample(range(2, 20), 3)
    three = (a, x), (b, y), (c, z)
    static, dynamic = run_of("naive", *three), run_of("dynamic", *three, max_batch=2)
    words = (f"prompts of {a}, {b} and {c} tokens, which want {x}, {y} and {z} new tokens and all "
             "arrive at step 0")
    yield (f"A static batch, {words}: how many slots of the first pass are padding?",
           static.passes[0].pad_slots)
    yield (f"A static batch, {words}: how many slots are computed for finished requests?",
           sum(p.finished_slots for p in static.passes))
    yield (f"A static batch, {words}: how many slots do all passes compute?",
           sum(p.slots for p in static.passes))
    yield (f"Dynamic batching with max_batch 2, {words}: in which step (counted from 0) does the "
           "third request get its first token?", dynamic.requests[2].token_steps[0])


def set_3(rng):
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(20, 60)
    x, y, z, k = rng.randint(9, 25), rng.randint(9, 25), rng.randint(3, 9), rng.randint(3, 9)
    budget = rng.randint(4, 11)
    room = max(a + x + b + y - 2 + rng.randint(1, 9), c + z)
    sizes = (a, x), (b, y), (c, z)
    free, full = (run_of("interleaved", *sizes, token_budget=budget, max_kv_tokens=most)
                  for most in (None, room))
    words = (f"token_budget {budget}, prompts of {a}, {b} and {c} tokens (A, B, C), which want "
             f"{x}, {y} and {z} new tokens and all arrive at step 0")
    yield (f"{words}: in which step (from 0) does C get its first token?",
           free.requests[2].token_steps[0])
    yield f"{words}: how many steps does the run have?", free.passes[-1].step + 1
    yield (f"{words}, and max_kv_tokens {room}: in which step does C get its first token?",
           full.requests[2].token_steps[0])
    yield (f"{words}: how many tokens of C's prompt are computed after step {k}?", sum(
        n for p in free.passes[:k + 1] for name, first, n in p.work
        if name == "C" and first < c))


def set_4(rng):
    n, B, short = rng.randint(12, 18), rng.randint(4, 7), rng.randint(3, 6)
    a, b, c = rng.sample(range(4, 15), 3)
    chunk = rng.randint(5, 8)
    fused, wide = (run_of("interleaved", *sizes).passes[1] for sizes in (
        [(a, 3), (b, 3), (c, 3), (chunk, 2, 1)], [(short, 4)] * (B - 1) + [(n, 1, 1)]))
    words = (f"A fused rectangle: three requests with {a}, {b} and {c} cached tokens decode, "
             f"beside the whole prompt of {chunk} tokens of a newcomer")
    yield f"{words}: how many slots are padding?", fused.pad_slots
    yield f"{words}: how many key slots, of all rows, hold no token?", fused.padded_keys
    yield (f"{words}: how many score entries, per head and layer, are computed?",
           fused.score_entries)
    yield (f"{B - 1} requests decode, and a prompt of {n} tokens is computed in one piece: how "
           "many pad slots does the fused rectangle have?", wide.pad_slots)


def set_5(rng):
    from beyond.prepacked import first_fit_decreasing
    lengths = [rng.randint(2, 25) for _ in range(rng.randint(7, 14))]
    a, b, c = rng.sample(range(5, 20), 3)
    rows = len(first_fit_decreasing(lengths, max(lengths)))
    yield (f"First-fit decreasing, prompts of {', '.join(map(str, lengths))} tokens, rows as long "
           "as the longest: how many rows?", rows)
    yield ("The same prompts: how many slots of the packed rows are padding?",
           rows * max(lengths) - sum(lengths))
    words = f"A stream of three prompts of {a}, {b} and {c} tokens, one head of one layer"
    mask, varlen = (run_of(f"ragged, {way}", (a, 1), (b, 1), (c, 1)).passes[0].score_entries
                    for way in ("mask", "varlen"))
    yield f"{words}: how many scores does the masked way compute?", mask
    yield f"{words}: how many does the varlen loop compute?", varlen


def set_6(rng):
    size, prompt, new = rng.randint(3, 9), rng.randint(6, 30), rng.randint(6, 30)
    table, common = rng.sample(range(30), 4), rng.randint(9, 60)
    position = rng.randint(size, 4 * size - 1)
    cached = [rng.randint(5, 60) for _ in range(5)]

    def suffices(pages):
        trace = run_of("paged", *[(prompt, new)] * 3, pages=pages, page_size=size)
        return len(trace.passes[0].work) == 3 and not trace.counts["preemptions"]
    smallest = next(filter(suffices, count(
        max(3 * (prompt // size), -(-(prompt + new) // size)))))
    prompts = [[*[5, 7, 2][:common % 3 + 1], *[5] * (common - common % 3 - 1), 7 + i]
               for i in range(3)]
    shared = run_of("prefix", *[(tokens, 2, 2 * i) for i, tokens in enumerate(prompts)],
                    page_size=size, token_budget=99)
    yield (f"Pages of {size} tokens, block table {table}: in which slot of the pool is position "
           f"{position}?", table[position // size] * size + position % size)
    yield (f"Pages of {size} tokens, three requests with prompts of {prompt} tokens, all "
           f"different, and {new} tokens to generate: how many pages does the smallest pool have "
           "in which all three begin in step 0 and none is preempted?", smallest)
    yield (f"Pages of {size} tokens. Three prompts of {common + 1} tokens arrive one after the "
           f"other. They have their first {common} tokens in common, and differ in the last. How "
           "many tokens of the second and third together need not be computed?",
           shared.counts["saved_tokens"])
    yield (f"Pages of {size} tokens: how many slots do five requests of "
           f"{', '.join(map(str, cached))} cached tokens leave empty in their last pages, in all?",
           sum(-each % size for each in cached))


def questions(number, student):
    """{"1": (text, its answer), ...} for a student."""
    rng = random.Random(f"numbers {number} {student}")
    set_of = (set_1, set_2, set_3, set_4, set_5, set_6, lambda rng: (), lambda rng: ())[number - 1]
    return {str(i): question for i, question in enumerate(set_of(rng), 1)}
