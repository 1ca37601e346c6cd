"""``megatron-dppo demo``: train three losses from one base model under one mismatch; draw and summarize them."""

import importlib.util
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.errors import UserError
from megatron_dppo.files import disk_errors, write_synced
from megatron_dppo.report.records import read_metrics
from megatron_dppo_lab.catalogue import LOSSES, MISMATCHES, TASKS
from megatron_dppo_lab.child import read_curves
from megatron_dppo_lab.grid import GridRun, merged, run_settings
from megatron_dppo_lab.runner import execute_runs
from megatron_dppo_lab.statistics import Row, masked, series
from megatron_dppo_lab.store import Store
from megatron_dppo_report.build import FILE, build, check_target, write_report
from megatron_dppo_report.reported_run import open_run

_COLORS = ("#0072b2", "#e69f00", "#6e6e6e", "#009e73")
"""Colors that are distinguishable with red-green color blindness."""
_PANELS = (
    ("rollout/reward", "training reward: share of right words"),
    ("train/mask_fraction", "share of tokens that the loss masks"),
)


def write_picture(rows: Sequence[Row], labels: Mapping[str, str], picture: Path) -> None:
    """Draw one line per run in each panel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    with plt.rc_context({**style, "font.size": 9}):
        figure, axes = plt.subplots(1, len(_PANELS), figsize=(10, 3.8), layout="constrained")
        for axis, (metric, title) in zip(axes, _PANELS, strict=True):
            for row, color in zip(rows, _COLORS, strict=False):
                values = series(row, metric)
                axis.plot(range(1, len(values) + 1), values, color=color, linewidth=1.8, label=labels[row["loss"]])
            axis.set_title(title, loc="left")
            axis.set_xlabel("rollout step")
            axis.set_ylim(0, 1)
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(rows), frameon=False)
        figure.suptitle("The same base model, the same stale rollouts, three losses (one seed)")
        figure.savefig(picture, dpi=130)
        plt.close(figure)


TASK = "rare_chain"
MISMATCH = "hot"
STEPS = 40
LABELS: Mapping[str, str] = {
    "dppo_binary_tv cap 2": "DPPO with capped weights",
    "grpo": "GRPO clip-higher",
    "pg_is": "PG-IS without a trust region",
}
"""Names of the losses in text and picture."""
PICTURES = ("demo.png", "demo.txt")
_RECORDED_STEPS = 5
"""Steps of each run whose tokens the report shows."""
WINDOW = 5
"""Steps over which the numbers of the summary are averaged."""
_COLLAPSE_RATIO = 0.8
"""A run that ends below this fraction of its best reward has fallen."""
_MIN_LEAD = 0.03
"""Smallest difference of final rewards that counts: a few standard deviations of a step's reward."""
_PROGRESS_SECONDS = 15.0


@dataclass(frozen=True)
class Demo:
    """Options of the command line."""

    output: str = "runs/demo"
    steps: int = STEPS
    seed: int = 0
    jobs: int = len(LABELS)

    @property
    def runs(self) -> list[GridRun]:
        """Three runs that differ in their loss only."""
        short = {"run": {"num_steps": self.steps}, "eval": {"every": self.steps}}
        base = merged(TASKS[TASK], short)
        return [
            GridRun(TASK, loss, MISMATCH, self.seed, run_settings(base, LOSSES[loss], MISMATCHES[MISMATCH], self.seed))
            for loss in LABELS
        ]


def execute(demo: Demo) -> None:
    """Execute the missing runs, write ``demo.png``, ``demo.txt`` and the report, and print the summary."""
    folder = Path(demo.output)
    store = Store(folder)
    store.check_output_dir()
    for name in PICTURES:
        if (folder / name).exists() and not (folder / "rows").is_dir():
            raise UserError(
                f"{folder / name} exists, but {folder} is not the folder of a demo. Fix: choose another --output"
            )
    if os.path.lexists(folder / FILE):
        check_target(folder / FILE)
    with store.held():
        _execute_locked(store, demo)


def _execute_locked(store: Store, demo: Demo) -> None:
    runs = demo.runs
    if not store.base(runs[0]).is_dir():
        print(
            f"the package has no base model of seed {demo.seed}: training it once takes about three minutes of one "
            "core",
            flush=True,
        )
    print(
        f"three runs of {demo.steps} steps from one base model, {demo.jobs} concurrently; folder {store.folder}",
        flush=True,
    )
    with _print_progress(store, runs):
        rows = execute_runs(
            store, runs, demo.jobs, lambda line: print(line, flush=True), rollouts_every=_rollouts_every(demo.steps)
        )
    ordered = [rows[run.key] for run in runs]
    text = sentence(ordered)
    picture, summary = (store.folder / name for name in PICTURES)
    with disk_errors(store.folder, "picture and sentence"):
        write_synced(summary, text + "\n")
        write_picture(ordered, LABELS, picture)
    print(f"\n{text}\n\npicture  {picture}", flush=True)
    _write_report(store, runs)


