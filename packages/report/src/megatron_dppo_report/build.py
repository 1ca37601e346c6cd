"""The HTML report of one or more runs: a single file with data, style and program.

Text of rollouts is data, never markup. It is JSON in which no character can close the enclosing element, and the page's
program creates text nodes from it.
"""

import html
import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from megatron_dppo.errors import ConfigError, DataError
from megatron_dppo.files import disk_errors, read_regular_file, write_synced
from megatron_dppo.report.findings import findings
from megatron_dppo.report.records import Record, read_metrics
from megatron_dppo.report.steps.files import recorded_steps
from megatron_dppo.report.steps.tokens import Decode, read_tokens
from megatron_dppo.setup.contents import flatten
from megatron_dppo_report.agents import FailureCounts, agent_view
from megatron_dppo_report.charts import build_charts, remaining_charts
from megatron_dppo_report.masks import MaskCounts, OtherMasks
from megatron_dppo_report.steps import step_budget, step_view

FILE = "report.html"
_FORMAT = 1


class ReportedRun(NamedTuple):
    """A run in a report."""

    folder: Path
    decode: Decode | None
    """Function that decodes token ids. None shows ids, if there is no tokenizer."""
    name: str = ""
    """Name on the page. Empty uses the name of the folder."""
    cap: float = math.inf
    """Cap C of the loss's weight min(r, C)."""
    other_masks: OtherMasks | None = None
    """Decisions of other losses on the tokens of a step. None leaves them out."""

    @property
    def title(self) -> str:
        """Name on the page."""
        return self.name or self.folder.resolve().name


def build(runs: Sequence[ReportedRun], *, ledger: Path | None = None, refresh: float = 0) -> str:
    """Return the page.

    ``ledger`` is a file of ``megatron-dppo diagnose --json`` for the first run. The page reloads itself every
    ``refresh`` seconds, with 0 never.
    """
    steps: list[str] = []
    views: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        records = read_metrics(run.folder / "metrics.jsonl")
        if not records:
            raise ConfigError(
                f"expected the output folder of a run, but {str(run.folder)!r} has no metrics.jsonl with records"
            )
        recorded = recorded_steps(run.folder)
        masked: list[Record] = []
        counts = MaskCounts()
        failures = FailureCounts()
        for step, file in recorded.items():
            tokens = read_tokens(file)
            counts.add(tokens, run.decode, run.cap, run.other_masks)
            view = step_view(tokens, run.decode, step_budget(len(runs), len(recorded)))
            masked += view["masked"]
            failures.add(step, tokens.rows)
            steps.append(_element(f"step-{index}-{step}", view))
        run_view = _run_view(run, records, list(recorded), masked)
        views.append({**run_view, "masks": counts.view(), "agents": agent_view(records, failures)})
    data = {
        "format": _FORMAT,
        "runs": views,
        "differences": _differences([view.pop("config") for view in views]),
        "ledger": None if ledger is None else _ledger(ledger),
        "refresh": refresh,
    }
    parts = {name: files("megatron_dppo_report").joinpath(name).read_text("utf-8") for name in _PARTS}
    *before, last = [run.title for run in runs]
    title = f"{', '.join(before)} and {last}" if before else last
    # Insert data and program by partition, not by replace: the data may contain the placeholders.
    page = (
        parts["page.html"]
        .replace("%TITLE%", html.escape(title, quote=False).replace("%", "&#37;"))
        .replace("%STYLE%", parts["page.css"])
    )
    head, _, tail = page.partition("%DATA%")
    between, _, end = tail.partition("%PROGRAM%")
    program = "\n".join(parts[name] for name in _PARTS if name.endswith(".js"))
    return "".join([head, _element("data", data), *steps, between, program, end])


_PARTS = ("page.html", "page.css", "charts.js", "tokens.js", "page.js")


def check_target(target: Path) -> None:
    """Check that a report can be written there; only an existing report may be overwritten."""
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"{str(target)!r} is in a folder that does not exist; choose another file")
    if os.path.lexists(target):
        begin = b""
        if target.is_file():
            with disk_errors(target, "the report"), target.open("rb") as file:
                begin = file.read(_BEGIN)
        if _MARK.encode() not in begin:
            raise ConfigError(f"{str(target)!r} exists and is not a report; choose another file with --output")


def write_report(target: Path, text: str) -> None:
    """Replace the file atomically; a file that is not a report is kept."""
    check_target(target)
    with disk_errors(target, "the report"):
        write_synced(target, text)


_MARK = "megatron-dppo report"
_BEGIN = 400
"""Bytes at the start of a report that contain the mark."""


def _element(name: str, value: object) -> str:
    """Return JSON as an element of the page. ``<`` and ``&`` are escaped, so no part of it is a tag or a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    text = text.encode("utf-8", "replace").decode("utf-8")  # UTF-8 cannot encode half of a surrogate pair.
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def _run_view(
    run: ReportedRun, records: Sequence[Record], recorded: list[int], masked: Sequence[Record]
) -> dict[str, Any]:
    config = _config(run.folder)
    summary = run.folder / "summary.json"
    return {
        "name": run.title,
        "loss": config.get("loss.name", ""),
        "records": len(records),
        "last": max(record["step"] for record in records),
        "planned": config.get("run.num_steps"),
        "finished": summary.is_file(),
        "charts": build_charts(records),
        "others": remaining_charts(records),
        "recorded": recorded,
        "findings": [finding._asdict() for finding in findings(records, masked)],
        "config": config,
    }


def _config(folder: Path) -> dict[str, object]:
    """Return the run's configuration by ``section.key``; empty if the folder has none."""
    try:
        values = tomllib.loads(read_regular_file(folder / "config.toml").decode())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{folder / 'config.toml'} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{folder / 'config.toml'} is not valid TOML: {error}") from error
    return {key: value for key, value in flatten(values) if value != {}}


def _differences(configs: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Return the key and each run's value of every setting in which the runs differ."""
    keys = sorted({key for config in configs for key in config} - {"run.output_dir"})
    values = [(key, [config.get(key) for config in configs]) for key in keys]
    differ = [(key, each) for key, each in values if any(value != each[0] for value in each)]
    return [[key, *("-" if value is None else str(value) for value in each)] for key, each in differ]


def _ledger(file: Path) -> dict[str, object]:
    try:
        ledger = json.loads(read_regular_file(file))
        rows = [
            [cause, *(_number(row.get(name)) for name in ("part", "share"))] for cause, row in ledger["causes"].items()
        ]
        absent = [[cause, str(why)] for cause, why in ledger["not_separated"].items()]
        return {"rows": rows, "absent": absent, "mean": _number(ledger["mean_abs"]), "tokens": ledger["tokens"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{str(file)!r} is not a ledger ({type(error).__name__}: {error}); write one with megatron-dppo diagnose "
            "RUN --json FILE"
        ) from error


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
