"""A plan in words and tables, for a terminal and for Markdown alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from megatron_dppo.commands.plan.arithmetic import MEAN_LENGTH
from megatron_dppo.commands.plan.measured import STATIC, TEACHER
from megatron_dppo.commands.plan.plan import TIGHT, Plan, RankPlan, once_an_update
from megatron_dppo.commands.plan.rehearse import HOT
from megatron_dppo.commands.plan.search import Candidate
from megatron_dppo.config.layout import format_layout
from megatron_dppo.report.steps.files import step_bytes

_GIB = 2**30
_PARTS = ("head", "row", "replay")
"""Phases with a column of their own."""


def as_text(plan: Plan) -> str:
    """The whole plan."""
    note = [] if plan.model.note is None else [plan.model.note]
    parts = [
        *note,
        format_layout(plan.layout, plan.config.batch),
        _batch(plan),
        "",
        _memory(plan),
        "",
        _collectives(plan),
    ]
    parts += ["", _time(plan), "", _rollouts(plan), _columns(plan), *_colocated(plan), *_teacher(plan)]
    parts += [_transfers(plan)]
    parts += ["", _verdict(plan)]
    return "\n".join(parts)


def gib(size: float) -> str:
    """``12.34``, or ``0.0012`` for what would be 0.00."""
    value = size / _GIB
    return f"{value:.2f}" if value >= 0.01 or value == 0 else f"{value:.2g}"


def _short(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table with columns in line."""
    every = [list(head), *map(list, lines)]
    widths = [max(len(line[i]) for line in every) for i in range(len(head))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in every
    ]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])


def _batch(plan: Plan) -> str:
    batch, train = plan.batch, plan.config.train
    return (
        f"batch    {batch.samples_per_update} samples an update on each data parallel rank, {batch.mean_tokens} tokens "
        f"each if responses are {MEAN_LENGTH:g} x max_new_tokens long (an assumption) = {batch.micro_batches} "
        f"micro-batches of {train.micro_batch_tokens} tokens"
    )


def _memory(plan: Plan) -> str:
    named = (*_PARTS, TEACHER) if plan.config.distillation.is_exact else _PARTS
    head = ["GiB of rank", *STATIC, "activations", *named, "rest", "peak", "in", "with all", "fits"]
    lines = []
    for name, rank in plan.ranks.items():
        peak = rank.measured.peak
        others = {phase: size for phase, size in peak.by_phase.items() if phase not in STATIC}
        activations = others.pop("forward", 0) + others.pop("backward", 0)
        parts = [others.pop(part, 0) for part in named]
        sizes = [*(rank.measured.static[part] for part in STATIC), activations, *parts, sum(others.values())]
        fits = _fits(plan, plan.machine.memory - rank.total)
        lines.append([_rank(name, rank), *map(gib, sizes), gib(peak.total), peak.phase, gib(rank.total), fits])
    start = max((rank.measured.start_peak.total for rank in plan.ranks.values()), default=0)
    after = (
        f"\nWhile model and optimizer are built: {gib(start)}. With all: the higher of that and of an "
        f"update, and {gib(plan.machine.reserved)} for the CUDA context and NCCL (an estimate); {plan.machine.name} "
        f"has {gib(plan.machine.memory)}."
    )
    return table(head, lines) + after + _on_host(plan)


def _on_host(plan: Plan) -> str:
    host = max((rank.measured.host for rank in plan.ranks.values()), default=0)
    if not host:
        return ""
    node = host * min(plan.machine.gpus_per_node, plan.layout.world_size)
    return (
        f"\nOn the host for the offloaded optimizer: {gib(host)} a rank, {gib(node)} a node. The gradients, a quarter "
        "of it, are page-locked, and torch rounds each up to a power of two."
    )


def _fits(plan: Plan, room: int) -> str:
    if room < 0:
        return f"NO, {gib(-room)} too much"
    return f"{'tight' if room < TIGHT * plan.machine.memory else 'yes'}, {gib(room)} left"


