"""The report in a real Chromium: nothing on its console, a click leads from a curve to tokens, text is never markup."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo_report.build import ReportedRun, build, write_report
from test_agent_report import GIVEN, write_agent_run
from test_agent_report import HOSTILE as HOSTILE_ERROR
from tests.browser.pages import DESK, PHONE, browser, complaints, opened, shot, soon
from tests.unit.recorded_run import HOSTILE, decode, write_run

pytestmark = pytest.mark.browser


def all_of(driver: Any, selector: str) -> list[Any]:
    return list(driver.find_elements("css selector", selector))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    for name, seed in (("first", 0), ("second", 1)):
        write_run(folder / name, 12, every=3, seed=seed)
        (folder / name / "config.toml").write_text(f"[run]\nseed = {seed}\n")
    for names in (("first",), ("first", "second")):
        runs = [ReportedRun(folder / name, decode) for name in names]
        write_report(folder / f"{len(names)}.html", build(runs))
    return folder


def test_the_page_works_on_desktop_and_phone_in_light_and_dark(page: Path, tmp_path: Path) -> None:
    with browser() as driver:
        grounds = set()
        for size in (DESK, PHONE):
            for scheme in ("light", "dark"):
                opened(driver, page / "1.html", size, scheme)
                assert complaints(driver) == []
                width = driver.execute_script("return document.documentElement.scrollWidth")
                assert width == size[0], f"nothing sticks out of a screen of {size[0]} pixels"
                color = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
                grounds.add(color)
                assert shot(driver, tmp_path / f"{size[0]}-{scheme}.png").stat().st_size > 10_000
        assert len(grounds) == 2, "dark is not light"


def test_a_click_on_a_curve_shows_the_rollouts_of_that_step(page: Path) -> None:
    from selenium.webdriver import ActionChains

    with browser() as driver:
        opened(driver, page / "1.html")
        which = driver.find_element("id", "which")
        assert which.text.startswith("step 12:") and len(all_of(driver, "#curves .card")) >= 8
        curve = all_of(driver, "#curves svg")[0]
        left = -int(curve.size["width"] * 0.3)
        ActionChains(driver).move_to_element_with_offset(curve, left, 0).click().perform()
        assert which.text.startswith("step 3:"), which.text
        driver.find_element("id", "after").click()
        assert which.text.startswith("step 6:")
        soon(driver, lambda: driver.current_url.endswith("#0-6"), "the address names the step")
        masked = all_of(driver, ".tokens span.masked")
        assert masked and "masked" in masked[0].get_attribute("title")
        driver.execute_script("arguments[0].click()", masked[0])
        assert re.search(r" age [012] +masked$", driver.find_element("id", "token").text)
        moved = driver.execute_script(
            "return [...document.querySelectorAll('.tokens span')].map(s => s.style.backgroundColor)"
        )
        assert {color.split(",")[0] for color in moved if color}, "tokens have the color of pi - mu"
        driver.find_element("css selector", "#others summary").click()
        soon(driver, lambda: len(all_of(driver, "#others .card")) == 1, "the one metric that no chart has")
        dots = all_of(driver, "#scatter circle")
        before = driver.find_element("id", "token").text
        driver.execute_script(
            "[...document.querySelectorAll('#scatter circle')].forEach(c => c.dispatchEvent(new MouseEvent('click')))"
        )
        assert len(dots) > 50 and driver.find_element("id", "token").text != before
        assert complaints(driver) == []


def test_rollout_text_is_shown_and_never_executed(page: Path) -> None:
    with browser() as driver:
        opened(driver, page / "1.html")
        shown = driver.execute_script("return document.getElementById('responses').textContent")
        assert all(text in shown for text in HOSTILE)
        for node in all_of(driver, ".tokens span"):
            driver.execute_script("arguments[0].click()", node)
        assert driver.execute_script("return window.hacked === undefined")
        assert not all_of(driver, "main img") and not all_of(driver, "main script") and complaints(driver) == []


def test_two_runs_share_curves_and_have_separate_rollouts(page: Path) -> None:
    from selenium.webdriver.support.ui import Select

    with browser() as driver:
        opened(driver, page / "2.html")
        table = driver.find_element("id", "compare").text
        assert "run.seed" in table and "first" in table
        assert all_of(driver, "#curves path.second")
        one = driver.find_element("id", "responses").text
        Select(driver.find_element("id", "run")).select_by_visible_text("second")
        assert driver.find_element("id", "responses").text != one
        soon(driver, lambda: "#1-12" in driver.current_url, "the address names run and step")
        assert complaints(driver) == []


def test_three_runs_have_a_color_each_and_folded_findings(page: Path) -> None:
    names = ("DPPO", "GRPO", "PG-IS")
    folders = [page / "first", page / "second", page / "first"]
    runs = [ReportedRun(folder, decode, name) for folder, name in zip(folders, names, strict=True)]
    write_report(page / "3.html", build(runs))
    with browser() as driver:
        opened(driver, page / "3.html", PHONE)
        assert driver.execute_script("return document.documentElement.scrollWidth") == PHONE[0]
        card = driver.find_element("css selector", "#curves .card")
        paths = card.find_elements("css selector", "path")
        assert len({path.get_attribute("stroke") for path in paths}) == 3
        assert all(name in card.text for name in names)
        summaries = [each.text for each in all_of(driver, "#findings summary")]
        assert [text.partition(":")[0] for text in summaries] == list(names)
        assert not driver.find_element("css selector", "#findings li").is_displayed()
        driver.find_element("css selector", "#findings summary").click()
        assert driver.find_element("css selector", "#findings li").is_displayed()
        driver.find_element("css selector", "#others summary").click()
        soon(driver, lambda: "Masked by other losses" in driver.find_element("id", "others").text, "all other metrics")
        assert complaints(driver) == []


def test_the_page_of_a_running_run_reloads_and_keeps_its_step(page: Path) -> None:
    target = page / "watched.html"
    with browser() as driver:
        write_report(target, build([ReportedRun(page / "first", decode)], refresh=5))
        opened(driver, target)
        driver.find_element("id", "before").click()
        assert driver.find_element("id", "which").text.startswith("step 9:")
        driver.execute_script("window.old = true")
        write_report(target, build([ReportedRun(page / "first", decode)]))  # the last one
        loaded = "return window.old === undefined && document.documentElement.dataset.ready === 'yes'"
        soon(driver, lambda: driver.execute_script(loaded), "the page loads itself again")
        assert driver.find_element("id", "which").text.startswith("step 9:") and complaints(driver) == []


def test_an_episode_is_a_conversation_with_its_segments_and_failure(tmp_path: Path) -> None:
    run = write_agent_run(tmp_path / "run")
    write_report(tmp_path / "agents.html", build([ReportedRun(run, decode)]))
    with browser() as driver:
        for size in (DESK, PHONE):
            opened(driver, tmp_path / "agents.html", size)
            assert driver.execute_script("return document.documentElement.scrollWidth") == size[0]
            boxes = {each.text.split()[1]: each for each in all_of(driver, ".response")}
            heads = [each.text for each in boxes["0"].find_elements("css selector", ".turn .head")]
            assert [head.split("  ")[0] for head in heads] == ["segment 1 of 2"] * 4 + ["segment 2 of 2"] * 2
            assert ["policy" in head for head in heads] == [False, True] * 3 and "1 not trained on" in heads[1]
            assert "program, tools and template" in heads[0] and "format 1" in boxes["0"].text
            assert len(boxes["0"].find_elements("css selector", ".tokens span")) == len(GIVEN)
            assert boxes["1"].find_element("css selector", ".failure").text == HOSTILE_ERROR
            assert not boxes["2"].find_elements("css selector", ".turn")
            agents = driver.find_element("id", "agents").text
            assert "episodes failed" in agents and HOSTILE_ERROR.split("\n")[0] in agents
            assert driver.execute_script("return window.hacked === undefined") and complaints(driver) == []
        assert shot(driver, tmp_path / "episode.png", ".response").stat().st_size > 5_000
