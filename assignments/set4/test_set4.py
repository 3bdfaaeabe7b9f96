"""Set 4: the fused rectangle."""
import pytest
from answers import answers
from kit import LATE, MIX, Checks, drawn, given, left_in_caches, plan_for, plan_of, sequences

import request
from generate_dynamic import Rectangle

FILES = ("model.py request.py cache.py scheduler.py generate_dynamic.py generate_chunked.py "
         "generate_interleaved.py")
LAY_OUT = "generate_dynamic.py:Rectangle.lay_out"
points = pytest.mark.points


class Stage(Checks):
    causes = None

    def test_the_stage(self, part):
        def serve(requests, **knobs):
            part.serve("generate_interleaved", requests, self.causes, **knobs)

        serve(given(*MIX, (21, 6, 3)), max_batch=4, token_budget=5)
        serve(given(*LATE))
        for sizes in part.sizes:
            many = sizes.get("least", 3)
            serve(drawn(part.rng, prompt=21, **sizes), max_batch=many + 1,
                  token_budget=part.rng.choice([4, 6, 9]) if many < 5 else 3 * many)


def whole(requests, device):
    return Rectangle([(each, each.todo) for each in requests], device)


@points(3, LAY_OUT, title="tokens and positions")
class Test4a(Stage):
    causes = "tokens", "positions"
    on_device = whole, *causes

    def test_columns(self, part):
        part.compare(left_in_caches, Rectangle, part.rng, 2)


@points(4, LAY_OUT, title="the mask over past and new slots")
class Test4b(Stage):
    causes = "sees",
    on_device = whole, "mask"


@points(3, "generate_dynamic.py:Rectangle.attend", title="gathering and writing back")
class Test4c(Stage):
    def test_columns_and_caches(self, part):
        part.compare(left_in_caches, Rectangle, part.rng, 2)


def completed(cases):
    for rows in cases:
        plan = plan_for(rows)
        where = f"indices_due, with the plan {plan_of(plan)}, to do: {[todo for todo, _ in rows]}"
        yield where, {"it returns": request.indices_due(plan), "the plan": plan_of(plan)}


@points(2, LAY_OUT, "request.py:indices_due", title="which requests get a token")
class Test4d(Stage):
    causes = "sampled",
    on_device = whole, "wanted"
    in_time = [("indices_due of 2,000 requests", lambda: [
        (each, 1) for each in given(*[(1, 1)] * 2000)], lambda plan: request.indices_due(plan))]

    def test_indices_due(self, part):
        rows = (1, 1), (1, 0), (3, 1), (3, 3), (3, 0)
        part.compare(completed, sequences(rows, 3) + [part.rng.choices(rows, k=25)] * 5)


test_4_numbers, test_4_break = answers(4, 3)
