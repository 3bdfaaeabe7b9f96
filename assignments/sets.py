"""
The manifest: which functions the students of each set write, and what they are worth.

A set has code parts, each judged on its own; numbers to predict; bugs to expose; written answers.
make.py cuts the student copy by it, grade.py grades by it, and the tests compare it with the
repository: no function may disappear, grow beyond MOST_LINES, or leak.
"""
from dataclasses import dataclass

MOST_LINES = 25   # of a body that students write, without its docstring
CAUSES = ("tokens", "positions", "sees", "sampled", "result", "crash", "counts", "contract")


@dataclass
class Part:
    """
    name:      the set's number and a letter, "4b"
    functions: that the student writes, "file.py:Class.method"
    points:    40% for the visible workloads, all if the hidden ones are right as well
    causes:    of all that is observed, what this part is judged by, in this order
    """
    name: str
    title: str
    functions: list
    points: int
    causes: tuple = CAUSES


@dataclass
class Set:
    """
    needs:   the modules of the student copy, besides those of toolbox/ and checks/
    numbers: points for predicted numbers (predict.py asks them)
    breaks:  points for exposing bugs, five in each set (BUGS in mutants.py)
    written: points for the written answers (key/N.md)
    hidden:  functions that are blank in the copy as well, because they would give others away
    """
    number: int
    title: str
    parts: list
    needs: list
    numbers: int = 2
    breaks: int = 2
    written: int = 2
    hidden: tuple = ()

    @property
    def functions(self):
        """All functions of the set, each once."""
        return list(dict.fromkeys(name for part in self.parts for name in part.functions))

    @property
    def modules(self):
        """The files that the parts run with. Where there is no model, there is no torch."""
        tools = "toolbox/__init__ toolbox/validate " + (
            "toolbox/trace checks/__init__ checks/toy checks/xray checks/check checks/ties "
            "checks/judge " * ("model.py" in self.needs))
        return [*self.needs, *(f"{name}.py" for name in tools.split())]


CORE = ["model.py", "request.py", "cache.py"]
LOOK = ("tokens", "positions", "result", "crash")
LAY_OUT = "generate_dynamic.py:Rectangle.lay_out"

SETS = {each.number: each for each in [
    Set(1, "Head and cache", [
        Part("1a", "attention", ["model.py:Head.forward"], 4),
        Part("1b", "the KV cache", ["cache.py:KV.write", "cache.py:KV.read"], 3),
        Part("1c", "one request alone", ["generate_unbatched.py:Alone.lay_out",
                                        "generate_unbatched.py:Alone.attend"], 2),
    ], needs=[*CORE, "generate_unbatched.py"]),
    Set(2, "Rectangles", [
        Part("2a", "the static batch", ["generate_naive.py:StaticBatch.lay_out"], 4),
        Part("2b", "the end of a request", ["request.py:Request.append"], 2),
        Part("2c", "dynamic admission", ["generate_dynamic.py:admit", "generate_dynamic.py:leave"],
             3),
    ], needs=[*CORE, "generate_naive.py", "generate_dynamic.py"],
        hidden=(LAY_OUT, "generate_dynamic.py:Rectangle.attend")),
    Set(3, "The scheduler", [
        Part("3a", "sharing the budget", ["scheduler.py:Scheduler.share_budget"], 3),
        Part("3b", "admission", ["scheduler.py:Scheduler.admit",
                                "scheduler.py:Scheduler.grant_room"], 3),
        Part("3c", "after a step", ["request.py:advance", "scheduler.py:Scheduler.release"], 3),
    ], needs=["request.py", "scheduler.py"]),
    Set(4, "The fused rectangle", [
        Part("4a", "tokens and positions", [LAY_OUT], 3, LOOK),
        Part("4b", "the mask over past and new slots", [LAY_OUT], 4, ("sees", "crash")),
        Part("4c", "gathering and writing back", ["generate_dynamic.py:Rectangle.attend"], 3),
        Part("4d", "which requests get a token", [LAY_OUT, "request.py:indices_due"], 2,
             ("sampled", "crash", "counts")),
    ], needs=[*CORE, "scheduler.py", "generate_dynamic.py", "generate_interleaved.py"],
        numbers=3, breaks=3),
    Set(5, "No rows", [
        Part("5a", "bin packing", ["generate_prepacked.py:first_fit_decreasing"], 2),
        Part("5b", "packed rows", ["generate_prepacked.py:Packed.lay_out"], 4),
        Part("5c", "the stream and its mask", ["generate_ragged.py:Flat.lay_out",
                                              "generate_ragged.py:Flat.block_diagonal"], 3),
        Part("5d", "the varlen loop", ["generate_ragged.py:Flat.attend"], 3),
    ], needs=[*CORE, "scheduler.py", "generate_dynamic.py", "generate_prepacked.py",
              "generate_ragged.py"], numbers=3, breaks=3),
    Set(6, "Pages", [
        Part("6a", "holding and giving back", ["paging.py:Pages.hold", "paging.py:Pages.give_back",
                                              "paging.py:Pages.allocate"], 2),
        Part("6b", "block tables", ["generate_paged.py:Paged.slots",
                                   "generate_paged.py:Paged.write"], 2),
        Part("6c", "sharing a prefix", ["paging.py:Pages.find", "paging.py:Pages.publish"], 3),
        Part("6d", "preemption", ["paging.py:PagedScheduler.preempt"], 2),
    ], needs=[*CORE, "scheduler.py", "generate_ragged.py", "paging.py", "generate_paged.py"]),
]}