def _rank(name: str, rank: RankPlan) -> str:
    load = f", experts x {HOT:g}" if rank.role.expert_load != 1 else ""
    return f"{rank.role.rank} ({name}{load})"


def _collectives(plan: Plan) -> str:
    lines = []
    for name, rank in plan.ranks.items():
        calls: dict[tuple[str, str, int, str], float] = defaultdict(float)
        sizes: dict[tuple[str, str, int, str], float] = defaultdict(float)
        for phase, collective, ranks, count, size in rank.measured.collectives:
            if len(ranks) == 1:
                continue
            per = "an update" if once_an_update(phase, collective) else "a micro-batch"
            times = 1 if per == "an update" else rank.measured.micro_batches
            key = (collective.strip("_"), _stride(ranks), len(ranks), per)
            calls[key] += count / times
            sizes[key] += size / times
        for key, each in sorted(calls.items()):
            collective, stride, number, per = key
            lines.append([_rank(name, rank), collective, f"{number} {stride}", f"{each:g} {per}", gib(sizes[key])])
    if not lines:
        return "No collectives: every group has one rank."
    return table(["rank", "collective", "group", "calls", "GiB given by the rank"], lines)


def _stride(ranks: tuple[int, ...]) -> str:
    """Where a group's ranks lie."""
    steps = {right - left for left, right in pairwise(ranks)}
    return f"ranks, every {steps.pop()}" if len(steps) == 1 and steps != {1} else "neighbours"


def _time(plan: Plan) -> str:
    lines = []
    for name, rank in plan.ranks.items():
        per_micro_batch = sum(
            sum(work.flops.values()) for phase, work in rank.measured.work.items() if phase not in ("reduce", "update")
        )
        tera = per_micro_batch / rank.measured.micro_batches / 1e12
        step = rank.update_seconds * plan.batch.updates
        lines.append([_rank(name, rank), *map(_short, (tera, rank.update_seconds, rank.communication_seconds, step))])
    machine = plan.machine
    head = ["rank", "TFLOP a micro-batch", "s an update", "of it links", "s the updates of a step"]
    after = (
        _host_time(plan)
        + f"\nRoofline of {machine.name}: every operation at {machine.reached_flops:.0%} of the FLOP/s or "
        f"{machine.reached_bandwidth:.0%} of the bandwidth of the data sheet, nothing fused, nothing overlapped: "
        "+- 30 %, until it was measured."
    )
    return table(head, lines) + after


def _host_time(plan: Plan) -> str:
    seconds = max((rank.host_seconds for rank in plan.ranks.values()), default=0.0)
    if not seconds:
        return ""
    return f"\nOf an update, {_short(seconds)} s are those of the optimizer on the host, with the way there and back."


def _rollouts(plan: Plan) -> str:
    found = plan.rollouts
    per_token = f"rollouts {found.bytes_per_token / 1024:.0f} KiB of keys and values a token"
    if found.room is None or found.tokens_in_flight is None:
        return f"{per_token}; sampled in the trainer itself"
    if found.room <= 0:
        return f"{per_token}; the weights alone do NOT fit a server of {found.gpus_per_server} {plan.machine.name}"
    return (
        f"{per_token}; a server of {found.gpus_per_server} {plan.machine.name} has {gib(found.room)} GiB a GPU for "
        f"them: {found.tokens_in_flight} tokens in flight = {found.sequences} sequences of {found.longest} tokens"
        f"{_served(plan)}"
    )


def _served(plan: Plan) -> str:
    """What ``rollout.servers.model`` makes of the weights."""
    model = plan.config.rollout.servers.model
    if model is None:
        return ""
    here = any(Path(model).glob("*.safetensors"))
    how = "as rollout.servers.model has them" if here else "rollout.servers.model is not here: counted without it"
    return f"\n         its weights are {gib(plan.rollouts.weights)} GiB ({how})"


