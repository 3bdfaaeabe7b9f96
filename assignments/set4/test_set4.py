"""Set 4: the fused rectangle."""
import pytest
from kit import LATE, MIX, Example, answers, drawn, given, left_in_caches, sequences

import generate_dynamic
import request

FILES = ("model.py request.py cache.py scheduler.py generate_dynamic.py generate_chunked.py "
         "generate_interleaved.py")
LAY_OUT = "generate_dynamic.py:Rectangle.lay_out"
points = pytest.mark.points


class Stage(Example):
    causes = counts = None

    def test_the_stage(self, part):
        def serve(requests, **knobs):
            part.serve("generate_interleaved", requests, self.causes, self.counts, **knobs)

        serve(given(*MIX, (21, 6, 3)), max_batch=4, token_budget=5)
        serve(given(*LATE))
        for sizes in part.sizes:
            many = sizes.get("least", 3)
            serve(drawn(part.rng, prompt=21, **sizes), max_batch=many + 1,
                  token_budget=part.rng.choice([4, 6, 9]) if many < 5 else 3 * many)


def whole(requests, device):
    return generate_dynamic.Rectangle([(each, each.todo) for each in requests], device)


@points(3, LAY_OUT, title="tokens and positions")
class Test4a(Stage):
    causes = "tokens", "positions"

    def test_columns(self, part):
        part.compare(left_in_caches, generate_dynamic.Rectangle, part.rng, 2)

    def test_device(self, part):
        part.on_device(whole, "tokens", "positions")


@points(4, LAY_OUT, title="the mask over past and new slots")
class Test4b(Stage):
    causes = "sees",

    def test_device(self, part):
        part.on_device(whole, "mask")


@points(3, "generate_dynamic.py:Rectangle.attend", title="gathering and writing back")
class Test4c(Stage):
    counts = True

    def test_columns_and_caches(self, part):
        part.compare(left_in_caches, generate_dynamic.Rectangle, part.rng, 2)


def completed(cases):
    for rows in cases:
        plan = list(zip(given(*[(4, 2)] * len(rows)), (n for _, n in rows)))
        for (each, _), (todo, _) in zip(plan, rows):
            each.computed = 4 - todo
        words = ", ".join(f"{r.name}: {n} of {r.todo} tokens to do" for r, n in plan) or "[]"
        yield f"indices_due, with the plan {words}", {
            "it returns": request.indices_due(plan), "the plan's n afterwards": [
                n for _, n in plan]}


@points(2, LAY_OUT, "request.py:indices_due", title="which requests get a token")
class Test4d(Stage):
    causes, counts = ("sampled",), True

    def test_indices_due(self, part):
        rows = (1, 1), (1, 0), (3, 1), (3, 3), (3, 0)
        part.compare(completed, sequences(rows, 3))
        part.compare(completed, [[part.rng.choice(rows) for _ in range(25)] for _ in range(20)])

    def test_device(self, part):
        part.on_device(whole, "wanted")

    def test_time(self, part):
        plan = [(each, 1) for each in given(*[(1, 1)] * 2000)]
        part.fast("indices_due of 2,000 requests", lambda: plan,
                  lambda plan: request.indices_due(plan))


test_4_numbers, test_4_break = answers(4, 3)
