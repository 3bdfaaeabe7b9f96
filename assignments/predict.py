"""
Numbers that students predict before they run anything. The student's id decides the parameters, and
the repository's own code computes the answers.
"""
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))   # the repository's modules


def requests_of(*sizes):
    """Requests from (prompt tokens, new tokens) or (prompt tokens, new tokens, arrival)."""
    from request import Request
    return [Request([1 + (i + j) % 11 for j in range(prompt)], new, name="ABCDEFGH"[i],
                    arrival=arrival[0] if arrival else 0)
            for i, (prompt, new, *arrival) in enumerate(sizes)]


def total(what, stage, requests, **knobs):
    """The sum of a figure over all passes of a run."""
    return sum(getattr(p, what) for p in trace_of(stage, requests, **knobs).passes)


def trace_of(stage, requests, **knobs):
    from toolbox.stages import STAGES
    from toolbox.toy import toy
    return STAGES[stage](toy(), requests, **knobs)


def set_1(rng):
    n, g, past, new = rng.randint(5, 9), rng.randint(4, 8), rng.randint(5, 9), rng.randint(3, 6)
    layers, heads, size, tokens = (rng.choice(each) for each in (
        (24, 32, 40), (16, 32), (64, 128), (1024, 2048)))
    yield (f"A prompt of {n} tokens, {g} tokens to generate, with a KV cache: how many score "
           "entries, per head and layer, do all forward passes compute together?",
           lambda: total("score_entries", "unbatched", requests_of((n, g))))
    yield ("The same without a cache: how many tokens do all passes compute together?",
           lambda: total("slots", "unbatched, no cache", requests_of((n, g))))
    yield (f"A chunk of {new} tokens with {past} tokens in the cache: how many entries of its mask "
           "are True?",
           lambda: sum(past + i + 1 for i in range(new)))
    yield (f"{layers} layers, {heads} heads of {size} features, 2-byte numbers: how many bytes "
           f"does the cache of {tokens} tokens take?",
           lambda: tokens * cache_bytes(layers, heads, size))


def cache_bytes(layers, heads, size):
    import torch

    from cache import KV
    kv = KV(1)
    for layer in range(layers):
        kv.write(layer, 0, *(torch.zeros(heads, 1, size, dtype=torch.float16) for _ in "kv"))
    return kv.bytes_per_token


def set_2(rng):
    a, b, c = rng.sample(range(2, 10), 3)
    x, y, z = rng.sample(range(2, 9), 3)
    three = (a, x), (b, y), (c, z)
    words = (f"prompts of {a}, {b} and {c} tokens, which want {x}, {y} and {z} new tokens and all "
             "arrive at step 0")
    yield (f"A static batch, {words}: how many slots of the first pass are padding?",
           lambda: trace_of("naive", requests_of(*three)).passes[0].pad_slots)
    yield (f"A static batch, {words}: how many slots are computed for finished requests?",
           lambda: total("finished_slots", "naive", requests_of(*three)))
    yield (f"A static batch, {words}: how many slots do all passes compute?",
           lambda: total("slots", "naive", requests_of(*three)))
    yield (f"Dynamic batching with max_batch 2, {words}: in which step (counted from 0) does the "
           "third request get its first token?",
           lambda: trace_of("dynamic", requests_of(*three), max_batch=2).requests[2].token_steps[0])


def set_3(rng):
    a, b, c = rng.randint(2, 4), rng.randint(2, 4), rng.randint(9, 14)
    budget = rng.choice([4, 5, 6])
    three = (a, 9), (b, 9), (c, 3)
    words = (f"token_budget {budget}, prompts of {a}, {b} and {c} tokens (A, B, C), which want 9, "
             "9 and 3 new tokens and all arrive at step 0")

    def c_first(**knobs):
        return trace_of("interleaved", requests_of(*three), token_budget=budget,
                        **knobs).requests[2].token_steps[0]
    yield f"{words}: in which step (from 0) does C get its first token?", c_first
    yield (f"{words}: how many steps does the run have?", lambda: trace_of(
        "interleaved", requests_of(*three), token_budget=budget).passes[-1].step + 1)
    yield (f"{words}, and max_kv_tokens {a + b + 20}: in which step does C get its first token?",
           lambda: c_first(max_kv_tokens=a + b + 20))
    yield (f"{words}: how many tokens does step 1 compute?", lambda: trace_of(
        "interleaved", requests_of(*three), token_budget=budget).passes[1].useful)


