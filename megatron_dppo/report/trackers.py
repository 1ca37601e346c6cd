"""Experiment trackers beside TensorBoard: Weights & Biases, and through ``accelerate`` MLflow, SwanLab, Trackio, Comet.

Each tracker has a run of its own for a run's folder, whatever the folder is called; its id is kept in
``trackers.json``, so that a run that is started again goes on in the same curve.
"""

from __future__ import annotations

import importlib.util
import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.errors import ConfigError
from megatron_dppo.files import write_synced

IDS = "trackers.json"


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What a run is called in trackers."""

    project: str
    name: str
    group: str | None = None
    tags: tuple[str, ...] = ()
    offline: bool = False


def run_id(folder: Path, tracker: str) -> str:
    """The id of a folder's run in a tracker, drawn once and kept.

    Example: two folders ``a/run`` and ``b/run`` get two ids; a resumed run the one that it had. A folder of a version
    that took its name for the id in Weights & Biases keeps that.
    """
    path = folder / IDS
    ids: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if tracker not in ids:
        is_older = tracker == "wandb" and (folder / "wandb").is_dir()
        ids[tracker] = folder.name if is_older else uuid.uuid4().hex
        write_synced(path, json.dumps(ids, indent=2) + "\n")
    return ids[tracker]


def _keep_id(folder: Path, tracker: str, found: str) -> None:
    path = folder / IDS
    ids = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    write_synced(path, json.dumps(ids | {tracker: found}, indent=2) + "\n")


def _swanlab(folder: Path, labels: Labels) -> dict[str, Any]:
    options: dict[str, Any] = {"name": labels.name, "group": labels.group, "tags": list(labels.tags)}
    options |= {"id": run_id(folder, "swanlab"), "resume": "allow", "log_dir": str(folder / "swanlab")}
    return options | ({"mode": "offline"} if labels.offline else {})


def _trackio(folder: Path, labels: Labels) -> dict[str, Any]:
    name = f"{labels.name}-{run_id(folder, 'trackio')[:8]}"  # it tells runs apart by their names
    return {"name": name, "group": labels.group, "resume": "allow", "embed": False}


def _comet_ml(folder: Path, labels: Labels) -> dict[str, Any]:
    options: dict[str, Any] = {"experiment_key": run_id(folder, "comet_ml"), "mode": "get_or_create"}
    return options | ({"online": False} if labels.offline else {})


_OPTIONS: Mapping[str, Callable[[Path, Labels], dict[str, Any]]] = {
    "swanlab": _swanlab,
    "trackio": _trackio,
    "comet_ml": _comet_ml,
}


def require_trackers(names: Sequence[str]) -> None:
    """Whether the packages of the trackers are installed.

    Raises:
        ConfigError: with the command that installs what is missing.
    """
    needed = [*names, *(["accelerate"] if names else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        packages = " ".join(name.replace("_", "-") for name in missing)
        raise ConfigError(f"log.trackers = {list(names)} needs {', '.join(missing)}: pip install {packages}")


def open_trackers(names: Sequence[str], folder: Path, labels: Labels, config: Mapping[str, Any]) -> list[Any]:
    """Start or continue the folder's run in each tracker; the result has ``log`` and ``finish``.

    Args:
        names: of ``mlflow``, ``swanlab``, ``trackio``, ``comet_ml``.
        folder: of the run, where ids are kept.
        labels: what the run is called.
        config: the resolved configuration.
    """
    if not names:
        return []
    from accelerate import PartialState

    PartialState()  # accelerate's own logging wants it; it joins the process group that there is
    found = []
    for name in names:
        tracker = _mlflow(folder, labels) if name == "mlflow" else _other(name, folder, labels)
        known = json.loads((folder / IDS).read_text(encoding="utf-8")) if (folder / IDS).is_file() else {}
        tracker.start()
        if name == "mlflow" and "mlflow" not in known:
            _keep_id(folder, "mlflow", tracker.tracker.info.run_id)
            tracker.store_init_configuration(flat(config))  # MLflow's parameters never change
        elif name != "mlflow":
            tracker.store_init_configuration(flat(config))
        if name == "comet_ml":
            tracker.tracker.set_name(labels.name)
            tracker.tracker.add_tags([*labels.tags, *([labels.group] if labels.group else [])])
        found.append(tracker)
    return found


def _other(name: str, folder: Path, labels: Labels) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    tracker = LOGGER_TYPE_TO_CLASS[name](labels.project, **_OPTIONS[name](folder, labels))
    tracker.main_process_only = False
    return tracker


def _mlflow(folder: Path, labels: Labels) -> Any:
    from accelerate.tracking import MLflowTracker

    path = folder / IDS
    known = json.loads(path.read_text(encoding="utf-8")).get("mlflow") if path.is_file() else None
    tags = {tag: "true" for tag in labels.tags} | ({"group": labels.group} if labels.group else {})
    tracker = MLflowTracker(experiment_name=labels.project, run_id=known, run_name=labels.name, tags=tags)
    tracker.main_process_only = False
    return tracker


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, str | int | float | bool]:
    """``{"loss.topk": 20}`` of nested tables; what trackers have no type for as text, None left out."""
    result: dict[str, str | int | float | bool] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{before}{key}.")
        elif value is not None:
            result[f"{before}{key}"] = value if isinstance(value, str | int | float | bool) else str(value)
    return result


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Without values that are no numbers, which some trackers refuse."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
