"""Experiment trackers: ids for Weights & Biases, and through ``accelerate`` MLflow, SwanLab, Trackio and Comet.

Each output folder has one run in each tracker. Its id is stored in ``trackers.json``, so a resumed run continues the
same curve. A run that begins again at step 0 begins a new curve.

Trackers cannot take values back. MLflow and Trackio draw a step twice if it is logged twice, and Weights & Biases drops
the second value. TensorBoard alone purges. So a resumed run adds each metric of a step once.
"""

import importlib.util
import json
import math
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.errors import ConfigError
from megatron_dppo.files import read_regular_file, write_synced
from megatron_dppo.report.records import DAMAGED

IDS = "trackers.json"
LOGGED_STEPS = "tracker_steps.json"
"""File with the last step of each metric, by the id of the run in the tracker."""


@dataclass(frozen=True, kw_only=True)
class RunLabels:
    """Name, group and tags of the run in trackers."""

    project: str
    name: str
    group: str | None = None
    tags: tuple[str, ...] = ()
    offline: bool = False


class LoggedSteps:
    """Last step of each metric that a run in a tracker got from this folder.

    Example:
        >>> from tempfile import mkdtemp
        >>> steps = LoggedSteps(Path(mkdtemp()), "a1")
        >>> steps.add(["loss"], 4)
        >>> steps.last, steps.has("loss", 3), steps.has("loss", 5), steps.has("reward", 3)
        (4, True, False, False)
    """

    def __init__(self, folder: Path, tracker_id: str) -> None:
        self._folder = folder
        self._tracker_id = tracker_id
        self._steps = dict(_all_steps(folder).get(tracker_id, {}))

    @property
    def last(self) -> int:
        """Last step of any metric, -1 if the run has none."""
        return max(self._steps.values(), default=-1)

    def has(self, name: str, step: int) -> bool:
        """Return True if the run has this metric of this step, or of a later one."""
        return step <= self._steps.get(name, -1)

    def add(self, names: Iterable[str], step: int) -> None:
        """Record that the run gets these metrics of a step."""
        self._steps |= dict.fromkeys(names, step)
        write_synced(
            self._folder / LOGGED_STEPS, json.dumps(_all_steps(self._folder) | {self._tracker_id: self._steps})
        )


def _all_steps(folder: Path) -> dict[str, dict[str, int]]:
    """Return the steps by id. A damaged file does not stop a run: at worst a resume shows some steps twice."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_regular_file(folder / LOGGED_STEPS))
        if isinstance(content, dict):
            return {run: _valid_steps(steps) for run, steps in content.items() if isinstance(steps, dict)}
    return {}


def _valid_steps(steps: Mapping[str, object]) -> dict[str, int]:
    return {name: step for name, step in steps.items() if isinstance(step, int)}


def run_id(folder: Path, tracker: str) -> str:
    """Return the id of a folder's run in a tracker, made and stored at the first call. Each folder has its own."""
    ids = _read_ids(folder)
    if tracker not in ids:
        ids[tracker] = uuid.uuid4().hex
        _write_ids(folder, ids)
    return ids[tracker]


def begin_new_runs(folder: Path) -> None:
    """Forget ids of runs with values, which may be of another configuration, as a run begins again at step 0."""
    ids = _read_ids(folder)
    unused = {tracker: value for tracker, value in ids.items() if LoggedSteps(folder, value).last < 0}
    if unused != ids:
        _write_ids(folder, unused)


def _read_ids(folder: Path) -> dict[str, str]:
    """Return the ids of a folder's run by tracker.

    A damaged file must not decide whether a run resumes. It is renamed, and the trackers get new runs.
    """
    path = folder / IDS
    try:
        ids = json.loads(read_regular_file(path))
        if not isinstance(ids, dict) or not all(isinstance(value, str) for value in ids.values()):
            raise TypeError("expected a table of texts")
        return ids
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error}). Fix: move it away to begin new runs in the trackers"
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        aside = path.with_name(path.name + DAMAGED)
        path.replace(aside)
        print(
            f"warning  {path} is damaged ({error}). Trackers get a new run from here on; the file is now {aside}",
            file=sys.stderr,
            flush=True,
        )
        return {}