def _columns(plan: Plan) -> str:
    found = plan.columns
    kept = f"ids that the filters left ({found.kept // 4 - 1}, an assumption unless top_k says so)"
    parts = {
        "id and log-probability": found.sampled,
        "Top-K": found.topk,
        kept: found.kept,
        "experts": found.routes,
        "combine weights": found.router_weights,
    }
    told = ", ".join(f"{size} {name}" for name, size in parts.items() if size)
    return (
        f"columns  {found.token} bytes a response token from the engine: {told}; {gib(found.step)} GiB a step in the "
        f"host's memory of each data parallel rank{_recorded(plan)}"
    )


def _recorded(plan: Plan) -> str:
    """What ``log.rollouts_every`` writes."""
    config, found = plan.config, plan.columns
    if not config.log.rollouts_every:
        return ""
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    size = step_bytes(samples, config.rollout.max_new_tokens, more=found.token - found.sampled)
    return f"; at most {gib(size)} GiB a recorded step on disk (log.rollouts_every = {config.log.rollouts_every})"


def _colocated(plan: Plan) -> list[str]:
    """What trainer and servers have in each other's turn."""
    turns = [rank.sampling for rank in plan.ranks.values() if rank.sampling is not None]
    if not turns:
        return []
    host = max(rank.measured.static["weights"] + rank.measured.static["optimizer"] for rank in plan.ranks.values())
    asleep, given = gib(plan.machine.asleep), gib(max(turns))
    return [
        f"turns    {asleep} GiB of a GPU stay with a server that sleeps (an estimate); {given} GiB are in use when it "
        "has weights and cache again, and the probe reads the trainer's weights. Both are in 'with all'. "
        f"Up to {gib(host)} GiB of host memory a rank take the trainer's state"
    ]


def _teacher(plan: Plan) -> list[str]:
    teacher, config = plan.model.teacher, plan.config
    if teacher is None:
        return []
    hidden = teacher.hidden_bytes(config, plan.layout, plan.batch)
    kept = f", with {gib(hidden)} GiB of its hidden states of an update on the last stage" if hidden else ""
    on_device = gib(teacher.bytes_on_device(config, plan.layout))
    return [
        f"teacher  {gib(teacher.bytes_on_rank(config, plan.layout))} GiB of weights a rank: in host memory{kept}; "
        f"{on_device} GiB on the GPU while it looks at the responses, which is in 'with all'. The time of that pass is "
        "not counted"
    ]


def _transfers(plan: Plan) -> str:
    moved = plan.transfers
    sync = "sync     none: the engine has the trainer's weights"
    if moved.sync_seconds is not None:
        where, who = ("in the memory of each GPU", "each rank") if moved.sync_by_handle else ("on one link", "rank 0")
        sync = (
            f"sync     {gib(moved.sync)} GiB a publish, {moved.sync_seconds:.1f} s {where}, "
            f"{gib(moved.sync_buffer)} GiB of buckets on {who}"
        )
    files = f"files    {gib(moved.checkpoint)} GiB a checkpoint, {gib(moved.export)} GiB exported"
    return f"{sync}\n{files}; up to {gib(moved.save_host)} GiB of host memory a rank while one is written"


def _verdict(plan: Plan) -> str:
    if not plan.too_large:
        tight = " Tight: what is left may go to the allocator." if plan.is_tight else ""
        return f"Fits {plan.layout.world_size} x {plan.machine.name}.{tight}"
    return f"Does NOT fit {plan.layout.world_size} x {plan.machine.name}: {', '.join(plan.too_large)}."


def candidates_text(candidates: Sequence[Candidate]) -> str:
    """Settings as a table, with the flags that make them of the configuration."""
    head = ["layout", "GiB of the fullest rank", "fits", "s the updates of a step", "flags"]
    lines = []
    for one in candidates:
        plan, flags = one.plan, " ".join(one.flags) or "(as configured)"
        if plan is None:
            lines.append(["", "", f"cannot run: {one.reason.strip().splitlines()[-1]:.100}", "", flags])
            continue
        fullest = plan.machine.memory - plan.room
        lines.append([str(plan.layout), gib(fullest), _fits(plan, plan.room), _short(plan.step_seconds), flags])
    return table(head, lines)
