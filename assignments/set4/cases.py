"""Set 4, no rows: points and cases."""
from random_rows import plans

FILES = ("model.py request.py cache.py scheduler.py generate_dynamic.py generate_ragged.py "
         "beyond/prepacked.py")
PACKED, FLAT = "beyond/prepacked.py:", "generate_ragged.py:Flat."
PARTS = {   # points, what it is about, {function: its calls, those for "mask" with the mask's}
    "a": (2, "bin packing", {f"{PACKED}first_fit_decreasing": "first_fit_decreasing"}),
    "b": (4, "packed rows", {f"{PACKED}Packed.lay_out": "packed packed_on_a_device"}),
    "c": (3, "the stream and its mask", {
        f"{FLAT}lay_out": "flat flat_on_a_device",
        f"{FLAT}block_diagonal": "flat_mask mask_on_a_device"}),
    "d": (3, "attention", {
        f"{FLAT}attend": "varlen",
        f"{FLAT}attend_varlen": "varlen",
        f"{FLAT}attend_masked": "masked"})}
# Lengths and a row's size. Each tells first-fit decreasing from another rule.
PACKINGS = (
    ([], 5),
    ([1, 2], 5),
    ([1, 2, 3], 4),             # without sorting
    ([2, 3, 6], 8),             # without an exact fit
    ([1, 3, 3, 5], 7),          # best fit
    ([1, 1, 3, 2, 2], 5),       # last fit, next fit
    ([4, 4, 4, 4], 8),
    ([2, 2, 3, 2, 2, 3], 7))    # the best of several ways
LAST_PACKING = [2, 6, 3, 5, 1, 4], 7
STREAM = [
    {"prompt": [5, 7], "generated": [9], "computed": 2, "n": 1},
    {"prompt": [4, 8, 6], "n": 2},
    {"prompt": [1, 6, 3], "computed": 1, "n": 2}]


# --- a --------------------------------------------------------------------------------------------

def random_lengths(rng, number, most):
    return [rng.randint(1, most) for _ in range(number)]


def packings(rng):
    drawn = []
    for number, size in (5, 9), (9, 20), (12, 15), (40, 50), (80, 60):
        drawn.append((random_lengths(rng, number, size), size))
    drawn.append((random_lengths(rng, 60, 9), 60))
    for lengths, size in (*PACKINGS, *drawn, LAST_PACKING):
        yield {"call": "first_fit_decreasing", "lengths": lengths, "size": size}


# --- b --------------------------------------------------------------------------------------------

def packed_rows(rng):
    """Lists of prompts: so many tokens each, or their ids."""
    lists = [[1], [3], [2, 2], [1, 3], [3, 1, 2], [2, 5, 3, 1], [1, 1, 1, 4]]
    for number in 5, 6, 8, 12:
        lists.append(random_lengths(rng, number, 9))
    by_hand = [5, 7, 2, 9], [4], [1, 6]
    alike = [5, 7, 2, 9, 1, 1], [4, 6], [4, 6], [4]   # three of one beginning, in one row
    yield {"call": "packed_on_a_device"}
    for prompts in *lists, by_hand, alike:
        yield {"call": "packed", "prompts": [{"prompt": prompt} for prompt in prompts]}


# --- c --------------------------------------------------------------------------------------------

def streams(plans):
    for plan in plans:
        yield {"call": "flat", "rows": plan}
        yield {"call": "flat_mask", "rows": plan}
    yield {"call": "flat_on_a_device"}
    yield {"call": "mask_on_a_device"}


# --- d --------------------------------------------------------------------------------------------

def attentions(plans):
    for i, plan in enumerate(plans):
        sizes = {"rows": plan, "heads": 2 + i % 2, "size": 3 - i % 2}
        yield {"call": "varlen", **sizes}
        yield {"call": "masked", **sizes, "mask": block_diagonal(plan)}
    two = [{"prompt": 2, "generated": 1, "computed": 2, "n": 1}] * 2
    yield {"call": "masked", "rows": two, "heads": 2, "size": 3, "lost": True,
           "mask": block_diagonal(two)}


def block_diagonal(plan):
    """For each new token a row, for each key a column: whether the token sees the key."""
    ends = [row.get("computed", 0) + row["n"] for row in plan]
    keys = sum(ends)
    mask = []
    first_key = 0   # of the request
    for row, end in zip(plan, ends):
        for position in range(end - row["n"], end):
            mask.append([first_key <= key <= first_key + position for key in range(keys)])
        first_key += end
    return mask


def cases(rng):
    drawn = plans(rng, STREAM)   # before the others: the order of the draws decides what they are
    return {"a": [*packings(rng)],
            "b": [*packed_rows(rng)],
            "c": [*streams(drawn)],
            "d": [*attentions(drawn)]}
