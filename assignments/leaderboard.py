"""
Two open tasks, ranked by counts and never by seconds. open.md describes them.

    python assignments/leaderboard.py policy DIR     each folder in DIR holds a policy.py
    python assignments/leaderboard.py packing DIR    each folder in DIR holds a packing.py

Each runs in a process of its own, with limits. `ours` and a lower bound of packing are ranked, too.
"""
import argparse
import json
import math
import random
import runpy
import tempfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import kit
from grade_class import LIMITS, PATIENCE, written_by
from kit import Fault

ARRIVALS, BUDGET, PLACES = 2000, 48, 40
SECONDS = 60   # of CPU time, for each student


def workload(rng):
    """Requests that arrive as a Poisson process, at about 90% of what the budget can serve."""
    from request import Request
    time, requests = 0.0, []
    for i in range(ARRIVALS):
        prompt = min(max(round(rng.lognormvariate(3.4, 0.9)), 1), 400)
        new = min(max(round(rng.lognormvariate(2.3, 0.6)), 2), 60)
        request = Request([0] * prompt, new, name=f"r{i}", arrival=int(time))
        request.block_size = 512
        requests.append(request)
        time += rng.expovariate(0.78)
    return requests


def serve(share, rng):
    """Serves the workload under a policy: {"ttft": mean, "late": share of ITL above 2 steps}."""
    from scheduler import Scheduler

    class Shared(Scheduler):
        def admit(self, step):
            """All that have arrived, as long as there are places: the policy chooses among them."""
            while len(self.running) < self.max_batch and self.arrived(step):
                self.running.append(self.waiting.popleft())

        def share_budget(self):
            """The policy's plan. ValueError for one that no step can compute."""
            plan = [(request, n) for request, n in share(list(self.running), BUDGET)]
            if len({request for request, _ in plan}) != len(plan):
                raise ValueError("a request appears twice in the plan")
            for request, n in plan:
                if request not in self.running or type(n) is not int or not 1 <= n <= request.todo:
                    raise ValueError(f"{request} cannot compute {n} of its {request.todo} tokens")
            if (tokens := sum(n for _, n in plan)) > BUDGET:
                raise ValueError(f"the plan has {tokens} tokens, the budget is {BUDGET}")
            return plan

    requests, queue, step = workload(rng), Shared(PLACES, BUDGET), 0
    for request in requests:
        queue.add(request)
    while queue.busy:
        step = queue.next_step(step)
        plan = queue.schedule(step)
        due = [request for request, n in plan if n == request.todo]
        queue.update(plan, [0] * len(due))
        for request in due:
            request.token_steps.append(step)
        step += 1
    ttft = [request.token_steps[0] - request.arrival + 1 for request in requests]
    gaps = [b - a for request in requests for a, b in pairwise(request.token_steps)]
    return {"ttft": sum(ttft) / len(ttft), "late": sum(gap > 2 for gap in gaps) / len(gaps)}


def batches(rng):
    """Lengths and row size of the batches to pack: uniform, skewed, and from 30 to 60."""
    draws = (lambda: rng.randint(1, 100), lambda: min(100, round(rng.lognormvariate(3, 0.8)) + 1),
             lambda: rng.randint(30, 60))
    return [([draws[i % 3]() for _ in range(rng.randint(40, 80))], 100) for i in range(30)]


def fill(pack, rng):
    """{"rows": how many a packing needs for all batches}. ValueError if it is not a valid one."""
    total = 0
    for lengths, size in batches(rng):
        rows = pack(list(lengths), size)
        if sorted(i for row in rows for i in row) != list(range(len(lengths))):
            raise ValueError("each prompt must be in exactly one row")
        if any(sum(lengths[i] for i in row) > size for row in rows):
            raise ValueError(f"a row holds more than {size} tokens")
        total += len(rows)
    return {"rows": total}


def play(task, file, seed, results):
    """In a process of its own: what a student's file achieves, as JSON in the file `results`."""
    try:
        with kit.limited(SECONDS):
            function, rng = ("share", "pack")[task == "packing"], random.Random(f"{task} {seed}")
            theirs = runpy.run_path(file)[function]
            found = serve(theirs, rng) if task == "policy" else fill(theirs, rng)
    except Exception as error:
        found = {"fault": str(error) if isinstance(error, Fault) else
                 f"raises {type(error).__name__}: {str(error).strip():.150}"}
    Path(results).write_text(json.dumps(found))


def result_of(folder, task, seed):
    """What one student's file achieves: a dict, with "fault" if it fails."""
    file = Path(folder, f"{task}.py")
    if not file.is_file():
        return {"fault": f"there is no {task}.py"}
    with tempfile.TemporaryDirectory() as place:
        results = Path(place, "results.json")
        code = (f"{LIMITS}\nsys.path[:0] = {[str(kit.HERE), str(kit.ROOT)]}\n"
                "import leaderboard\nleaderboard.play(*sys.argv[1:])")
        found = written_by([code, task, file.resolve(), seed, results], folder, results, PATIENCE)
        return {"fault": found} if isinstance(found, str) else found


def baselines(task, seed):
    """What the repository itself achieves, and for packing a bound that nothing can beat."""
    first, again = (random.Random(f"{task} {seed}") for _ in range(2))
    if task == "policy":
        from scheduler import Scheduler
        return {"ours": serve(lambda running, budget: Scheduler.share_budget(
            SimpleNamespace(running=running, token_budget=budget)), first)}
    from generate_prepacked import first_fit_decreasing
    bound = sum(math.ceil(sum(lengths) / size) for lengths, size in batches(first))
    return {"ours": fill(first_fit_decreasing, again), "lower bound": {"rows": bound}}


def rank(task, found):
    """Lines of the table, the best first; what is not allowed comes last."""
    lines = []
    for name, result in found.items():
        late, score = result.get("late", 0), result.get("ttft", result.get("rows", 0))
        text = result.get("fault") or (
            f"{score} rows" if task == "packing" else
            f"mean TTFT {score:.2f} steps, {late:.2%} of ITL above 2"
            + ": not allowed" * (late > 0.01))
        lines.append((("fault" in result, late > 0.01, score), f"{name:20} {text}"))
    return [f"{place:3} {line}" for place, (_, line) in enumerate(sorted(lines), 1)]


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    p.add_argument("task", choices=("policy", "packing"))
    p.add_argument("folder", help="with a folder for each student")
    p.add_argument("--salt", default="", help="decides the workload")
    args = p.parse_args(argv)
    if not Path(args.folder).is_dir():
        p.error(f"{args.folder} is not a folder")
    found = baselines(args.task, args.salt)
    found |= {path.name: result_of(path, args.task, args.salt)
              for path in sorted(Path(args.folder).iterdir()) if path.is_dir()}
    print("\n".join(rank(args.task, found)))


if __name__ == "__main__":
    main()
