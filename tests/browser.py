"""A headless Chromium, driven by Selenium."""
import shutil


def open_browser():
    """It logs console messages."""
    from selenium import webdriver
    program, driver = (next(filter(None, map(shutil.which, names)), None) for names in (
        ("chromium", "chromium-browser", "google-chrome", "chrome"), ("chromedriver",)))
    assert program and driver, "there is no Chromium with a chromedriver on PATH"
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--window-size=1400,1000", "--hide-scrollbars", "--disable-background-networking",
                 "--disable-ipc-flooding-protection"):   # many addresses in a second
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(driver))


def resize(browser, width, height):
    """Sets the viewport, in CSS pixels, and waits until the page has been told and has drawn."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_async_script("""
        const [width, done] = arguments, told = () => innerWidth === width
          ? requestAnimationFrame(() => requestAnimationFrame(done)) : requestAnimationFrame(told);
        told();""", width)
