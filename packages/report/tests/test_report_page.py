"""The report as a file: text of rollouts stays data, findings name what is wrong, bad input is told. A browser shows
the page itself in tests/browser."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.commands.main import main
from megatron_dppo.errors import ConfigError, DataError
from megatron_dppo.report.findings import findings
from megatron_dppo_report.build import ReportedRun, build, write_report
from tests.unit.recorded_run import HOSTILE, decode, write_run


class _Scripts(HTMLParser):
    """The scripts of a page, as a browser finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.found.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.found and self.lasttag == "script":
            self.found[-1] = (self.found[-1][0], self.found[-1][1] + data)


def scripts(page: str) -> dict[str, Any]:
    parser = _Scripts()
    parser.feed(page)
    assert "img" not in parser.tags
    programs = [text for attributes, text in parser.found if attributes.get("type") != "application/json"]
    assert len(programs) == 1 and not any("src" in attributes for attributes, _ in parser.found)
    return {str(a["id"]): json.loads(text) for a, text in parser.found if a.get("type") == "application/json"}


def test_rollout_text_cannot_close_its_element_and_is_preserved(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 3)
    page = build([ReportedRun(tmp_path / "run", decode)])
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    result = scripts(page)
    assert sorted(result) == ["data", "step-0-1", "step-0-2", "step-0-3"]
    view = result["step-0-2"]
    assert set(HOSTILE) <= set(view["vocabulary"])
    assert view["responses"][0]["label"] == HOSTILE[1] and view["samples"] == 16
    assert result["data"]["runs"][0]["recorded"] == [1, 2, 3]
    assert view["maskedTokens"] >= sum(each["count"] for each in view["masked"]) > 0
    # The page's program makes text of it, never markup.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", page)


def test_the_page_stays_small_with_many_long_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dppo_report.steps.PAGE_TOKENS", 4000)
    write_run(tmp_path / "run", 100, every=20, tokens=600)
    page = build([ReportedRun(tmp_path / "run", None)])
    view = scripts(page)["step-0-20"]
    assert sum(len(response["ids"]) for response in view["responses"]) <= 4000 / 5
    assert view["vocabulary"][0].startswith("[") and any(response["cut"] != [0, 0] for response in view["responses"])


def record(step: int, **values: float) -> dict[str, float]:
    return {"step": step, **{name.replace("__", "/"): value for name, value in values.items()}}


def about(records: list[dict[str, float]]) -> str:
    return " ".join(f"{each.level}: {each.text} ({each.suggestion})" for each in findings(records))


def test_findings_distinguish_falling_constant_and_rising_rewards() -> None:
    noise = [0.01, -0.01, 0.0] * 20
    rise = [record(i, rollout__reward=i / 60 + noise[i]) for i in range(60)]
    assert "good: The reward rose" in about(rise) and "bad" not in about(rise)
    flat = [record(i, rollout__reward=0.4 + noise[i]) for i in range(60)]
    assert "look: The reward has hardly changed" in about(flat)
    fall = [record(i, rollout__reward=min(i, 30) / 30 - max(0, i - 30) / 35) for i in range(60)]
    assert "bad: The reward fell" in about(fall) and "optimizer.lr" in about(fall)
    same = [record(i, rollout__reward=0.0) for i in range(60)]
    assert "bad: The reward is 0 in every step" in about(same)


def test_findings_name_masked_tokens_and_the_source_of_a_mismatch() -> None:
    masked = [{"text": "</answer>", "sign": 1, "count": 9}, {"text": "the", "sign": 1, "count": 3}]
    assert "75% of the masked tokens with a positive advantage are '</answer>'" in str(findings([], masked))
    far = [
        record(i, train__abs_prob_diff=0.02, train__abs_prob_diff_first=0.018, train__mask_fraction=0.3)
        for i in range(9)
    ]
    assert "diagnose" in about(far) and "30% of the tokens" in about(far)
    failing = [record(1, rollout__reward_failed_fraction=0.5)]
    assert about(failing).startswith("bad: The reward function failed for 50%")


