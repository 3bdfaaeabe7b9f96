"""Every page that is made here, as axe-core sees it: contrast, names, roles, light and dark."""
import pytest
from axe_core_python.selenium import Axe
from browser import resize
from common import ROOT, STAGES, mixed, toy

from lab.explorer import page
from lab.explorer.recorder import record
from lab.loading.load import load

EXPLORER = (ROOT / "docs" / "explorer.html").as_uri()
LOOKS = [(theme, width) for theme in ("light", "dark") for width in (1280, 390, 320)]


def faults(chrome):
    """What axe-core calls serious or critical, and what lies in no landmark."""
    found = {}
    for theme, width in LOOKS:
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {
            "features": [{"name": "prefers-color-scheme", "value": theme}]})
        resize(chrome, width, 900)
        chrome.execute_script("""return Promise.allSettled(
            document.getAnimations().map(({finished}) => finished))""")   # colours on their way
        for each in Axe().run(chrome)["violations"]:
            if each["impact"] in ("serious", "critical") or each["id"] == "region":
                found[each["id"], theme, width] = [node["html"][:90] for node in each["nodes"]]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    return found


@pytest.mark.parametrize("place", [
    "", "#run=naive&beside=paged&step=30", "#stop=5&all=1", "#stop=9",
    "#own=24-40_60-24_220-30-0-1_232-24-0-1&memory=512"])
def test_the_explorer(chrome, place):
    chrome.get("about:blank")   # else only the hash changes
    chrome.get(EXPLORER + place)
    assert faults(chrome) == {}


def test_the_page_of_a_run(chrome, tmp_path):
    model = toy()
    trace = record(STAGES["paged"], model, mixed(), model)
    page.write(path := tmp_path / "run.html", page.data_of({"paged": trace}, load()[1]))
    chrome.get(path.as_uri())
    assert faults(chrome) == {}


def test_the_live_page(chrome):
    pytest.importorskip("fastapi")
    from test_server import serving
    with serving() as running:
        chrome.get(running.url)
        running.until(lambda: chrome.execute_script("return hello && $('first')"))
        assert faults(chrome) == {}
        chrome.execute_script("$('first').click()")
        running.until(lambda: chrome.execute_script("return view !== null"))
        chrome.execute_script("$('speed').value = 0; $('speed').onchange()")
        running.until(lambda: chrome.execute_script(
            "return [...requests.values()].every(({reason}) => reason)"))
        assert faults(chrome) == {}
        chrome.get("about:blank")   # before the server stops: it would ask for it again and again
