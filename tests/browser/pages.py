"""A real Chromium without a window, and what its console said. ``tools/install_chromium.sh`` installs it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PHONE, DESK = (390, 844), (1280, 900)


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium by Debian's driver of the same version; the test is left out, and says so, where there is none."""
    programs = [shutil.which("chromium"), shutil.which("chromedriver")]
    if None in programs:
        pytest.skip("no chromium and chromedriver here: tools/install_chromium.sh installs them on Debian")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(programs[0])
    # Root has no sandbox; the page loads nothing and is our own.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(programs[1])))
    try:
        yield driver
    finally:
        driver.quit()


def opened(driver: Any, file: Path, size: tuple[int, int] = DESK, scheme: str = "light") -> None:
    """Show a file as on a screen of that size, until its program has run."""
    from selenium.webdriver.support.ui import WebDriverWait

    look(driver, size, scheme)
    driver.get(file.resolve().as_uri())
    WebDriverWait(driver, 120).until(
        lambda d: d.execute_script("return document.documentElement.dataset.ready") == "yes",
        message=str(driver.get_log("browser")),
    )


def soon(driver: Any, condition: Callable[[], object], message: str) -> None:
    """Wait for what the page does after an event of its own; a busy machine takes its time.

    Raises:
        TimeoutException: it does not.
    """
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, 120).until(lambda _: condition(), message=message)


def look(driver: Any, size: tuple[int, int], scheme: str) -> None:
    """The size of the screen, and ``light`` or ``dark``."""
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", features)


def complaints(driver: Any) -> list[str]:
    """Return the console's messages since the last call: errors, warnings and refused loads."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] != "INFO"]


def shot(driver: Any, target: Path, element: str | None = None) -> Path:
    """A picture of the visible part, or of an element (CSS selector)."""
    if element is None:
        driver.save_screenshot(str(target))
    else:
        driver.find_element("css selector", element).screenshot(str(target))
    return target
