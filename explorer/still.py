"""
Takes the README's still picture of the explorer, from the built page in docs/, with Chromium.

    python -m explorer.still
"""
import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "experiments" / "pictures" / "explorer.png"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT = 840, 960   # as wide as the README is shown


def browser_path():
    """The program of a Chromium or Chrome on this machine, or None."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def open_browser():
    """A headless Chromium, driven by Selenium. It logs console messages and requests."""
    from selenium import webdriver  # only the tests and this command need it
    program, driver = browser_path(), shutil.which("chromedriver")
    options = webdriver.ChromeOptions()
    if program and driver:   # else Selenium finds a browser and a driver by itself
        options.binary_location = program
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--window-size=1400,1000", "--hide-scrollbars", "--disable-background-networking"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(driver) if driver else None)


def resize(browser, width, height):
    """Sets the viewport, in CSS pixels."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def main():
    if not (browser_path() and shutil.which("chromedriver")):
        raise SystemExit("still: needs Chromium and chromedriver on PATH")
    browser = open_browser()
    try:
        resize(browser, WIDTH, HEIGHT)
        browser.get((ROOT / "docs" / "explorer.html").as_uri() + "#theme=light")
        browser.execute_script("visit(DATA.walk.findIndex(({title}) => title === 'flat stream'))")
        browser.save_screenshot(str(PICTURE))
    finally:
        browser.quit()
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
