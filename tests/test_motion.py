"""The README's moving picture: what it draws is what the traces say."""
import re
from xml.etree import ElementTree

import pytest

from experiments import motion


@pytest.fixture(scope="module")
def traces():
    return {stage: motion.run(stage) for stage in motion.PANELS}


@pytest.mark.parametrize("theme", motion.THEMES)
def test_the_picture_has_every_token_and_the_longest_wait(traces, theme):
    text = motion.picture(traces, motion.THEMES[theme])
    ElementTree.fromstring(text)   # well-formed
    ticks = len(re.findall(r"M[\d.]+ \d+v10", text))
    assert ticks == sum(len(r.generated) for trace in traces.values() for r in trace.requests)
    stalled, flowing = (1e3 * max(motion.gaps(trace))[0] for trace in traces.values())
    assert stalled > 5 * flowing and text.count("no token for") == 1
    assert f"no token for {stalled:.0f} ms" in text and f"and {flowing:.0f} ms." in text


def test_the_committed_picture_is_what_the_command_draws(traces):
    """If it is not: python -m experiments.motion"""
    for name, theme in motion.THEMES.items():
        path = motion.FOLDER / f"motion-{name}.svg"
        assert path.read_text(encoding="utf-8") == motion.picture(traces, theme)