def _rollouts_every(steps: int) -> int:
    """Return the distance of the steps whose rollouts are recorded. 0 without pyarrow, which writes them."""
    if importlib.util.find_spec("pyarrow") is None:
        print("note     the report will have curves only. Fix: pip install pyarrow, to see the tokens too", flush=True)
        return 0
    return max(1, steps // _RECORDED_STEPS)


def _write_report(store: Store, runs: Sequence[GridRun]) -> None:
    recorded = [run for run in runs if read_metrics(store.records(run) / "metrics.jsonl")]
    target = store.folder / FILE
    for run in runs:
        if run not in recorded:
            print(f"note     {LABELS[run.loss]} has no records and is not in the report", flush=True)
    if not recorded:
        print("report   not written. Fix: choose another --output, to repeat the runs with records", flush=True)
        return
    write_report(target, build([open_run(store.records(run), LABELS[run.loss]) for run in recorded]))
    print(f"report   {target}    (open it in a browser: tokens by color, and those that each loss masked)", flush=True)


def best(rewards: Sequence[float]) -> float:
    """Return the highest mean over ``WINDOW`` consecutive steps.

    Example:
        >>> best([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5])
        1.0
    """
    width = min(WINDOW, len(rewards))
    return max(sum(rewards[i : i + width]) / width for i in range(len(rewards) - width + 1))


def last(rewards: Sequence[float]) -> float:
    """Return the mean of the last ``WINDOW`` steps."""
    return sum(rewards[-WINDOW:]) / len(rewards[-WINDOW:])


def sentence(rows: Sequence[Row]) -> str:
    """Summarize the rows in one sentence."""
    parts = [_describe_run(row) for row in rows]
    ends = {LABELS[row["loss"]]: last(series(row, "rollout/reward")) for row in rows if not row["error"]}
    steps, seed = rows[0]["settings"]["run"]["num_steps"], rows[0]["seed"]
    # Two more values, so that fewer than two runs with an end have a second one, too.
    *_, second, highest = sorted([*ends.values(), -1.0, -1.0])
    if not ends:
        outcome = "none of them came to its end"
    elif highest - second < _MIN_LEAD:
        outcome = "none of them ends clearly highest"
    else:
        outcome = f"{max(ends, key=ends.__getitem__)} ends highest"
    return (
        f"In {steps} steps with rollouts of eight steps ago and a learning rate that is far too high (seed {seed}), "
        f"{', '.join(parts[:-1])}, and {parts[-1]}: {outcome}."
    )


def _describe_run(row: Row) -> str:
    label, rewards = LABELS[row["loss"]], series(row, "rollout/reward")
    if row["error"]:
        # "TrainingStopped: what happened. What to do", or lines of details after a colon.
        reason = row["error"].partition(": ")[2].splitlines()[0].partition(". ")[0].rstrip(":.")
        return f"{label} was stopped after {len(rewards)} steps ({reason})"
    top = best(rewards)
    end = last(rewards)
    share = masked(row)
    masks = f"masks {share:.0%} of the tokens" if share else "masks nothing"
    verb = "falls to" if end < _COLLAPSE_RATIO * top else "ends at"
    return f"{label} ({masks}) starts at {rewards[0]:.2f}, reaches {top:.2f} and {verb} {end:.2f}"


@contextmanager
def _print_progress(store: Store, runs: Sequence[GridRun]) -> Iterator[None]:
    done = threading.Event()

    def print_states() -> None:
        while not done.wait(_PROGRESS_SECONDS):
            states = [_state(store, run) for run in runs]
            if any(states):
                print("  ".join(filter(None, states)), flush=True)

    printer = threading.Thread(target=print_states, name="progress", daemon=True)
    printer.start()
    try:
        yield
    finally:
        done.set()
        printer.join()


def _state(store: Store, run: GridRun) -> str:
    """Return step and last reward of a running run. Empty for others."""
    file = store.work_folder(run) / "run" / "metrics.jsonl"
    try:
        rewards = read_curves(file).get("rollout/reward", []) if file.is_file() else []
    except FileNotFoundError:  # The run finished in between.
        return ""
    name = LABELS[run.loss].split(" ", maxsplit=1)[0]
    return f"{name} step {len(rewards)} reward {rewards[-1]:.2f}" if rewards else ""
