"""``megatron-dppo demo``: three losses from one base model under one forced mismatch, a picture and a sentence."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.commands.experiments.catalogue import LOSSES, MISMATCHES, TASKS
from megatron_dppo.commands.experiments.child import read_curves
from megatron_dppo.commands.experiments.grid import GridRun, merged, run_settings
from megatron_dppo.commands.experiments.runner import do_runs
from megatron_dppo.commands.experiments.statistics import Row, masked, series
from megatron_dppo.commands.experiments.store import Store
from megatron_dppo.errors import UserError
from megatron_dppo.files import disk_errors, write_synced

_COLORS = ("#0072b2", "#e69f00", "#6e6e6e", "#009e73")
"""told apart also without seeing red and green as different"""


_PANELS = (
    ("rollout/reward", "training reward: share of right words"),
    ("train/mask_fraction", "share of tokens that the loss masks"),
)


def write_picture(rows: Sequence[Row], labels: Mapping[str, str], picture: Path) -> None:
    """Draw one line a run in each panel.

    Args:
        rows: of finished runs.
        labels: loss -> name in the legend.
        picture: the PNG file.
    """
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


TASK, MISMATCH = "rare_chain", "hot"


STEPS = 40


LABELS: Mapping[str, str] = {
    "dppo_binary_tv cap 2": "DPPO with capped weights",
    "grpo": "GRPO clip-higher",
    "pg_is": "PG-IS without a trust region",
}
"""Loss of the catalogue -> what it is called."""


PICTURES = ("demo.png", "demo.txt")


WINDOW = 5
"""steps that a figure of the sentence is the mean of"""


_FALLEN = 0.8
"""A run has fallen that ends below this share of its best."""


_ALIKE = 0.03
"""Some deviations of a step's reward, which is the mean over 512 samples of four words."""


_TELL_EVERY = 15.0


@dataclass(frozen=True)
class Demo:
    """What is asked for on the command line."""

    output: str = "runs/demo"
    steps: int = STEPS
    seed: int = 0
    jobs: int = len(LABELS)
    """runs at a time"""

    @property
    def runs(self) -> list[GridRun]:
        """The three runs, alike but for the loss."""
        short = {"run": {"num_steps": self.steps}, "eval": {"every": self.steps}}
        base = merged(TASKS[TASK], short)
        return [
            GridRun(TASK, loss, MISMATCH, self.seed, run_settings(base, LOSSES[loss], MISMATCHES[MISMATCH], self.seed))
            for loss in LABELS
        ]


def carry_out(demo: Demo) -> None:
    """Do the runs that are missing; write ``demo.png`` and ``demo.txt``, print the sentence.

    Raises:
        UserError: a run ended without a result, files of these names are somebody else's, or another command works in
            the folder.
    """
    folder = Path(demo.output)
    store = Store(folder)
    store.check_output_dir()
    for name in PICTURES:
        if (folder / name).exists() and not (folder / "rows").is_dir():
            raise UserError(
                f"{folder / name} exists, and no demo has written to {folder}: give --output another folder"
            )
    with store.held():
        _carry_out(store, demo)


def _carry_out(store: Store, demo: Demo) -> None:
    runs = demo.runs
    if not store.base(runs[0]).is_dir():
        print(
            f"no base model of seed {demo.seed} comes with the package: it is made first, once (about three minutes of "
            "one core)",
            flush=True,
        )
    print(
        f"three runs of {demo.steps} steps from one base model, {demo.jobs} at a time; folder {store.folder}",
        flush=True,
    )
    with _telling(store, runs):
        rows = do_runs(store, runs, demo.jobs, lambda line: print(line, flush=True))
    found = [rows[run.key] for run in runs]
    text = sentence(found)
    picture, told = (store.folder / name for name in PICTURES)
    with disk_errors(store.folder, "picture and sentence"):
        write_synced(told, text + "\n")
        write_picture(found, LABELS, picture)
    print(f"\n{text}\n\npicture: {picture}", flush=True)


def best(rewards: Sequence[float]) -> float:
    """The highest mean of ``WINDOW`` steps in a row.

    Example:
        >>> best([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5])
        1.0
    """
    width = min(WINDOW, len(rewards))
    return max(sum(rewards[i : i + width]) / width for i in range(len(rewards) - width + 1))


def last(rewards: Sequence[float]) -> float:
    """The mean of the last ``WINDOW`` steps."""
    return sum(rewards[-WINDOW:]) / len(rewards[-WINDOW:])


def sentence(rows: Sequence[Row]) -> str:
    """What happened, by these rows and no other knowledge.

    Args:
        rows: of the three runs, whatever losses of ``LABELS`` they are.
    """
    parts = [_told(row) for row in rows]
    ends = {LABELS[row["loss"]]: last(series(row, "rollout/reward")) for row in rows if not row["error"]}
    steps, seed = rows[0]["settings"]["run"]["num_steps"], rows[0]["seed"]
    *_, second, highest = sorted([*ends.values(), -1.0, -1.0])
    if not ends:
        outcome = "none of them came to its end"
    elif highest - second < _ALIKE:
        outcome = "none of them ends clearly highest"
    else:
        outcome = f"{max(ends, key=ends.__getitem__)} ends highest"
    return (
        f"In {steps} steps with rollouts of eight steps ago and a learning rate that is far too high (seed {seed}), "
        f"{', '.join(parts[:-1])}, and {parts[-1]}: {outcome}."
    )


def _told(row: Row) -> str:
    label, rewards = LABELS[row["loss"]], series(row, "rollout/reward")
    if row["error"]:
        return f"{label} was stopped after {len(rewards)} steps ({row['error'].partition('.')[0]})"
    top, end, share = best(rewards), last(rewards), masked(row)
    masks = f"masks {share:.0%} of the tokens" if share else "masks nothing"
    verb = "falls to" if end < _FALLEN * top else "ends at"
    return f"{label} ({masks}) starts at {rewards[0]:.2f}, reaches {top:.2f} and {verb} {end:.2f}"


@contextmanager
def _telling(store: Store, runs: Sequence[GridRun]) -> Iterator[None]:
    """Print how far the runs are from time to time."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(_TELL_EVERY):
            states = [_state(store, run) for run in runs]
            if any(states):
                print("  ".join(filter(None, states)), flush=True)

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _state(store: Store, run: GridRun) -> str:
    """The step and the last reward of a run that is under way; empty = it is not."""
    file = store.place(run) / "run" / "metrics.jsonl"
    try:
        rewards = read_curves(file).get("rollout/reward", []) if file.is_file() else []
    except FileNotFoundError:  # the run has just ended
        return ""
    name = LABELS[run.loss].split(" ", maxsplit=1)[0]
    return f"{name} step {len(rewards)} reward {rewards[-1]:.2f}" if rewards else ""
