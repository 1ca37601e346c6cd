"""The documentation site (``make docs``) in a real Chromium: formulas, diagrams, search, no other host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.pages import DESK, PHONE, browser, complaints, look, soon

pytestmark = pytest.mark.browser
SITE = Path(__file__).parents[2] / "site"
FORMULAS = """return [...document.querySelectorAll('.arithmatex')].map(
    node => node.querySelector('mjx-container svg')?.getBoundingClientRect().width || 0)"""
DIAGRAMS = "return [...document.querySelectorAll('div.diagram svg')].map(node => node.getBoundingClientRect().width)"


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if not (SITE / "index.html").is_file():
        pytest.skip("make docs has not built the site here")


def show(driver: Any, page: str, size: tuple[int, int], scheme: str) -> None:
    look(driver, size, scheme)
    driver.get((SITE / page).as_uri())
    # The theme remembers the scheme of an earlier page.
    driver.execute_script("localStorage.clear()")
    driver.refresh()


def test_no_page_loads_from_another_host() -> None:
    pages = list(SITE.rglob("*.html"))
    loads = r"<(?:script|img|link|iframe)[^>]* (?:src|href)=\"?(https?:[^\" >]+)"
    wrong = {link for page in pages for link in re.findall(loads, page.read_text(encoding="utf-8"))}
    # The address of the page itself is no load.
    assert len(pages) > 50 and not wrong


def test_formulas_and_diagrams_are_drawn_on_desktop_and_phone() -> None:
    with browser() as driver:
        for size, scheme in ((DESK, "light"), (PHONE, "dark")):
            show(driver, "loss.html", size, scheme)
            soon(driver, lambda: min(driver.execute_script(FORMULAS) or [0]) > 20, "every formula has a width")
            assert len(driver.execute_script(FORMULAS)) >= 4
            for page in ("architecture.html", "two_nodes.html"):
                show(driver, page, size, scheme)
                soon(driver, lambda: min(driver.execute_script(DIAGRAMS) or [0]) > 200, f"the diagram of {page}")
                assert driver.execute_script("return document.documentElement.scrollWidth") == size[0]
            assert complaints(driver) == []


def test_the_home_page_fits_and_can_be_searched() -> None:
    with browser() as driver:
        show(driver, "index.html", DESK, "light")
        output = driver.find_element("xpath", "//code[contains(., 'held-out score before training')]")
        assert output.rect["y"] + output.rect["height"] <= DESK[1], "install line, picture, settings and output"
        assert "Version 0.1" in driver.find_element("css selector", "article").text
        assert "megatron_dppo 0.1" in driver.find_element("css selector", "footer").text
        box = driver.find_element("css selector", ".md-search__input")
        box.send_keys("staleness")
        soon(driver, lambda: driver.find_elements("css selector", ".md-search-result__item"), "search finds pages")
        assert complaints(driver) == []