def test_two_runs_share_a_page_that_lists_their_differences(tmp_path: Path) -> None:
    for name, rate in (("a", 1), ("b", 2)):
        write_run(tmp_path / name, 2, seed=rate)
        (tmp_path / name / "config.toml").write_text(f"[optimizer]\nlr = {rate}.0\n[loss]\nname = 'grpo'\n")
    ledger = {"causes": {"staleness": {"part": 0.5, "share": 1.0}}, "not_separated": {"head": "x"}, "mean_abs": 0.5}
    (tmp_path / "ledger.json").write_text(json.dumps({**ledger, "tokens": 9}))
    runs = [ReportedRun(tmp_path / name, decode) for name in ("a", "b")]
    data = scripts(build(runs, ledger=tmp_path / "ledger.json"))["data"]
    assert data["differences"] == [["optimizer.lr", "1.0", "2.0"]]
    assert data["ledger"]["rows"] == [["staleness", 0.5, 1.0]] and len(data["runs"]) == 2
    with pytest.raises(DataError, match="is not a ledger"):
        build(runs, ledger=tmp_path / "a/metrics.jsonl")


def test_three_runs_share_a_page_under_their_given_names(tmp_path: Path) -> None:
    for name, keys in (("a", "lr = 1.0"), ("b", "lr = 1.0\nbeta = 2"), ("c", "lr = 3.0")):
        write_run(tmp_path / name, 2)
        (tmp_path / name / "config.toml").write_text(f"[optimizer]\n{keys}\n")
    runs = [ReportedRun(tmp_path / name, decode, title) for name, title in (("a", "A & co"), ("b", ""), ("c", "last"))]
    page = build(runs)
    assert "<title>A &amp; co, b and last</title>" in page
    elements = scripts(page)
    # A setting that only one of three runs has, and one that only the third changes.
    assert elements["data"]["differences"] == [["optimizer.beta", "-", "2", "-"], ["optimizer.lr", "1.0", "1.0", "3.0"]]
    assert [run["name"] for run in elements["data"]["runs"]] == ["A & co", "b", "last"]
    assert {"step-0-1", "step-1-1", "step-2-2"} <= set(elements)


def test_waiting_for_rollouts_is_compared_with_all_steps() -> None:
    """With staleness only the first step has a rollout time, which says nothing about the others."""
    first = record(1, perf__rollout_seconds=9.0, perf__step_seconds=10.0, rollout__reward=0.1)
    stale = [record(i, perf__step_seconds=2.0, rollout__reward=0.1) for i in range(2, 40)]
    assert "waits for rollouts" not in about([first, *stale])
    waiting = [record(i, perf__rollout_seconds=6.0, perf__step_seconds=8.0, rollout__reward=0.1) for i in range(9)]
    assert "waits for rollouts during 75% of a step" in about(waiting)


def test_a_folder_without_records_and_a_foreign_file_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl"):
        build([ReportedRun(tmp_path, None)])
    mine = tmp_path / "mine.html"
    mine.write_text("<html>my page</html>")
    with pytest.raises(ConfigError, match="is not a report"):
        write_report(mine, "x")
    assert mine.read_text() == "<html>my page</html>"
    assert main(["report", str(tmp_path / "nothing")]) != 0
    assert "is not a folder" in capsys.readouterr().err
    write_run(tmp_path / "run", 2, every=9)
    assert main(["report", str(tmp_path / "run"), "--wach"]) != 0
    assert "unknown argument '--wach'" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "run"), "--watch"]) == 0, "a finished run is written once"
    assert main(["report", str(tmp_path / "run")]) == 0, "our own file is replaced"
    assert "curves only" in capsys.readouterr().out
    assert "megatron-dppo report" in (tmp_path / "run/report.html").read_text()[:400]


@pytest.mark.slow
def test_watch_rewrites_the_page_until_the_run_ends(tmp_path: Path) -> None:
    run, page = tmp_path / "run", tmp_path / "run/report.html"
    write_run(run, 2, every=9)
    (run / "summary.json").unlink()
    command = [sys.executable, "-m", "megatron_dppo.commands.main", "report", str(run), "--watch", "1"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:

        def wait_for(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 120
            while not condition():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)

        try:
            wait_for(page.is_file)
            assert scripts(page.read_text())["data"]["refresh"] == 1
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 77, "rollout/reward": 0.5}) + "\n")
            wait_for(lambda: '"last":77' in page.read_text())
            (run / "summary.json").write_text("{}")
            assert process.wait(120) == 0
        finally:
            process.kill()
    data = scripts(page.read_text())["data"]
    assert data["refresh"] == 0 and data["runs"][0]["finished"], "the last page does not load itself again"
