"""
Two sizes: `pytest` is quick, `pytest --thorough` runs everything, with more examples, and looks at
pages in a browser.
"""
import functools
import gc
import os
import ssl
import sys
from pathlib import Path

import pytest
import torch
from browser import open_browser

sys.path.insert(0, str(Path(__file__).parent.parent))   # the modules lie at the top level
gc.disable()   # while all is imported, which is no garbage: a third of that time
# One thread for the tests and for all that they start. The models are tiny, and the threads of two
# programs that wait for each other spin on the same cores.
os.environ["OMP_NUM_THREADS"] = "1"
# Triton reads this when it is imported, which another test's packages may do first.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Each client of a server reads all certificates of the machine, for a tenth of a second.
ssl.create_default_context = functools.cache(ssl.create_default_context)


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true",
                     help="everything: all examples, slow tests, native.cpp under sanitizers")


def pytest_configure(config):
    config.addinivalue_line("markers", "thorough: runs with --thorough only")
    if config.getoption("dist", "no") == "load":   # -n: a worker keeps what a file has made,
        config.option.dist = "worksteal"           # and takes from others when it has no more
    if config.getoption("--thorough"):
        os.environ["THOROUGH"] = "1"   # read by common.examples, at import; workers inherit it


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--thorough"):
        for item in items:
            if item.get_closest_marker("thorough") or "chrome" in item.fixturenames:
                item.add_marker(pytest.mark.skip(reason="runs with --thorough"))


def pytest_collection_finish():
    gc.freeze()   # nor later on: no collection of garbage looks at it again
    gc.enable()


@pytest.fixture(scope="session")
def javascript():
    """A browser that runs a script."""
    try:
        browser = open_browser()
    except Exception as why:   # one of them is missing, or they differ in version
        must = os.environ.get("CI") and sys.platform == "linux"
        (pytest.fail if must else pytest.skip)(f"no browser to test the explorer in: {why}")
    browser.set_script_timeout(600)   # a busy machine is no fault of the page
    browser.set_page_load_timeout(600)
    yield browser
    browser.quit()


@pytest.fixture(scope="session")
def chrome(javascript):
    """The same, for a test that looks at a page. It runs with --thorough only."""
    return javascript