def set_4(rng):
    n, B, short = rng.randint(12, 18), rng.randint(4, 7), rng.randint(3, 6)
    pasts = rng.sample(range(4, 15), 3)
    chunk = rng.randint(5, 8)
    three = [(past, 3) for past in pasts] + [(chunk, 2, 1)]

    def fused():
        return trace_of("interleaved", requests_of(*three)).passes[1]
    words = (f"A fused rectangle: three requests with {pasts[0]}, {pasts[1]} and {pasts[2]} cached "
             f"tokens decode, beside the whole prompt of {chunk} tokens of a newcomer")
    yield f"{words}: how many slots are padding?", lambda: fused().pad_slots
    yield (f"{words}: how many key slots, of all rows, hold no token?",
           lambda: fused().padded_keys)
    yield (f"{words}: how many score entries, per head and layer, are computed?",
           lambda: fused().score_entries)
    yield (f"{B - 1} requests decode, and a prompt of {n} tokens is computed in one piece: how "
           "many pad slots does the fused rectangle have?", lambda: trace_of(
               "interleaved", requests_of(*[(short, 4)] * (B - 1), (n, 1, 1))).passes[1].pad_slots)


def set_5(rng):
    lengths = [rng.randint(2, 12) for _ in range(7)]
    a, b, c = rng.sample(range(5, 20), 3)

    def rows():
        from generate_prepacked import first_fit_decreasing
        return len(first_fit_decreasing(lengths, max(lengths)))

    def scores(attention):
        return trace_of(f"ragged, {attention}", requests_of((a, 1), (b, 1), (c, 1))
                        ).passes[0].score_entries
    yield (f"First-fit decreasing, prompts of {', '.join(map(str, lengths))} tokens, rows as long "
           "as the longest: how many rows?", rows)
    yield ("The same prompts: how many slots of the packed rows are padding?",
           lambda: rows() * max(lengths) - sum(lengths))
    words = f"A stream of three prompts of {a}, {b} and {c} tokens, one head of one layer"
    yield f"{words}: how many scores does the masked way compute?", lambda: scores("mask")
    yield f"{words}: how many does the varlen loop compute?", lambda: scores("varlen")


def set_6(rng):
    size, prompt, new = rng.choice([3, 4, 5]), rng.randint(6, 9), rng.randint(6, 9)
    table = rng.sample(range(9), 4)
    position = rng.randint(size, 4 * size - 1)
    common = rng.randint(9, 14)

    def smallest():
        for pages in range(-(-(prompt + new) // size), 99):
            trace = trace_of("paged", requests_of(*[(prompt, new)] * 3), pages=pages,
                             page_size=size, share_prefixes=False)
            if len(trace.passes[0].work) == 3 and not trace.counts["preemptions"]:
                return pages

    def shared():
        from request import Request
        first = list(range(common % 13)) + [5] * (common - common % 13)
        requests = [Request([*first[:common], 7 + i], 2, name=f"r{i}", arrival=2 * i)
                    for i in range(3)]
        return trace_of("paged", requests, page_size=size).counts["saved_tokens"]

    def slot():
        from types import SimpleNamespace

        from generate_paged import Paged
        return Paged.slots(SimpleNamespace(pages=SimpleNamespace(size=size)), table, position,
                           position + 1)[0]
    yield (f"Pages of {size} tokens, block table {table}: in which slot of the pool is position "
           f"{position}?", slot)
    yield (f"Pages of {size} tokens, three requests with prompts of {prompt} tokens, all "
           f"different, and {new} tokens to generate: how many pages does the smallest pool have "
           "in which all three begin in step 0 and none is preempted?", smallest)
    yield (f"Pages of {size} tokens. Three prompts of {common + 1} tokens arrive one after the "
           f"other. They have their first {common} tokens in common, and differ in the last. How "
           "many tokens of the second and third together need not be computed?", shared)
    yield (f"Pages of {size} tokens: how many slots does a request of {prompt + new} cached tokens "
           "leave empty in its last page?", lambda: -(prompt + new) % size)


QUESTIONS = {1: set_1, 2: set_2, 3: set_3, 4: set_4, 5: set_5, 6: set_6}


def questions(number, student):
    """{"1": (text, function that computes the answer), ...} for a student."""
    rng = random.Random(f"numbers {number} {student}")
    return {str(i): question for i, question in enumerate(QUESTIONS[number](rng), 1)}
