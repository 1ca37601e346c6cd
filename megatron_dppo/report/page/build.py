"""A run, or two, as one HTML file that needs nothing else: data, style and program are in it.

Text of rollouts is data, never markup: it is JSON in which no character can end the element that holds it, and the
page's program makes text nodes of it.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from megatron_dppo.errors import ConfigError, DataError
from megatron_dppo.files import disk_errors, write_synced
from megatron_dppo.report.findings import findings
from megatron_dppo.report.page.charts import others, series
from megatron_dppo.report.page.steps import Budget, step_view
from megatron_dppo.report.records import read_metrics
from megatron_dppo.report.steps.files import recorded_steps
from megatron_dppo.report.steps.tokens import Decode

FILE = "report.html"
_FORMAT = 1


class ReportedRun(NamedTuple):
    """What a report is made of."""

    folder: Path
    decode: Decode | None
    """None = there is no tokenizer: tokens are shown by their ids"""


def build(runs: Sequence[ReportedRun], *, ledger: Path | None = None, refresh: float = 0) -> str:
    """The page.

    Args:
        runs: one or two.
        ledger: what ``megatron-dppo diagnose --json`` wrote, of the first run.
        refresh: seconds after which the page loads itself again; 0 = never.

    Raises:
        ConfigError: a folder has no records.
        DataError: a file cannot be read.
    """
    budget, steps, views = Budget(len(runs)), list[str](), list[dict[str, Any]]()
    for place, run in enumerate(runs):
        records = read_metrics(run.folder / "metrics.jsonl")
        if not records:
            raise ConfigError(f"{str(run.folder)!r} has no metrics.jsonl with records; expected the folder of a run")
        recorded, masked = recorded_steps(run.folder), list[dict[str, Any]]()
        for step, file in recorded.items():
            view = step_view(file, run.decode, budget.of_step(len(recorded)))
            masked += view["masked"]
            steps.append(_element(f"step-{place}-{step}", view))
        views.append(_run_view(run.folder, records, list(recorded), masked))
    data = {
        "format": _FORMAT,
        "runs": views,
        "differences": _differences([view.pop("config") for view in views]),
        "ledger": None if ledger is None else _ledger(ledger),
        "refresh": refresh,
    }
    parts = {name: files("megatron_dppo.report.page").joinpath(name).read_text("utf-8") for name in _PARTS}
    title = " and ".join(run.folder.resolve().name for run in runs)
    page = parts["page.html"].replace("%TITLE%", _escaped_html(title)).replace("%STYLE%", parts["page.css"])
    head, _, tail = page.partition("%DATA%")
    between, _, end = tail.partition("%PROGRAM%")
    program = "\n".join(parts[name] for name in _PARTS if name.endswith(".js"))
    return "".join([head, _element("data", data), *steps, between, program, end])


_PARTS = ("page.html", "page.css", "charts.js", "tokens.js", "page.js")


def check_target(target: Path) -> None:
    """Whether a report can be written there, over one of ours at most.

    Raises:
        ConfigError: there is something else of that name, or no such folder.
    """
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"{str(target)!r} is in a folder that does not exist; name another file")
    if os.path.lexists(target):
        begin = b""
        if target.is_file():
            with disk_errors(target, "the report"), target.open("rb") as file:
                begin = file.read(_BEGIN)
        if _MARK.encode() not in begin:
            raise ConfigError(f"{str(target)!r} exists and is no report of ours; name another file by --output")


def write_report(target: Path, text: str) -> None:
    """Replace the file at once; one that is no report of ours is left.

    Raises:
        ConfigError: see ``check_target``.
        DiskError: it cannot be written.
    """
    check_target(target)
    with disk_errors(target, "the report"):
        write_synced(target, text)


_MARK = "megatron-dppo report"
_BEGIN = 400
"""bytes of a report that have the mark"""


def _element(name: str, value: Any) -> str:
    """JSON inside of the page. ``<`` and ``&`` are escaped, so that nothing in it is a tag or a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    text = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair cannot be written
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def _escaped_html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%", "&#37;")


def _run_view(
    folder: Path, records: Sequence[dict[str, Any]], recorded: list[int], masked: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    config = _config(folder)
    summary = folder / "summary.json"
    return {
        "name": folder.resolve().name,
        "loss": config.get("loss.name", ""),
        "records": len(records),
        "last": max(record["step"] for record in records),
        "planned": config.get("run.num_steps"),
        "finished": summary.is_file(),
        "charts": series(records),
        "others": others(records),
        "recorded": recorded,
        "findings": [finding._asdict() for finding in findings(records, masked)],
        "config": config,
    }


def _config(folder: Path) -> dict[str, Any]:
    """``section.key`` to value of the run's configuration; empty where the folder has none."""
    try:
        values = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"{folder / 'config.toml'} is not TOML: {error}") from error
    return dict(_flat(values))


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        found += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return found


def _differences(configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Key and both values where two runs differ."""
    if len(configs) < 2:
        return []
    first, second = configs
    keys = sorted((first.keys() | second.keys()) - {"run.output_dir"})
    return [[key, _shown(first.get(key)), _shown(second.get(key))] for key in keys if first.get(key) != second.get(key)]


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)


def _ledger(file: Path) -> dict[str, Any]:
    """The causes of a ledger.

    Raises:
        DataError: the file is none.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = [
            [cause, *(_number(row.get(name)) for name in ("part", "share"))] for cause, row in found["causes"].items()
        ]
        absent = [[cause, str(why)] for cause, why in found["not_separated"].items()]
        return {"rows": rows, "absent": absent, "mean": _number(found["mean_abs"]), "tokens": found["tokens"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{str(file)!r} is no ledger ({type(error).__name__}: {error}); write one by megatron-dppo diagnose RUN "
            "--json FILE"
        ) from error


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
