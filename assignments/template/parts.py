"""One test for each part. What is wrong is said in a sentence; -s shows what your code prints."""
import json
from pathlib import Path

import pytest
from kit.compare import ask, fault

HERE = Path(__file__).resolve().parent
SET = json.loads((HERE / "kit/cases.json").read_text("utf-8"))


def own(file, line):
    """A file of an error's way in this folder, as it is called here; None if it is the kit's."""
    name = Path(file).relative_to(HERE).as_posix() if HERE in Path(file).parents else ""
    return None if name.startswith(("kit/", "toolbox/")) else name


@pytest.mark.parametrize("part", [f"{SET['set']}{part}" for part in SET["parts"]])
def test_part(part):
    record = SET["parts"][part[1:]]
    said = ask(HERE, record["cases"], SET["seconds"], SET["gigabytes"], quiet=False)
    if said := fault(record, *said, own):
        pytest.fail(said, pytrace=False)
