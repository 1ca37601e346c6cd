"""A plan as text and Markdown tables, for the terminal and for documents."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from megatron_dppo.config.layout import format_layout
from megatron_dppo_plan.arithmetic import MEAN_LENGTH_RATIO
from megatron_dppo_plan.measurement import STATIC, TEACHER
from megatron_dppo_plan.plan import TIGHT, Plan, RankPlan, dispatch_ratio, is_once_per_update
from megatron_dppo_plan.rehearse import HOT_EXPERT_LOAD
from megatron_dppo_plan.search import Candidate
from megatron_dppo_plan.step_time import LAUNCH_SIGNAL_SECONDS, StepPlan, recorded_step_bytes

_GIB = 2**30
_PHASE_COLUMNS = ("head", "row", "replay")
"""Phases with a column in the memory table."""


def format_plan(plan: Plan, *, verbose: bool = False) -> str:
    """Return the plan as text. ``verbose`` adds the collectives of each rank."""
    note = [] if plan.model.note is None else [plan.model.note]
    if plan.config.model.transformer.get("moe_token_dispatcher_type") == "flex":
        ratio = dispatch_ratio(plan.config, plan.model.hf_config, plan.layout)
        note.append(
            "note     the flex dispatcher is planned as alltoall, with the bytes of DeepEP: a token is sent once to "
            f"each rank, {ratio:.2f} of alltoall's"
        )
    parts = [*note, format_layout(plan.layout, plan.config.batch), _batch_line(plan), "", _memory_table(plan), ""]
    if verbose:
        parts += [_collectives_table(plan), ""]
    parts += [_time_table(plan), "", _rollouts_line(plan), _columns_line(plan)]
    parts += [*_colocated_lines(plan), *_teacher_lines(plan), _transfer_lines(plan), *format_step(plan.step, plan)]
    parts += ["", _verdict(plan)]
    return "\n".join(parts)


def format_gib(size: float) -> str:
    """Return bytes in GiB: ``12.34``, or ``0.0012`` for what would be 0.00."""
    value = size / _GIB
    return f"{value:.2f}" if value >= 0.01 or value == 0 else f"{value:.2g}"


def _short(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def format_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    all_lines = [list(head), *map(list, lines)]
    widths = [max(len(line[i]) for line in all_lines) for i in range(len(head))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in all_lines
    ]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])


def _batch_line(plan: Plan) -> str:
    batch = plan.batch
    budget = plan.config.train.micro_batch_tokens
    mean = f"responses of {batch.mean_response}"
    if batch.mean_response == round(MEAN_LENGTH_RATIO * plan.config.rollout.max_new_tokens):
        mean = f"assuming responses of {MEAN_LENGTH_RATIO:g} x max_new_tokens"
    length = f"{budget} tokens"
    if batch.row_tokens != budget:
        length = (
            f"up to {batch.row_tokens} tokens: longer than train.micro_batch_tokens = {budget}, because a sample of "
            "data.max_prompt_tokens + rollout.max_new_tokens has a micro-batch of its own"
        )
    return (
        f"batch    {batch.samples_per_update} samples per update on each data-parallel rank, {batch.mean_tokens} "
        f"tokens each ({mean}) = {batch.micro_batches} micro-batches of {length}"
    )


def _memory_table(plan: Plan) -> str:
    phases = (*_PHASE_COLUMNS, TEACHER) if plan.config.distillation.is_exact else _PHASE_COLUMNS
    head = ["rank, GiB", *STATIC, "activations", *phases, "other", "peak", "peak phase", "total", "fits"]
    lines = []
    for name, rank in plan.ranks.items():
        peak = rank.measured.peak
        by_phase = {phase: size for phase, size in peak.by_phase.items() if phase not in STATIC}
        activations = by_phase.pop("forward", 0) + by_phase.pop("backward", 0)
        phase_sizes = [by_phase.pop(phase, 0) for phase in phases]
        static_sizes = [rank.measured.static[part] for part in STATIC]
        sizes = [*static_sizes, activations, *phase_sizes, sum(by_phase.values()), peak.total]
        fits = _format_fit(plan, plan.machine.memory - rank.total)
        lines.append([_format_rank(name, rank), *map(format_gib, sizes), peak.phase, format_gib(rank.total), fits])
    start = max((rank.measured.start_peak.total for rank in plan.ranks.values()), default=0)
    between = max((rank.between_updates for rank in plan.ranks.values()), default=0)
    machine = plan.machine
    # Between updates there are more than weights, gradients and optimizer.
    buckets = plan.transfers.sync_buffer
    parts = [f"{format_gib(buckets)} of weight-sync buckets"] if buckets else []
    parts += [] if plan.model.teacher is None else ["the teacher"]
    beside = f" (with {' or '.join(parts)})" if parts else ""
    explanation = (
        f"\ntotal = the largest of this peak, {format_gib(start)} GiB while model and optimizer are built, and "
        f"{format_gib(between)} GiB between updates{beside}, plus "
        f"{_local_engine_parts(plan)}{format_gib(machine.reserved)} for CUDA context and NCCL (an estimate); "
        f"{machine.name} has {format_gib(machine.memory)} GiB."
    )
    return format_table(head, lines) + explanation + _host_memory(plan)


def _local_engine_parts(plan: Plan) -> str:
    weights, batch = plan.local_engine
    if not weights:
        return ""
    when = ", which is there during updates too" if plan.config.train.max_staleness else " between updates"
    return f"{format_gib(weights)} of the local engine's weights, up to {format_gib(batch)} of its batch{when}, "


def _host_memory(plan: Plan) -> str:
    host = max((rank.measured.host for rank in plan.ranks.values()), default=0)
    if not host:
        return ""
    node = host * min(plan.machine.gpus_per_node, plan.layout.world_size)
    return (
        f"\nOffloaded optimizer on the host: {format_gib(host)} GiB per rank, {format_gib(node)} per node. The "
        "gradients, a quarter of it, are page-locked, and torch rounds each up to a power of two."
    )


def _format_fit(plan: Plan, free_bytes: int) -> str:
    if free_bytes < 0:
        return f"NO, {format_gib(-free_bytes)} too much"
    return f"{'tight' if free_bytes < TIGHT * plan.machine.memory else 'yes'}, {format_gib(free_bytes)} left"


def _format_rank(name: str, rank: RankPlan) -> str:
    load = f", experts x {HOT_EXPERT_LOAD:g}" if rank.role.expert_load != 1 else ""
    return f"{rank.role.rank} ({name}{load})"


def _collectives_table(plan: Plan) -> str:
    lines = []
    for name, rank in plan.ranks.items():
        # Keys: collective, layout of the group, its size, "update" or "micro-batch".
        calls: dict[tuple[str, str, int, str], float] = defaultdict(float)
        sizes: dict[tuple[str, str, int, str], float] = defaultdict(float)
        for phase, collective, ranks, count, size in rank.measured.collectives:
            if len(ranks) == 1:
                continue
            unit = "update" if is_once_per_update(phase, collective) else "micro-batch"
            repeats = 1 if unit == "update" else rank.measured.micro_batches
            key = (collective.strip("_"), _group_layout(ranks), len(ranks), unit)
            calls[key] += count / repeats
            sizes[key] += size / repeats
        for key, num_calls in sorted(calls.items()):
            collective, group_layout, group_size, unit = key
            group = f"{group_size} {group_layout}"
            lines.append(
                [_format_rank(name, rank), collective, group, f"{num_calls:g} per {unit}", format_gib(sizes[key])]
            )
    if not lines:
        return "No collectives: every group has one rank."
    return format_table(["rank", "collective", "group", "calls", "GiB of input"], lines)


def _group_layout(ranks: tuple[int, ...]) -> str:
    """Return ``neighbors``, or the distance between the ranks of a group."""
    steps = {right - left for left, right in pairwise(ranks)}
    return f"ranks, every {steps.pop()}" if len(steps) == 1 and steps != {1} else "neighbors"


def _time_table(plan: Plan) -> str:
    lines = []
    for name, rank in plan.ranks.items():
        flops = sum(
            sum(work.flops.values()) for phase, work in rank.measured.work.items() if not is_once_per_update(phase)
        )
        tera_flops = flops / rank.measured.micro_batches / 1e12
        step_seconds = rank.update_seconds * plan.batch.updates
        values = (tera_flops, rank.update_seconds, rank.communication_seconds, step_seconds)
        lines.append([_format_rank(name, rank), *map(_short, values)])
    machine = plan.machine
    head = ["rank", "TFLOP per micro-batch", "s per update", "of which links", "s of a step's updates"]
    explanation = (
        f"\nRoofline of {machine.name}: {machine.flops_efficiency:.0%} of the data sheet's FLOP/s, "
        f"{machine.bandwidth_efficiency:.0%} of its bandwidth, no fusion, no overlap; +- 30 % until it is measured."
    )
    host = max((rank.host_seconds for rank in plan.ranks.values()), default=0.0)
    if host:
        offloaded = f"\nThe offloaded optimizer takes {_short(host)} s of an update, transfers included."
        explanation = offloaded + explanation
    return format_table(head, lines) + explanation


def _rollouts_line(plan: Plan) -> str:
    cache = plan.kv_cache
    per_token = f"rollouts {cache.bytes_per_token / 1024:.0f} KiB of keys and values per token"
    if cache.window:
        per_token += f", and {cache.window_bytes_per_token / 1024:.0f} KiB for each of the last {cache.window}"
    if cache.cache_bytes is None or cache.tokens_in_flight is None:
        return f"{per_token}; sampled by the local engine in the training processes"
    servers = f"{cache.gpus_per_server} {plan.machine.name}"
    if cache.cache_bytes <= 0:
        return f"{per_token}; the weights alone do NOT fit a server of {servers}"
    served = ""
    if (model := plan.config.rollout.servers.model) is not None:
        exists = any(Path(model).glob("*.safetensors"))
        source = "files of rollout.servers.model" if exists else "rollout.servers.model does not exist on this machine"
        served = f"\n         its weights are {format_gib(cache.weight_bytes)} GiB ({source})"
    return (
        f"{per_token}; a server of {servers} has {format_gib(cache.cache_bytes)} GiB per GPU for them: "
        f"{cache.tokens_in_flight} tokens in flight = {cache.sequences} sequences of {cache.longest} tokens{served}"
    )


def _columns_line(plan: Plan) -> str:
    token_bytes = plan.token_bytes
    mask_size = token_bytes.sampling_mask // 4 - 1
    parts = {
        "id and log-probability": token_bytes.sampled,
        "Top-K": token_bytes.topk,
        f"sampling mask ({mask_size} ids, an assumption unless top_k sets it)": token_bytes.sampling_mask,
        "experts": token_bytes.routes,
        "combine weights": token_bytes.router_weights,
    }
    listed = ", ".join(f"{size} {name}" for name, size in parts.items() if size)
    recorded = ""
    if every := plan.config.log.rollouts_every:
        size = recorded_step_bytes(plan.config, token_bytes)
        recorded = f"; at most {format_gib(size)} GiB on disk per recorded step (log.rollouts_every = {every})"
    return (
        f"columns  {token_bytes.total} bytes per response token from the engine: {listed}; "
        f"{format_gib(token_bytes.step)} GiB per step in host memory of each data-parallel rank{recorded}"
    )


def _colocated_lines(plan: Plan) -> list[str]:
    sampling = [rank.sampling for rank in plan.ranks.values() if rank.sampling is not None]
    if not sampling:
        return []
    host = max(rank.measured.static["weights"] + rank.measured.static["optimizer"] for rank in plan.ranks.values())
    sleeping = format_gib(plan.machine.sleeping_server_bytes)
    return [
        f"servers  colocated: a sleeping server keeps {sleeping} GiB of its GPU (an estimate), and "
        f"{format_gib(max(sampling))} GiB are in use while it samples and the probe reads the trainer's weights; both "
        f"are in total. The trainer's state takes up to {format_gib(host)} GiB of host memory per rank meanwhile"
    ]


def _teacher_lines(plan: Plan) -> list[str]:
    teacher = plan.model.teacher
    if teacher is None:
        return []
    config = plan.config
    hidden_bytes = teacher.hidden_bytes(config, plan.layout, plan.batch)
    hidden = f", and {format_gib(hidden_bytes)} GiB of hidden states on the last stage" if hidden_bytes else ""
    on_device = format_gib(teacher.bytes_on_device(config, plan.layout))
    on_rank = format_gib(teacher.bytes_on_rank(config, plan.layout))
    return [
        f"teacher  {on_rank} GiB of weights per rank in host memory{hidden}; {on_device} GiB on the GPU while it "
        "scores responses, which are in total. The time of that pass is not counted"
    ]


def _transfer_lines(plan: Plan) -> str:
    transfers = plan.transfers
    sync = "sync     none: the local engine uses the trainer's weights"
    if transfers.sync_seconds is not None:
        link, ranks = ("each GPU's memory", "each rank") if transfers.sync_by_handle else ("one link", "rank 0")
        proof = f" and {plan.step.proof:.1f} s of proof" if plan.step.proof else ""
        sync = (
            f"sync     {format_gib(transfers.sync)} GiB per weight sync, {transfers.sync_seconds:.1f} s through "
            f"{link}{proof}, {format_gib(transfers.sync_buffer)} GiB of buckets on {ranks}"
        )
    return (
        f"{sync}\nfiles    {format_gib(transfers.checkpoint)} GiB per checkpoint, {format_gib(transfers.export)} GiB "
        f"exported; up to {format_gib(transfers.save_host)} GiB of host memory per rank while one is written"
    )


def _verdict(plan: Plan) -> str:
    machines = f"{plan.layout.world_size} x {plan.machine.name}"
    if not plan.fits:
        too_large = [*plan.oversized_ranks, *([] if plan.fits_host else ["the host memory"])]
        return f"Does NOT fit {machines}: {', '.join(too_large)}."
    tight = " Tight: the allocator may need the memory that is left." if plan.is_tight else ""
    return f"Fits {machines}.{tight}"


def format_step(step: StepPlan, plan: Plan) -> list[str]:
    """Return the lines on a whole step and the run: time, cost, time of a stop, host memory and disk."""
    checkpoint = plan.config.checkpoint
    best = " and the best one" if checkpoint.keep_best else ""
    room = f"{format_gib(plan.machine.host_memory)} GiB"
    warning = f" MORE than the {room} of a {plan.machine.name} node" if not step.fits_host(plan.machine) else ""
    optimizer = ", the optimizer" if any(rank.measured.host for rank in plan.ranks.values()) else ""
    state = ", the trainer's state while servers sample" if plan.config.rollout.servers.colocated else ""
    return [
        _step_line(step, plan),
        _run_line(step),
        *_stop_lines(step),
        f"host     {format_gib(step.host)} GiB per trainer node: a checkpoint that is written, columns of responses"
        f"{optimizer}{state}{warning}",
        f"disk     {format_gib(step.disk)} GiB: {checkpoint.keep} checkpoints{best}, one that is being written, the "
        f"export{', recorded steps' if plan.config.log.rollouts_every else ''}",
    ]


def _step_line(step: StepPlan, plan: Plan) -> str:
    updates = f"updates {_seconds(step.updates)} (by the slowest kind of rank)"
    if step.rollout is None:
        reason = "do not fit the servers" if step.servers else "of the local engine are not planned"
        return f"step     {_seconds(step.seconds)}: {updates}, sync {_seconds(step.sync)}; rollouts {reason}"
    gpus = f"{step.servers} servers of {plan.kv_cache.gpus_per_server} {plan.machine.name}"
    shared = "" if step.server_gpus else " that are the trainer's"
    order = "sampling of later steps runs beside the updates" if step.is_overlapped else "one after the other"
    rate = plan.batch.samples * plan.batch.mean_tokens / step.seconds / step.gpus
    return (
        f"step     {_seconds(step.seconds)}: rollouts {_seconds(step.rollout)} by {gpus}{shared}, {updates}, sync "
        f"{_seconds(step.sync)}; {order} = {rate:.0f} tokens per second and GPU"
    )


def _run_line(step: StepPlan) -> str:
    if step.num_steps is None or step.gpu_hours is None:
        return "run      its number of steps follows from run.num_epochs and the data"
    days = step.num_steps * step.seconds / 86400
    return (
        f"run      {step.num_steps} steps = {_short(days)} days, {step.gpu_hours:.0f} GPU-hours of {step.gpus} GPUs, "
        "without evaluations and saves"
    )


def _stop_lines(step: StepPlan) -> list[str]:
    needed = step.signal_seconds
    evaluation = f", an evaluation ({_seconds(step.evaluation)}, as its sampling)" if step.has_evaluation else ""
    lines = [
        f"stop     a step{evaluation} and a save ({_seconds(step.save)}) take {_seconds(step.stop_seconds)}. "
        f"Submit with --signal=B:TERM@{needed}"
    ]
    if needed > LAUNCH_SIGNAL_SECONDS:
        lines.append(
            f"         NOTE: launch/qwen3_moe_dppo.sh signals {LAUNCH_SIGNAL_SECONDS} s before its limit, and stops "
            "after the last step that fits. Preemption needs all of this time"
        )
    return lines


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def format_candidates(candidates: Sequence[Candidate]) -> str:
    """Return settings as a table, with the flags that set them."""
    head = ["layout", "GiB of the fullest rank", "fits", "s of a step's updates", "flags"]
    lines = []
    for candidate in candidates:
        plan = candidate.plan
        flags = " ".join(candidate.flags) or "(as configured)"
        if plan is None:
            last_line = candidate.reason.strip().splitlines()[-1]
            lines.append(["", "", f"cannot run: {last_line:.100}", "", flags])
            continue
        fullest = plan.machine.memory - plan.free_bytes
        fits = _format_fit(plan, plan.free_bytes) if plan.fits_host else "NO, too much on the host"
        lines.append([str(plan.layout), format_gib(fullest), fits, _short(plan.step.updates), flags])
    return format_table(head, lines)