def _write_ids(folder: Path, ids: Mapping[str, str]) -> None:
    write_synced(folder / IDS, json.dumps(ids, indent=2) + "\n")


def _swanlab(folder: Path, labels: RunLabels) -> dict[str, object]:
    options: dict[str, object] = {"name": labels.name, "group": labels.group, "tags": list(labels.tags)}
    options |= {"id": run_id(folder, "swanlab"), "resume": "allow", "log_dir": str(folder / "swanlab")}
    return options | ({"mode": "offline"} if labels.offline else {})


def _trackio(folder: Path, labels: RunLabels) -> dict[str, object]:
    name = f"{labels.name}-{run_id(folder, 'trackio')[:8]}"  # Trackio identifies a run by its name.
    return {"name": name, "group": labels.group, "resume": "allow", "embed": False}


def _comet_ml(folder: Path, labels: RunLabels) -> dict[str, object]:
    options: dict[str, object] = {"experiment_key": run_id(folder, "comet_ml"), "mode": "get_or_create"}
    if labels.offline:
        from comet_ml import ExperimentConfig

        options |= {"online": False, "experiment_config": ExperimentConfig(offline_directory=str(folder / "comet_ml"))}
    return options


_OPTIONS: Mapping[str, Callable[[Path, RunLabels], dict[str, object]]] = {
    "swanlab": _swanlab,
    "trackio": _trackio,
    "comet_ml": _comet_ml,
}


def require_trackers(names: Sequence[str]) -> None:
    """Check that the packages of the trackers are installed."""
    needed = [*names, *(["accelerate"] if names else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        packages = " ".join(name.replace("_", "-") for name in missing)
        raise ConfigError(f"log.trackers = {list(names)} needs {', '.join(missing)}: pip install {packages}")


def open_trackers(names: Sequence[str], folder: Path, labels: RunLabels, config: Mapping[str, object]) -> list[Any]:
    """Start or continue the folder's run in each tracker; the results have ``log`` and ``finish``."""
    if not names:
        return []
    from accelerate import PartialState

    PartialState()  # accelerate's logging requires it. It joins the existing process group.
    opened = []
    for name in names:
        tracker = _mlflow(folder, labels) if name == "mlflow" else _generic(name, folder, labels)
        tracker.main_process_only = False
        known = _read_ids(folder)
        tracker.start()
        if name == "mlflow" and "mlflow" not in known:
            _write_ids(folder, known | {"mlflow": tracker.tracker.info.run_id})
            tracker.store_init_configuration(flatten(config))  # MLflow's parameters cannot change.
        elif name != "mlflow":
            tracker.store_init_configuration(flatten(config))
        if name == "comet_ml":
            tracker.tracker.set_name(labels.name)
            tracker.tracker.add_tags([*labels.tags, *([labels.group] if labels.group else [])])
        opened.append(tracker)
    return opened


def _generic(name: str, folder: Path, labels: RunLabels) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return LOGGER_TYPE_TO_CLASS[name](labels.project, **_OPTIONS[name](folder, labels))


def _mlflow(folder: Path, labels: RunLabels) -> Any:
    from accelerate.tracking import MLflowTracker

    known = _read_ids(folder).get("mlflow")
    tags = {tag: "true" for tag in labels.tags} | ({"group": labels.group} if labels.group else {})
    return MLflowTracker(experiment_name=labels.project, run_id=known, run_name=labels.name, tags=tags)


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Return ``{"loss.topk": 20}`` for nested tables. Unsupported types become text, and None is dropped."""
    result: dict[str, str | int | float | bool] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flatten(value, f"{prefix}{key}.")
        elif value is not None:
            result[f"{prefix}{key}"] = value if isinstance(value, str | int | float | bool) else str(value)
    return result


def finite_values(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values without those that are not finite, which some trackers reject."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
