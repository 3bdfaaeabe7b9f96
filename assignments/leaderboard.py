"""
Two open tasks, ranked by counts and never by seconds. handouts/open.md describes them.

    python assignments/leaderboard.py policy DIR     each folder in DIR holds a policy.py
    python assignments/leaderboard.py packing DIR    each folder in DIR holds a packing.py

policy    share(running, budget) -> [(request, number of tokens), ...]: the plan of one step. 2,000
          requests arrive; the mean time to first token counts, in steps. At most 1% of the times
          between two tokens may exceed 2 steps.
packing   pack(lengths, size) -> [[index, ...], ...]: rows of at most `size` tokens. The rows of 30
          batches count together.

Each runs in a child process with limits, as in grade.py. `ours` and the lower bound of packing are
ranked, too.
"""
import argparse
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import grade  # noqa: E402
import observe  # noqa: E402

ARRIVALS, BUDGET, PLACES = 2000, 48, 40
SECONDS = 60   # of CPU time, or grade.TIMES what `ours` takes


def workload(seed):
    """Requests that arrive as a Poisson process, at about 90% of what the budget can serve."""
    from request import Request
    rng, time, requests = random.Random(f"policy {seed}"), 0.0, []
    for i in range(ARRIVALS):
        prompt = min(max(round(rng.lognormvariate(3.4, 0.9)), 1), 400)
        new = min(max(round(rng.lognormvariate(2.3, 0.6)), 2), 60)
        request = Request([0] * prompt, new, name=f"r{i}", arrival=int(time))
        request.block_size = 512
        requests.append(request)
        time += rng.expovariate(0.78)
    return requests


def serve(share, seed):
    """Serves the workload under a policy: {"ttft": mean, "late": share of ITL above 2 steps}."""
    from scheduler import Scheduler

    class Shared(Scheduler):
        def admit(self, step):
            """All that have arrived, as long as there are places: the policy chooses among them."""
            while len(self.running) < self.max_batch and self.arrived(step):
                self.running.append(self.waiting.popleft())

        def share_budget(self):
            plan = [(request, n) for request, n in share(list(self.running), BUDGET)]
            check_plan(plan, self.running)
            return plan

    requests, queue, step = workload(seed), Shared(PLACES, BUDGET), 0
    for request in requests:
        queue.add(request)
    last = {}
    ttft, gaps = [], []
    while queue.busy:
        step = queue.next_step(step)
        plan = queue.schedule(step)
        due = [request for request, n in plan if n == request.todo]
        queue.update(plan, [0] * len(due))
        for request in due:
            if request in last:
                gaps.append(step - last[request])
            else:
                ttft.append(step - request.arrival + 1)
            last[request] = step
        step += 1
    return {"ttft": sum(ttft) / len(ttft), "late": sum(gap > 2 for gap in gaps) / len(gaps)}


def check_plan(plan, running):
    """ValueError for a plan that no step can compute."""
    names = [request.name for request, _ in plan]
    if len(set(names)) != len(names):
        raise ValueError("a request appears twice in the plan")
    for request, n in plan:
        if request not in running or type(n) is not int or not 1 <= n <= request.todo:
            raise ValueError(f"{request} cannot compute {n} of its {request.todo} tokens")
    if sum(n for _, n in plan) > BUDGET:
        raise ValueError(f"the plan has {sum(n for _, n in plan)} tokens, the budget is {BUDGET}")


def batches(seed):
    """Lengths and row size of the batches to pack: uniform, skewed, and from 30 to 60."""
    rng = random.Random(f"packing {seed}")
    draws = (lambda: rng.randint(1, 100), lambda: min(100, round(rng.lognormvariate(3, 0.8)) + 1),
             lambda: rng.randint(30, 60))
    return [([draws[i % 3]() for _ in range(rng.randint(40, 80))], 100) for i in range(30)]


def rows_of(pack, seed):
    """How many rows a packing needs for all batches. ValueError if it is not a valid packing."""
    total = 0
    for lengths, size in batches(seed):
        rows = pack(list(lengths), size)
        if sorted(i for row in rows for i in row) != list(range(len(lengths))):
            raise ValueError("each prompt must be in exactly one row")
        if any(sum(lengths[i] for i in row) > size for row in rows):
            raise ValueError(f"a row holds more than {size} tokens")
        total += len(rows)
    return total


def play(folder, task, seed, report, limit):
    """The child process: runs one student's file and writes the result, or what went wrong."""
    observe.enter(folder, report)
    observe.limit_cpu(limit)
    try:
        if task == "policy":
            from policy import share
            found = serve(share, seed)
        else:
            from packing import pack
            found = {"rows": rows_of(pack, seed)}
    except BaseException as error:
        found = {"fault": observe.say(error)}
    Path(report).write_text(json.dumps(found))


def result_of(folder, task, seed, ours=0):
    """
    What one student's file achieves: a dict, with "fault" if it fails. What does not finish is
    tried once more. ours: the CPU seconds of the repository's own solution
    """
    file, limit = f"{task}.py", max(SECONDS, grade.TIMES * ours)
    try:
        edits = {file: (Path(folder) / file).read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError):
        return {"fault": f"there is no {file} that can be read"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        checkout, report = Path(place, "checkout").resolve(), Path(place, "report").resolve()
        checkout.mkdir()
        grade.checkout(checkout, 3, edits)
        for _ in range(2):
            late, status = grade.finish(play, (checkout, task, seed, report), limit)
            if not late:
                break
        try:
            return {"fault": late} if late else json.loads(report.read_text())
        except (OSError, ValueError):
            return {"fault": f"ends the process (status {status})"}


def baselines(task, seed):
    """What the repository itself achieves, and for packing a bound that nothing can beat."""
    sys.path.insert(0, str(HERE.parent))
    if task == "policy":
        from types import SimpleNamespace

        from scheduler import Scheduler
        return {"ours": serve(lambda running, budget: Scheduler.share_budget(
            SimpleNamespace(running=running, token_budget=budget)), seed)}
    from generate_prepacked import first_fit_decreasing
    bound = sum(math.ceil(sum(lengths) / size) for lengths, size in batches(seed))
    return {"ours": {"rows": rows_of(first_fit_decreasing, seed)}, "lower bound": {"rows": bound}}


def rank(task, found):
    """Lines of the table, the best first; what is not allowed comes last."""
    def key(item):
        _, result = item
        return ("fault" in result, result.get("late", 0) > 0.01,
                result.get("ttft", result.get("rows", 0)))

    lines = []
    for place, (name, result) in enumerate(sorted(found.items(), key=key), 1):
        if "fault" in result:
            text = result["fault"]
        elif task == "policy":
            text = f"mean TTFT {result['ttft']:.2f} steps, {result['late']:.2%} of ITL above 2"
            text += ": not allowed" if result["late"] > 0.01 else ""
        else:
            text = f"{result['rows']} rows"
        lines.append(f"{place:3} {name:20} {text}")
    return lines


def main(argv=None):
    p = argparse.ArgumentParser(prog="leaderboard.py", description=__doc__.split("\n")[1])
    p.add_argument("task", choices=("policy", "packing"))
    p.add_argument("folder", help="with a folder for each student")
    p.add_argument("--salt", default="", help="decides the workload")
    args = p.parse_args(argv)
    if not Path(args.folder).is_dir():
        p.error(f"{args.folder} is not a folder")
    started = time.process_time()
    found = baselines(args.task, args.salt)
    ours = time.process_time() - started
    found |= {path.name: result_of(path, args.task, args.salt, ours)
              for path in sorted(Path(args.folder).iterdir()) if path.is_dir()}
    print("\n".join(rank(args.task, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
