"""A session to a checkpoint and back."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_dppo.files.disk import require_space
from megatron_dppo.mcore.checkpoint_folder import prune, set_aside
from megatron_dppo.parallel.objects import agreed
from megatron_dppo.record.files import drop_after
from megatron_dppo.report.clock import PROGRESS
from megatron_dppo.report.metrics import MetricsWriter
from megatron_dppo.report.records import read_metrics
from megatron_dppo.report.trackers import Labels
from megatron_dppo.run.output import space_for_save
from megatron_dppo.run.resume import ResumePoint, layout_identity, run_identity
from megatron_dppo.run.session import Session
from megatron_dppo.run.starts import record_start
from megatron_dppo.run.stream.saved import SavedStream, load_contents, save_contents, why_unusable


def begin(session: Session) -> None:
    """Continue from the checkpoint that was found, if any, and open the run's records (a collective of all ranks).

    Everything that can refuse a start comes before: until here, the records of the run are as they were.
    """
    point, layout = session.resume_point, session.inputs.layout
    if point is not None:
        _restore(session, point)
    elif before := read_metrics(session.folder / "metrics.jsonl"):
        session.console.say(
            f"note     an earlier start here reached step {before[-1]['step']} and left no checkpoint: this one begins "
            "at step 0"
        )

    def write() -> str:
        for each in point.passed_over if point is not None else ():
            set_aside(each.checkpoint, each.kind)
        if point is not None:  # a save that was cut off while it pruned may have been the last one
            prune(session.checkpoint_folder, session.config.checkpoint.keep, _best_step(session))
        drop_after(session.folder, session.step)
        return record_start(
            session.folder,
            session.config,
            world_size=layout.world_size,
            layout=str(layout),
            resumed_step=session.step if point is not None else None,
            changes=[str(change) for change in point.changes] if point is not None else [],
        )

    if note := agreed(write, dist.group.WORLD):
        session.console.say(note)
    if dist.get_rank() == 0:
        session.writer = _open_writer(session)


def _open_writer(session: Session) -> MetricsWriter:
    config = session.config
    return MetricsWriter(
        session.folder,
        config.model_dump(),
        tensorboard=config.log.tensorboard,
        wandb_project=config.log.wandb_project,
        trackers=config.log.trackers,
        labels=Labels(
            project=config.log.project or config.log.wandb_project or "megatron_dppo",
            name=config.log.name or session.folder.resolve().name,
            group=config.log.group,
            tags=tuple(config.log.tags),
            offline=config.log.offline,
        ),
        resumed_step=session.step or None,
    )


def _restore(session: Session, point: ResumePoint) -> None:
    """Put the run back to where the checkpoint was written."""
    say = session.console.say
    state = session.trainer.load(point.checkpoint, same_layout=point.same_layout)
    session.step = state["step"]
    session.skipped_in_a_row, session.answers_before = state["skipped_in_a_row"], state["answers_before"]
    # The best checkpoint of another run is not in this folder.
    session.best = tuple(state["best"]) if state["best"] and not point.is_fork else None
    session.evaluation_due = state["evaluation_due"]
    for each in point.passed_over:
        say(f"warning  {each.checkpoint} is passed over: {each.reason}; it is renamed to end in .{each.kind}")
    version = session.trainer.policy_version
    did = "forked " if point.is_fork else "resumed"
    say(f"{did}  {point.checkpoint} (step {session.step}, policy version {version})")
    if not point.same_layout:
        say("         on another layout: the same curve up to rounding, not bit for bit")
    for change in point.changes:
        accepted = ", by checkpoint.accept_changes" if change.kind == "results" and not point.is_fork else ""
        say(f"         changed{accepted}: {change}")
    _restore_stream(session, state, point)


def _restore_stream(session: Session, state: dict[str, Any], point: ResumePoint) -> None:
    """Take the rollouts that were not trained on from the checkpoint, or their prompts back into the stream."""
    checkpoint, dp, prompts = point.checkpoint, session.inputs.layout.dp, session.inputs.train_prompts
    config = session.config
    before = SavedStream.of(state["stream"])
    saved = before.on(dp)
    if not point.same_stream:
        session.console.say("         on other prompts, or in another order: from the first of them")
        session.stream.restore(saved.from_the_first(session.step), {})
        return
    problem = why_unusable(
        saved,
        state["config"],
        config.train,
        data=config.data,
        rollout=config.rollout,
        agent=config.agent,
        reward=config.reward,
    )
    if problem and saved.num_prompts:
        session.console.say(f"         the rollouts that were sampled ahead are sampled again: {problem}")
    if problem:
        session.stream.restore(saved.without_draws(session.step), {})
        return
    contents = {}
    if session.engine is not None:
        contents = load_contents(before, dp, session.trainer.dp_rank, checkpoint, prompts.__getitem__)
    session.stream.restore(saved, contents)


def save_session(session: Session) -> None:
    """Write a checkpoint of this step, with all that was sampled and not trained on.

    With ``checkpoint.async_save`` it is complete when ``finish_save`` has said so.
    """
    finish_save(session, wait=True)
    session.take_gpus()
    groups, stream = session.groups, session.stream
    # One rank writes for each data-parallel rank: the one whose engine sampled.
    contents = stream.contents() if session.engine is not None else []
    state = {
        "step": session.step,
        "skipped_in_a_row": session.skipped_in_a_row,
        "answers_before": session.answers_before,
        "best": session.best,
        "evaluation_due": session.evaluation is not None,
        "stream": stream.saved().plain(),
        "identity": run_identity(session.config, session.inputs),
        "layout": layout_identity(session.config, session.inputs),
        "config": session.config.model_dump(mode="json"),
    }
    config, best = session.config.checkpoint, _best_step(session)
    also = partial(save_contents, contents, session.trainer.dp_rank)
    folder = session.checkpoint_folder
    agreed(lambda: require_space(folder, space_for_save(session.config, session.inputs), "a checkpoint"), groups.world)
    session.saving = session.trainer.save(
        folder, session.step, state, config.keep, best, also=also, background=session.save_group
    )


def finish_save(session: Session, *, wait: bool) -> None:
    """Say that the last checkpoint is complete, if it is and that was not said; ``wait`` until it is.

    Raises:
        DiskError: it cannot be written; older ones are as they were.
    """
    saving = session.saving
    if saving is None or not (wait or saving.is_done):
        return
    with PROGRESS.part("save"):
        path = saving.wait()
    session.saving = None
    session.console.say(f"saved    {path}" if saving.is_finite else f"saved    {path} {_NOT_FINITE}")


_NOT_FINITE = (
    "(its weights or optimizer state are NaN or infinite; the newest checkpoint with finite ones is kept, and the same "
    "command continues from there)"
)


def _best_step(session: Session) -> int | None:
    """The step whose checkpoint is kept whatever its age."""
    return session.best[1] if session.config.checkpoint.keep_best and session.best is not None else None
