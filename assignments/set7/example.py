"""The handout's worked example. It prints its docstring: `pytest set7 -k example -s`."""
from paging import Pages


def part_b():
    """
    A [0, 1]  free 2
    B [0, 2]  free none
    after give_back of A: free 1, find [0]
    """
    pages, a, b = Pages(3, 1), [], []
    pages.allocate(a, 2)
    pages.publish(a, 0, [5])
    print("A", a, " free", *pages.free)
    pages.hold(b, pages.find([5]))
    pages.allocate(b, 1)
    print("B", b, " free", *pages.free or ["none"])
    pages.give_back(a)
    print(f"after give_back of A: free {[*pages.free][0]}, find {pages.find([5, 9])}")
