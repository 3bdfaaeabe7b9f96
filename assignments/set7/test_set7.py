"""Set 7: which page went missing? Each student gets paging with one planted bug."""
import random
import zlib

import pytest
import set7.audit
from answers import bugs_of, handed_in, inserted
from isolate import Fault
from kit import Checks, chain, difference, operations, pools

from generate_prefix import PrefixPages

FILES = ("model.py request.py cache.py scheduler.py generate_ragged.py paging.py generate_paged.py "
         "generate_prefix.py set7/audit.py")
points = pytest.mark.points
CALLS = "allocate", "share", "free", "cache", "find"


def planted(student):
    """The bug that this student gets: one of those with a shortest sequence of calls."""
    bugs = [bug for bug in bugs_of(7) if bug["most"]]
    return bugs[zlib.crc32(f"set 7 {student}".encode()) % len(bugs)]


def personal(files, student, edited):
    """What differs between copies. edited(text, edits): our text with a bug in it."""
    return {"generate_prefix.py": edited(files["generate_prefix.py"], planted(student)["edits"]),
            "set7/calls.json": '{"calls": []}\n'}


def audits(rng):
    """What the auditor says after each of 120 random operations on a pool."""
    pages = PrefixPages(8, 2)
    try:
        for _, held in operations(pages, rng, 120):
            tables = [list(table) for table, _ in held]
            yield tables, set7.audit.audit(pages, tables)
    except (KeyError, IndexError):   # a bug has gone too far to go on
        return


@points(4, "set7/audit.py:audit", title="the auditor: bugs that it finds")
@pytest.mark.parametrize("number", range(9))
def test_7_audit(part, number):
    with part.theirs():
        for seed in range(3 if part.hidden else 1):
            rng = random.Random(f"{part.rng.random()} {seed}")
            for tables, said in audits(rng):
                if said:
                    raise Fault(f"a false alarm: nothing is wrong, but it says {list(said)[0]!r}; "
                                f"tables {tables}")
        bug = bugs_of(7)[number]
        with inserted(bug):
            if not any(said for seed in range(5) for _, said in audits(random.Random(seed))):
                raise Fault(f"it does not find bug {number}: {bug['says']}")


@points(3, *(f"generate_prefix.py:PrefixPages.{name}" for name in CALLS), title="the mend",
        given=True)
class Test7b(Checks):
    def test_pools(self, part):
        part.compare(pools, part.rng, [(8, 2, 40)] * 6)
        part.compare(pools, part.rng, [(60, 2, 150)])
        part.compare(outcomes, [bug["calls"] for bug in bugs_of(7) if bug["most"]])


def outcome(calls):
    """What a sequence of calls shows, on a pool of 3 pages of one token, or what it raises."""
    pages, tables, shown = PrefixPages(3, 1), {}, []
    try:
        for name, *arguments in calls:
            if name not in CALLS:
                return f"{name!r} is not one of {', '.join(CALLS)}"
            if name == "find":        # the hashes of these tokens
                arguments = [chain(arguments[0], 1)]
            elif name == "cache":     # a page, and all tokens up to its end
                arguments[1] = chain(arguments[1], 1)[-1]
            else:
                arguments[0] = tables.setdefault(arguments[0], [])
            returned = getattr(pages, name)(*arguments)
            if name == "free":
                arguments[0].clear()
            shown.append({"call": name, "returns": returned, "tables": {
                name: list(table) for name, table in tables.items()},
                "free_queue": list(pages.free_queue), "ref_count": list(pages.ref_count),
                "cached": sorted(pages.cached.values())})
        return shown
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        return f"raises {type(error).__name__}: {error}"


def outcomes(cases):
    for calls in cases:
        yield f"the calls {calls}", outcome(calls)


@points(2, title="the shortest sequence of calls")
def test_7_calls(submission, student, record_property):
    """calls.json shows the planted bug: ours with the bug and without it differ."""
    calls, bug = handed_in(submission, "calls.json", 7, "calls"), planted(student)
    right = outcome(calls)
    if isinstance(right, str):
        raise Fault(f"with the right code: {right}")
    with inserted(bug):
        wrong = outcome(calls)
    if wrong == right:
        raise Fault("right and wrong code both end with " + str(right[-1:] or "nothing"))
    says = wrong if isinstance(wrong, str) else next(
        f"after call {i}, {difference(b, a)}" for i, (a, b) in enumerate(zip(right, wrong))
        if a != b)
    if len(calls) > bug["most"]:
        raise Fault(f"with the bug, {says}; but {bug['most']} calls are enough, not {len(calls)}")
    record_property("says", f"with the bug, {says}")
