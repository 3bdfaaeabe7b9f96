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
    letter:    its name is the set's number and this, "4b"
    functions: that the student writes, "file.py:Class.method"
    points:    40% for the visible workloads, all if the hidden ones are right as well
    causes:    of all that is observed, what this part is judged by, in this order
    """
    letter: str
    title: str
    functions: list
    points: int
    causes: tuple = CAUSES


@dataclass
class Set:
    """
    needs:   the modules of the student copy, besides `tools`
    numbers: points for predicted numbers (predict.py asks them)
    breaks:  points for exposing the bugs in `bugs`, names in mutants.py; each is in the part with
             its letter in `bug_parts`
    written: points for the written answers (key/N.md)
    hidden:  functions that are blank in the copy as well, because they would give others away
    """
    number: int
    title: str
    hours: int
    parts: list
    needs: list
    numbers: int
    breaks: int
    written: int
    bugs: list
    bug_parts: str
    hidden: tuple = ()

    @property
    def points(self):
        return sum(part.points for part in self.parts) + self.numbers + self.breaks + self.written

    @property
    def functions(self):
        """All functions of the set, each once."""
        return list(dict.fromkeys(name for part in self.parts for name in part.functions))

    @property
    def modules(self):
        """The files that the parts run with. Where there is no model, there is no torch."""
        tools = "__init__ validate " + "toy trace xray check ties verdict judge " * (
            "model.py" in self.needs)
        return [*self.needs, *(f"toolbox/{name}.py" for name in tools.split())]


CORE = ["model.py", "request.py", "cache.py"]
LOOK = ("tokens", "positions", "crash")

SETS = {each.number: each for each in [
    Set(1, "Head and cache", 3, [
        Part("a", "attention", ["model.py:Head.forward"], 4),
        Part("b", "the KV cache", ["cache.py:KV.write", "cache.py:KV.read"], 3),
        Part("c", "one request alone", ["generate_unbatched.py:Alone.lay_out",
                                        "generate_unbatched.py:Alone.attend"], 2),
    ], needs=[*CORE, "generate_unbatched.py"], numbers=2, breaks=2, written=2, bugs=[
        "causal rule from the top left", "no causal rule", "scores that are not scaled",
        "keys written at the beginning", "reads all of the cache"], bug_parts="aaabb"),
    Set(2, "Rectangles", 4, [
        Part("a", "the static batch", ["generate_naive.py:StaticBatch.lay_out"], 4),
        Part("b", "the end of a request", ["request.py:Request.append"], 2),
        Part("c", "dynamic admission", ["generate_dynamic.py:admit", "generate_dynamic.py:leave"],
             3),
    ], needs=[*CORE, "generate_naive.py", "generate_dynamic.py"], numbers=2, breaks=2, written=2,
        bugs=["static column positions", "right padding", "one token too many",
              "end of text is overlooked", "more requests than max_batch"], bug_parts="aabbc",
        hidden=("generate_dynamic.py:Rectangle.lay_out",
                "generate_dynamic.py:Rectangle.attend")),
    Set(3, "The scheduler", 4, [
        Part("a", "sharing the budget", ["scheduler.py:Scheduler.share_budget"], 3),
        Part("b", "admission", ["scheduler.py:Scheduler.admit",
                                "scheduler.py:Scheduler.grant_room"], 3),
        Part("c", "after a step", ["request.py:advance", "scheduler.py:Scheduler.release"], 3),
    ], needs=["request.py", "scheduler.py"], numbers=2, breaks=2, written=2, bugs=[
        "prompts before decodes", "the budget is overdrawn", "admits without room",
        "the second overtakes the first", "finished requests stay"], bug_parts="aabbc"),
    Set(4, "The fused rectangle", 5, [
        Part("a", "tokens and positions", ["generate_dynamic.py:Rectangle.lay_out"], 3, LOOK),
        Part("b", "the mask over past and new slots", ["generate_dynamic.py:Rectangle.lay_out"], 4,
             ("sees", "crash")),
        Part("c", "gathering and writing back", ["generate_dynamic.py:Rectangle.attend"], 3),
        Part("d", "which requests get a token", ["generate_dynamic.py:Rectangle.lay_out",
                                                 "request.py:complete"], 2,
             ("sampled", "crash", "counts")),
    ], needs=[*CORE, "scheduler.py", "generate_dynamic.py", "generate_interleaved.py"],
        numbers=3, breaks=3, written=2, bugs=[
        "published mask", "column positions", "pads written to the cache",
        "samples from a partial prefill", "no causal rule in a chunk"], bug_parts="bacdb"),
    Set(5, "No rows", 5, [
        Part("a", "bin packing", ["generate_prepacked.py:first_fit_decreasing"], 2),
        Part("b", "packed rows", ["generate_prepacked.py:Packed.lay_out"], 4),
        Part("c", "the stream and its mask", ["generate_ragged.py:Flat.lay_out",
                                              "generate_ragged.py:Flat.block_diagonal"], 3),
        Part("d", "the varlen loop", ["generate_ragged.py:Flat.attend"], 3),
    ], needs=[*CORE, "scheduler.py", "generate_dynamic.py", "generate_prepacked.py",
              "generate_ragged.py"],
        numbers=3, breaks=3, written=2, bugs=[
        "neighbours in a packed row", "positions that run on in a packed row",
        "a stream without boundaries", "stream positions",
        "first fit without sorting"], bug_parts="bbdca"),
    Set(6, "Pages", 6, [
        Part("a", "holding and giving back", ["paging.py:Pages.hold", "paging.py:Pages.give_back",
                                              "paging.py:Pages.evict"], 2),
        Part("b", "block tables", ["generate_paged.py:Paged.slots",
                                   "generate_paged.py:Paged.write"], 2),
        Part("c", "sharing a prefix", ["paging.py:Pages.find", "paging.py:Pages.publish"], 3),
        Part("d", "preemption", ["paging.py:PagedScheduler.preempt",
                                 "paging.py:PagedScheduler.missing"], 2),
    ], needs=[*CORE, "scheduler.py", "generate_ragged.py", "paging.py", "generate_paged.py"],
        numbers=2, breaks=2, written=2, bugs=[
        "pages read in one piece", "pages known by their own tokens",
        "pages known by one page before", "a preempted request goes to the end",
        "the answer is forgotten"], bug_parts="bccdd"),
]}
