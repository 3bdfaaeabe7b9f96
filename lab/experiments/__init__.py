"""Commands that measure and compare the stages, and the results and pictures that they produced."""
import sys

if sys.argv[:1] == ["-m"]:   # Python is about to run a module, in front of whose flags it stands
    asked = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    if asked not in (__name__, f"{__name__}.__main__"):   # it would do nothing, and say nothing
        print(f"{asked} is not a command; python -m {__name__} lists what is", file=sys.stderr)
        sys.exit(2)
