"""Checkpoints of a run and its export: their contents, when one is due, saving and restoring."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import DiskError
from megatron_dppo.files import MAKE_ROOM, require_space
from megatron_dppo.mcore.checkpoint.folder import checkpoints_folder, prune, set_aside
from megatron_dppo.parallel.objects import all_gather_objects, broadcast_object, run_on_leader
from megatron_dppo.process.save_timer import SaveTimer, has_memory_for_copies
from megatron_dppo.report.clock import PROGRESS
from megatron_dppo.rollout.saved import SchedulerState, describe_incompatibility, load_rollouts, save_rollouts
from megatron_dppo.run.collector import RolloutCollector
from megatron_dppo.run.evaluation import Evaluator
from megatron_dppo.run.export import export_results
from megatron_dppo.run.guard_state import GuardState
from megatron_dppo.run.run_state import RunState
from megatron_dppo.setup.changes import Change, ServedModels
from megatron_dppo.setup.contents import Contents
from megatron_dppo.setup.inputs import Inputs
from megatron_dppo.setup.output_checks import checkpoint_bytes, estimate_save_bytes
from megatron_dppo.setup.resume import ResumePoint, layout_identity, run_identity

if TYPE_CHECKING:
    from megatron_dppo.mcore.checkpoint.save_load import CheckpointSave
    from megatron_dppo.policy.trainer import PolicyTrainer

_NOT_FINITE = (
    "(its weights or optimizer state are NaN or infinite; the newest checkpoint with finite ones is kept, and "
    "rerunning the same command resumes from it)"
)


@dataclass(kw_only=True)
class Checkpoints:
    """Saves and restores a run. Every method but ``is_due`` is a collective of all ranks."""

    config: Config
    inputs: Inputs
    trainer: PolicyTrainer
    collector: RolloutCollector
    """Source of the rollouts; those that were not trained on are saved, by the ranks that have an engine."""
    evaluator: Evaluator
    background: dist.ProcessGroup | None
    """Group of all ranks over the CPU, for saves in the background. None if there are none."""
    say: Callable[[str], None]
    # Of the files as they are at the start, like the functions in memory. Rank 0 writes them to state.json.
    contents: Contents
    served: ServedModels
    check_folder: Callable[[], None]
    """See ``Records``."""
    save_seconds: float | None = None
    """Seconds from the start of the last save until it was complete. None before the first."""
    timer: SaveTimer = field(init=False)
    """Decides about saves by time, and measures all saves."""
    _saving: CheckpointSave | None = None
    _save_began: float = 0.0

    def __post_init__(self) -> None:
        self.timer = SaveTimer(self.config.checkpoint.save_every_minutes)

    @property
    def folder(self) -> Path:
        """Folder of the run's checkpoints."""
        return checkpoints_folder(Path(self.config.run.output_dir))

    def is_due(self, state: RunState) -> bool:
        """Return True if the step that was just done ends with a checkpoint."""
        every = self.config.checkpoint.save_every
        is_last = state.step == self.config.run.num_steps
        is_solved = state.has_reached(self.config.eval.stop_at_accuracy)
        return is_last or is_solved or bool(every and state.step % every == 0)

    def is_due_by_time(self) -> bool:
        """Return True if a checkpoint is due by time, by the clock of rank 0; a collective of all ranks."""
        if not self.timer.is_enabled:
            return False
        # One that is still being written would have to be waited for.
        return broadcast_object(lambda: self._saving is None and self.timer.is_due(), self.trainer.groups.world)

    def save_by_time(self, state: RunState) -> None:
        """Write a checkpoint like ``save``, in the background if host memory allows. Without space it is skipped."""
        try:
            self._require_space()
        except DiskError as error:
            self.say(f"warning  no checkpoint by time: {error}")
            return
        part_bytes = checkpoint_bytes(self.config.model, self.config.lora, self.inputs) // self.inputs.layout.world_size
        # A save is a collective, so all ranks must decide alike.
        fits = all(all_gather_objects(has_memory_for_copies(part_bytes), self.trainer.groups.world))
        self.save(state, in_background=fits)

    def _require_space(self) -> None:
        """Raise DiskError on all ranks if there is no space for a checkpoint."""
        run_on_leader(
            lambda: require_space(
                self.folder,
                estimate_save_bytes(self.config.run, self.config.model, self.config.lora, self.inputs),
                "a checkpoint",
                MAKE_ROOM,
            ),
            self.trainer.groups.world,
        )

    def save(self, state: RunState, *, in_background: bool | None = None) -> None:
        """Write a checkpoint of this step, with every rollout that was not trained on.

        In the background the checkpoint is complete only after ``finish`` has reported it. None for ``in_background``
        follows ``checkpoint.async_save``. The trainer's state must be on the GPUs (``RolloutCollector.free_gpus``).
        """
        # One save at a time: the previous one may still be writing in the background.
        self.finish(wait=True)
        self._save_began = time.monotonic()
        config = self.config
        stream = self.collector.stream
        contents = stream.stored_rollouts() if self.collector.engine is not None else []
        record = {
            "step": state.step,
            "skipped_in_a_row": state.skipped_in_a_row,
            "answers_before": self.evaluator.responses_before,
            "best": state.best,
            "evaluation_due": self.evaluator.is_running,
            "stream": stream.state().to_json(),
            "identity": run_identity(config.lora, config.run.seed, self.inputs),
            "layout": layout_identity(config.model, config.parallel, self.inputs),
            "config": config.model_dump(mode="json"),
            "cwd": os.getcwd(),
            "guard": state.guard.to_json(),
            "contents": self.contents,
            "served": self.served,
        }
        self._require_space()
        if in_background is None:
            in_background = config.checkpoint.async_save
        self._saving = self.trainer.save(
            self.folder,
            state.step,
            record,
            config.checkpoint.keep,
            self._best_step(state),
            write_extra=partial(save_rollouts, contents, self.trainer.dp_rank),
            background_group=self.background if in_background else None,
        )

    def finish(self, *, wait: bool) -> None:
        """Report the last checkpoint once it is complete."""
        saving = self._saving
        if saving is None or not (wait or saving.is_done):
            return
        with PROGRESS.part("save"):
            path = saving.wait()
        self._saving = None
        self.save_seconds = saving.end_time - self._save_began
        self.say(f"saved    {path}" if saving.is_finite else f"saved    {path} {_NOT_FINITE}")

    def export(self) -> None:
        """Wait for the last checkpoint and export the model."""
        self.finish(wait=True)
        with PROGRESS.part("export"):
            self.collector.free_gpus()
            self.check_folder()
            export_results(self.trainer, self.inputs, self.config)

    def close(self) -> None:
        """Wait for a save in the background, also when the run ended with an error."""
        if self._saving is not None:
            self._saving.join()

    def begin(self, point: ResumePoint | None) -> RunState:
        """Return the state that the run begins with: that of the checkpoint that it resumes from, if there is one."""
        self.trainer.check_can_save()
        if point is None:
            return self._new_state()
        state = self.restore(point)

        def tidy() -> None:
            for skipped in point.skipped_checkpoints:
                set_aside(skipped.checkpoint, skipped.kind)
            # The last run may have been killed while it pruned.
            prune(self.folder, self.config.checkpoint.keep, self._best_step(state))

        run_on_leader(tidy, self.trainer.groups.world)
        return state

    def _new_state(self) -> RunState:
        return RunState(guard=GuardState.from_config(self.config.rollout, self.config.train))

    def restore(self, point: ResumePoint) -> RunState:
        """Restore policy, optimizer, rollouts and the responses from before training, and return the counters."""
        record = self.trainer.load(point.checkpoint, same_layout=point.same_layout)
        state = self._new_state()
        state.step = record["step"]
        state.skipped_in_a_row = record["skipped_in_a_row"]
        # The best checkpoint of another run is not in this folder.
        state.best = tuple(record["best"]) if record["best"] and not point.is_fork else None
        state.evaluation_due = record["evaluation_due"]
        self.evaluator.responses_before = record["answers_before"]
        # Checkpoints of earlier versions have no such state; the noise of another run is not this run's.
        if record.get("guard") and not point.is_fork:
            state.guard.restore(record["guard"])
        for skipped in point.skipped_checkpoints:
            self.say(
                f"warning  {skipped.checkpoint} is skipped: {skipped.reason}; it is renamed to end in .{skipped.kind}"
            )
        verb = "forked " if point.is_fork else "resumed"
        version = self.trainer.policy_version
        self.say(f"{verb}  {point.checkpoint} (step {state.step}, policy version {version})")
        if not point.same_layout:
            self.say("         on another layout: the curve is the same up to rounding, not bit for bit")
        for change in point.changes:
            self.say(f"         changed{_how_accepted(change, is_fork=point.is_fork)}: {change}")
        self._restore_stream(record, point, state.step)
        return state

    def _restore_stream(self, record: Mapping[str, Any], point: ResumePoint, step: int) -> None:
        """Restore the rollouts that were not trained on, or return their prompts to the stream."""
        dp = self.inputs.layout.dp
        stream = self.collector.stream
        before = SchedulerState.from_json(record["stream"])
        saved = before.with_data_parallel_size(dp)
        # A fork on other data: the saved prompts do not exist in this stream.
        if not point.same_stream:
            self.say("         on other prompts, or in another order: starts at the first prompt")
            stream.restore(saved.restarted(step), {})
            return
        # Rollouts of other sampling or reward settings must not be trained on: sample their prompts again.
        problem = describe_incompatibility(
            saved,
            self._with_current_sections(record["config"], point),
            self.config.train,
            {name: getattr(self.config, name) for name in ("data", "rollout", "agent", "reward")},
        )
        changed_files = [change for change in point.changes if change.file and change.kind in ("results", "repaired")]
        if changed_files and not problem:
            problem = f"the content of {changed_files[0].file} has changed"
        if problem and saved.num_prompts:
            self.say(f"         rollouts that were sampled ahead are sampled again: {problem}")
        if problem:
            stream.restore(saved.without_submissions(step), {})
            return
        contents = {}
        if self.collector.engine is not None:
            prompts = self.inputs.train_prompts
            contents = load_rollouts(before, dp, self.trainer.dp_rank, point.checkpoint, prompts.__getitem__)
        stream.restore(saved, contents)

    def _with_current_sections(self, saved_config: Mapping[str, Any], point: ResumePoint) -> dict[str, Any]:
        """Return the saved configuration with this run's sections where only the spelling of paths differs."""
        current = self.config.model_dump(mode="json")
        changed = {change.key.split(".")[0] for change in point.changes}
        return {**saved_config, **{name: section for name, section in current.items() if name not in changed}}

    def _best_step(self, state: RunState) -> int | None:
        """Return the step whose checkpoint is never pruned. None prunes by age alone."""
        return state.best[1] if self.config.checkpoint.keep_best and state.best is not None else None


def _how_accepted(change: Change, *, is_fork: bool) -> str:
    if change.kind == "repaired":
        return ", as its failures stopped the run"
    return ", by checkpoint.accept_changes" if change.kind == "results" and not is_fork else ""
