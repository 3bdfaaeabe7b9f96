"""Set 4, the fused rectangle: points, parameters, and the cases of each part."""
from draw import lists, plans

FILES = "model.py request.py cache.py generate_dynamic.py"
LAY_OUT = "generate_dynamic.py:Rectangle.lay_out"
PARTS = {   # points, what it is about, the functions
    "a": (3, "tokens and positions", LAY_OUT),
    "b": (4, "the mask over past and new slots", LAY_OUT),
    "c": (3, "gathering and writing back", "generate_dynamic.py:Rectangle.attend"),
    "d": (2, "which requests get a token", LAY_OUT, "request.py:indices_due")}
WRITTEN = {"1": 3, "2": 2, "3": 3}
PARAMETERS = {"a": range(4, 15), "b": range(4, 15), "c": range(4, 15), "k": range(5, 9)}
VALUES = {"pad slots": "3 * (k - 1)", "scores": "4 * k * (max(a, b, c) + k)",
          "empty key slots": "4 * (max(a, b, c) + k) - (a + b + c + 3 + k)"}
EXAMPLE = [{"prompt": [5, 7, 2], "generated": [9], "computed": 3, "n": 1},
           {"prompt": [4, 8, 6, 1, 3], "computed": 2, "n": 2}, {"prompt": [1, 6, 8], "n": 3}]


def layout(rows):
    """What attend finds: P, T, and the mask (B, P + T)."""
    P, T = max(row.get("computed", 0) for row in rows), max(row["n"] for row in rows)
    return {"P": P, "T": T, "mask": [
        [P - row.get("computed", 0) <= column < P or column >= P + T - row["n"]
         for column in range(P + T)] for row in rows]}


def cases(rng):
    decode = {"prompt": 2, "generated": 1, "computed": 2}
    rows = [{**decode, "n": n} for n in (0, 1)] + [{"prompt": 3, "n": n} for n in (0, 1, 3)]
    rows += [{"prompt": 2, "generated": 2, "n": n} for n in (2, 4)]
    made = {"c": [{"call": "attend", "rows": rows, **layout(rows)} for rows in plans(rng, EXAMPLE)],
            "d": [{"call": "indices_due", "plan": plan} for plan in [*lists(rng, rows), EXAMPLE]]}
    for part, show, names in (("a", "tokens", ["tokens", "positions"]), ("b", "mask", ["mask"]),
                              ("d", "wanted", ["wanted"])):
        made[part] = [*made.get(part, []), {"call": "layout_on_a_device", "names": names}, *(
            {"call": "lay_out", "show": show, "rows": rows} for rows in plans(rng, EXAMPLE))]
    return dict(sorted(made.items()))
