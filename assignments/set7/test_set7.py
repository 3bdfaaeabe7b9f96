"""Set 7: which page went missing? Each student gets paging with one planted bug."""
import random
import zlib

import pytest
import set7.audit
from breaks import bugs_of, handed_in, in_repository, inserted
from isolate import Fault
from kit import Example, books, difference

from paging import Pages

FILES = "paging.py scheduler.py request.py set7/audit.py"
points = pytest.mark.points
CALLS = "allocate", "hold", "give_back", "publish", "find"


def planted(student):
    """The bug that this student gets: one of those with a shortest sequence of calls."""
    bugs = [bug for bug in bugs_of(7) if bug["most"]]
    return bugs[zlib.crc32(f"set 7 {student}".encode()) % len(bugs)]


def personal(files, student, edited):
    """What differs between copies. edited(text, edits): our text with a bug in it."""
    return {"paging.py": edited(files["paging.py"], planted(student)["edits"])}


def audits(rng, operations=120):
    """Random operations on the books of a pool; after each, what the auditor says."""
    pages, tables = Pages(8, 2), []
    for _ in range(operations):
        try:
            if tables and (rng.random() < 0.45 or len(pages.free) < 3):
                pages.give_back(tables.pop(rng.randrange(len(tables))))
            else:
                tokens = [rng.randrange(2) for _ in range(6)]
                shared, table = pages.find(tokens[:-1]), []
                known, revived = len(shared), sum(page in pages.free for page in shared)
                if 3 - known > len(pages.free) - revived:
                    continue
                pages.hold(table, shared)
                pages.allocate(table, 3 - known)
                for i in range(known, 3):
                    pages.publish(table, i, tokens[2 * i:2 * i + 2])
                tables.append(table)
        except (KeyError, IndexError):   # a bug has gone too far for the books to go on
            return
        yield [list(table) for table in tables], set7.audit.audit(
            pages, [list(table) for table in tables])


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


@points(3, *(f"paging.py:Pages.{name}" for name in CALLS), title="the mend", given=True)
class Test7b(Example):
    def test_the_books(self, part):
        part.compare(books, part.rng, [(8, 2, 40)] * 6)
        part.compare(books, part.rng, [(60, 2, 150)])
        part.compare(outcomes, [bug["calls"] for bug in bugs_of(7) if bug["most"]])


def outcome(calls):
    """What a sequence of calls shows, on a pool of 3 pages of one token. Fault for a bad one."""
    pages, tables, shown = Pages(3, 1), {}, []
    for call in calls:
        if not isinstance(call, list) or not call or call[0] not in CALLS:
            raise Fault(f"{call!r} is not a call: it begins with one of {', '.join(CALLS)}")
        name, *arguments = call
        if name != "find":
            arguments[0] = tables.setdefault(arguments[0], [])
        returned = getattr(pages, name)(*arguments)
        if name == "give_back":
            arguments[0].clear()
        shown.append({"call": call, "returns": returned, "tables": {
            name: list(table) for name, table in tables.items()},
            "free, in order": list(pages.free), "holders": list(pages.holders),
            "published": sorted(pages.published.values())})
    return shown


def outcomes(cases):
    for calls in cases:
        try:
            shown = outcome(calls)
        except (KeyError, IndexError, TypeError) as error:
            shown = f"raises {type(error).__name__}"
        yield f"the calls {calls}", shown


@points(2, title="the shortest sequence of calls")
def test_7_calls(submission, student, record_property):
    """calls.json shows the planted bug: ours with the bug and without it differ."""
    if in_repository(submission):
        pytest.skip("the repository hands nothing in")
    calls, bug = handed_in(submission, "calls.json", 7, "calls"), planted(student)
    if not isinstance(calls, list):
        raise Fault("calls is not a list")
    try:
        right = outcome(calls)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Fault(f"the right code raises {type(error).__name__}: {error}") from None
    with inserted(bug):
        (_, wrong), = outcomes([calls])
    if wrong == right:
        raise Fault("right and wrong code both end with " + str(right[-1:] or "nothing"))
    says = "raises an error" if isinstance(wrong, str) else next(
        f"after call {i}, {difference(b, a)}" for i, (a, b) in enumerate(zip(right, wrong))
        if a != b)
    if len(calls) > bug["most"]:
        raise Fault(f"with the bug, {says}; but {bug['most']} calls are enough, not {len(calls)}")
    record_property("says", f"with the bug, {says}")
