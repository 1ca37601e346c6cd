"""The parallel layout: how ranks, layers, heads, experts and samples divide, checked before a run starts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from megatron_dppo.config.model import ParallelConfig
from megatron_dppo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Samples and optimizer updates per step."""

    prompts_per_step: int
    """Prompts of one rollout step, over all ranks."""
    samples_per_prompt: int
    """Responses sampled for each prompt."""
    mini_batches: int
    """Optimizer updates per epoch."""
    epochs: int
    """Passes over the samples of one step."""
    num_steps: int
    """Rollout steps of the run."""


@dataclass(frozen=True, kw_only=True)
class LinearAttentionShape:
    """The sizes of linear attention by gated delta nets, in the layers that have it."""

    layers: tuple[int, ...]
    """Indices of the layers, from 0."""
    num_key_heads: int
    """Number of heads of queries and keys."""
    num_value_heads: int
    """Number of heads of values, each of which has a state ``[key_head_dim, value_head_dim]``."""
    key_head_dim: int
    value_head_dim: int

    @property
    def sections(self) -> tuple[int, ...]:
        """Rows of queries, keys, values, output gates, beta and alpha in Megatron's input projection."""
        keys = self.num_key_heads * self.key_head_dim
        values = self.num_value_heads * self.value_head_dim
        return keys, keys, values, values, self.num_value_heads, self.num_value_heads


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model that a layout must divide."""

    family: str
    """``model_type`` of config.json."""
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    num_experts: int | None
    """Number of experts per layer. None for a dense model."""
    hidden_size: int
    vocab_size: int
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_qk_norm_over_heads: bool = False
    """True if the norms of queries and keys are over all heads together, not over each."""
    has_shared_expert: bool = False
    """True if an additional expert processes every token."""
    has_router_bias: bool = False
    """True if routers choose by scores plus a bias (a buffer)."""
    has_latent_attention: bool = False
    """True for MLA instead of grouped-query attention."""
    has_latent_queries: bool = False
    """True if MLA also compresses the queries (``q_lora_rank``)."""
    num_mtp_layers: int = 0
    """Multi-token-prediction layers after the last layer. They are ignored."""
    dense_layers: tuple[int, ...] = ()
    """Indices of layers without experts in a mixture-of-experts model, from 0."""
    linear: LinearAttentionShape | None = None
    """Linear attention. None for a model with full attention in every layer."""
    window_layers: tuple[int, ...] = ()
    """Indices of layers with a sliding window, from 0."""
    has_attention_sinks: bool = False
    """True if the softmax of attention has a further score for each head."""
    has_linear_bias: bool = False
    """True if the output projection, routers and experts have biases."""

    def tensor_parallel_shard(self, parts: int) -> Self:
        """Return the shape with the heads of one of ``parts`` tensor-parallel ranks."""
        linear = self.linear
        if linear is not None:
            linear = replace(
                linear,
                num_key_heads=linear.num_key_heads // parts,
                num_value_heads=linear.num_value_heads // parts,
            )
        return replace(
            self,
            num_attention_heads=self.num_attention_heads // parts,
            num_query_groups=self.num_query_groups // parts,
            linear=linear,
        )

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the layers with linear attention, from 0."""
        return () if self.linear is None else self.linear.layers


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Resolved parallel sizes. ``vpp`` is 1 without an interleaved pipeline."""

    world_size: int
    tp: int
    pp: int
    vpp: int
    cp: int
    dp: int
    ep: int
    etp: int
    expert_dp: int
    sequence_parallel: bool
    overlap_p2p_comm: bool

    def __str__(self) -> str:
        """Return the short form, for example ``tp1 pp1 cp1 dp2 ep2 etp1``."""
        virtual = f" vpp{self.vpp}" if self.vpp > 1 else ""
        return f"tp{self.tp} pp{self.pp}{virtual} cp{self.cp} dp{self.dp} ep{self.ep} etp{self.etp}"

    @property
    def sequence_multiple(self) -> int:
        """Multiple to which sequences are padded: context parallelism splits each into 2 cp chunks, two per rank."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def row_multiple(self) -> int:
        """Multiple to which packed rows are padded: sequence parallelism splits each context-parallel part of a row."""
        return math.lcm(self.sequence_multiple, self.cp * (self.tp if self.sequence_parallel else 1))

    @property
    def micro_batch_multiple(self) -> int:
        """Multiple that the number of micro-batches must be (Megatron's interleaved schedule)."""
        return self.pp if self.vpp > 1 else 1

    @property
    def lockstep_ranks(self) -> int:
        """Number of consecutive data-parallel ranks that expert parallelism synchronizes in each layer.

        If these groups and those of tensor and context parallelism do not nest, all ranks are assumed to synchronize.
        """
        # One copy of the experts spans ep * etp ranks; one copy of the dense layers spans tp * cp ranks.
        expert_ranks = self.ep * self.etp
        replica_ranks = self.tp * self.cp
        if expert_ranks <= replica_ranks and replica_ranks % expert_ranks == 0:
            return 1
        replicas = expert_ranks // replica_ranks
        return replicas if expert_ranks % replica_ranks == 0 and self.dp % replicas == 0 else self.dp


_SPLIT_FIELDS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Fields of ``model.transformer`` that split the layers unevenly over pipeline stages."""


def layer_split(transformer: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of ``model.transformer`` that split the layers unevenly. Empty for an even split."""
    return {name: transformer[name] for name in _SPLIT_FIELDS if transformer.get(name) not in (None, False)}


def resolve_layout(
    parallel: ParallelConfig,
    batch: BatchSizes | None,
    world_size: int,
    shape: ModelShape,
    transformer: Mapping[str, object] | None = None,
) -> Layout:
    """Resolve the layout of a run, whose prompts and samples must also divide. Without ``batch`` they need not.

    ``transformer`` is ``model.transformer``, which may split the layers unevenly; Megatron's own functions check that
    split (``mcore/pipeline.py``).
    """
    layout = unchecked_layout(parallel, world_size)
    # Stop here if the world size does not divide: dp would be wrong, and so would be all checks below.
    _raise_if_any(_world_problems(parallel, layout))
    batch_problems = [] if batch is None else _batch_problems(batch, layout)
    _raise_if_any(_model_problems(layout, shape, transformer or {}) + batch_problems)
    return layout


def resolve_parallel(
    parallel: ParallelConfig, world_size: int, shape: ModelShape, transformer: Mapping[str, object] | None = None
) -> Layout:
    """Fill in the defaults of a layout and check that processes, layers, heads and experts divide."""
    return resolve_layout(parallel, None, world_size, shape, transformer)


def pipeline_split(num_layers: int, pp: int, vpp: int) -> dict[str, object]:
    """Return the fields of ``model.transformer`` that split layers as evenly as possible over pipeline stages.

    They are empty if the layers divide by the stages ``pp`` times the ``vpp`` chunks of each, or are fewer.

    Example:
        Qwen3-235B-A22B has 94 layers: four stages get 24, 24, 24 and 22.

        >>> pipeline_split(94, 4, 1)
        {'num_layers_in_last_pipeline_stage': 22}
        >>> pipeline_split(5, 2, 2)
        {'pipeline_model_parallel_layout': 'Ett|t|t|tL'}
    """
    chunks = pp * vpp
    if num_layers % chunks == 0 or num_layers < chunks:
        return {}
    # All stages but the last get as many as the largest must have.
    most = -(-num_layers // chunks)
    last = num_layers - (pp - 1) * most * vpp
    if last > 0 and last % vpp == 0:
        return {"num_layers_in_last_pipeline_stage": last}
    counts = [num_layers // chunks + (index < num_layers % chunks) for index in range(chunks)]
    table = "|".join("t" * count for count in counts)
    return {"pipeline_model_parallel_layout": f"E{table}L"}


def _raise_if_any(problems: list[str]) -> None:
    if problems:
        raise ConfigError("this layout cannot run:\n" + "\n".join(f"  - {p}" for p in problems))


def unchecked_layout(parallel: ParallelConfig, world_size: int) -> Layout:
    """Return the layout with its defaults filled in, without any check. ``dp`` is 0 if there are too few processes."""
    tp = parallel.tensor_model_parallel_size
    pp = parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    vpp = parallel.virtual_pipeline_model_parallel_size or 1
    ep = parallel.expert_model_parallel_size
    # Without expert parallelism Megatron computes wrong gradients unless etp equals tp (_silently_wrong_layouts).
    etp = parallel.expert_tensor_parallel_size or (tp if ep == 1 else 1)
    sequence_parallel = tp > 1 if parallel.sequence_parallel is None else parallel.sequence_parallel
    # The interleaved schedule is wrong without overlapped communication (_silently_wrong_layouts).
    overlap = vpp > 1 if parallel.overlap_p2p_comm is None else parallel.overlap_p2p_comm
    return Layout(
        world_size=world_size,
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        dp=world_size // (tp * pp * cp),
        ep=ep,
        etp=etp,
        expert_dp=world_size // (etp * ep * pp),
        sequence_parallel=sequence_parallel,
        overlap_p2p_comm=overlap,
    )


def _world_problems(parallel: ParallelConfig, layout: Layout) -> list[str]:
    problems = []
    world = layout.world_size
    tp = layout.tp
    pp = layout.pp
    cp = layout.cp
    ep = layout.ep
    etp = layout.etp
    if world % (tp * pp * cp):
        problems.append(
            f"tensor * pipeline * context parallel size = {tp} * {pp} * {cp} = {tp * pp * cp} does not divide the "
            f"{world} processes; start a multiple of {tp * pp * cp}, or lower one of them"
        )
    # Experts have their own grid of ranks, which must divide the world as well.
    if world % (etp * ep * pp):
        problems.append(
            f"expert tensor * expert * pipeline parallel size = {etp} * {ep} * {pp} = {etp * ep * pp} does not divide "
            f"the {world} processes; start a multiple of {etp * ep * pp}, or lower one of them"
        )
    if layout.sequence_parallel and tp == 1:
        problems.append(
            "sequence_parallel = true has no effect with tensor_model_parallel_size = 1; remove it, or use at least 2"
        )
    if parallel.overlap_param_gather and not (parallel.use_distributed_optimizer and parallel.overlap_grad_reduce):
        problems.append("overlap_param_gather = true needs use_distributed_optimizer and overlap_grad_reduce")
    return problems


def _model_problems(layout: Layout, shape: ModelShape, transformer: Mapping[str, object]) -> list[str]:
    checks = [
        (shape.num_attention_heads, layout.tp, "attention heads", "tensor_model_parallel_size"),
        (shape.num_query_groups, layout.tp, "query groups", "tensor_model_parallel_size"),
    ]
    if shape.linear is not None:
        # Context-parallel ranks compute the recurrence of different heads.
        parts, name = layout.tp * layout.cp, "tensor_model_parallel_size * context_parallel_size"
        checks += [
            (shape.linear.num_key_heads, parts, "key heads of linear attention", name),
            (shape.linear.num_value_heads, parts, "value heads of linear attention", name),
        ]
    if shape.num_experts:
        checks.append((shape.num_experts, layout.ep, "experts", "expert_model_parallel_size"))
    problems = [
        f"{count} {what} are not a multiple of {name} = {size} ({count} / {size} = {count / size:g})"
        for count, size, what, name in checks
        if count % size
    ]
    if not layer_split(transformer):
        problems += _layer_problems(layout, shape.num_layers)
    if not shape.num_experts and layout.ep > 1:
        problems.append(f"expert_model_parallel_size = {layout.ep}, but the model has no experts")
    if layout.overlap_p2p_comm and layout.vpp == 1:
        problems.append(
            "overlap_p2p_comm = true needs an interleaved pipeline, because Megatron's plain schedule has nothing to "
            "overlap; remove it, or set virtual_pipeline_model_parallel_size above 1"
        )
    if layout.vpp > 1 and layout.pp == 1:
        problems.append(
            f"virtual_pipeline_model_parallel_size = {layout.vpp} needs pipeline_model_parallel_size above 1"
        )
    return problems + _silently_wrong_layouts(layout, shape)


def _layer_problems(layout: Layout, num_layers: int) -> list[str]:
    chunks = layout.pp * layout.vpp
    if num_layers % chunks == 0:
        return []
    split = pipeline_split(num_layers, layout.pp, layout.vpp)
    if not split or layout.pp == 1:
        fix = "lower one of them"
    else:
        flags = " ".join(f"--model.transformer.{name} {value!r}" for name, value in split.items())
        fix = f"split them unevenly: {flags}"
    return [
        f"{num_layers} layers are not a multiple of pipeline * virtual pipeline size = {chunks} "
        f"({num_layers} / {chunks} = {num_layers / chunks:g}); {fix}"
    ]


def _silently_wrong_layouts(layout: Layout, shape: ModelShape) -> list[str]:
    """Return problems of layouts that Megatron Core 0.16.1 accepts but computes wrongly, without an error."""
    problems = []
    if shape.num_experts and layout.ep == 1 and layout.etp != layout.tp:
        problems.append(
            f"expert_tensor_parallel_size = {layout.etp} with tensor_model_parallel_size = {layout.tp} and "
            "expert_model_parallel_size = 1: Megatron then treats the experts' shards as replicas of dense weights, "
            "and their gradients are silently wrong (the forward pass is exact). Use expert_tensor_parallel_size = "
            f"{layout.tp}, or expert parallelism above 1"
        )
    if layout.vpp > 1 and not layout.overlap_p2p_comm:
        problems.append(
            f"virtual_pipeline_model_parallel_size = {layout.vpp} with overlap_p2p_comm = false: Megatron's "
            "interleaved schedule then computes a wrong loss, and with 4 or more micro-batches gradients wrong by a "
            "factor of 10. Set overlap_p2p_comm = true"
        )
    if shape.num_experts and shape.has_linear_bias and layout.etp > 1:
        problems.append(
            f"expert_tensor_parallel_size = {layout.etp} with experts that have biases: Megatron adds each bias on "
            "every rank and refuses it. Set expert_tensor_parallel_size = 1 and expert_model_parallel_size above 1"
        )
    if shape.num_experts and layout.tp > 1 and not layout.sequence_parallel:
        problems.append(
            f"tensor_model_parallel_size = {layout.tp} with sequence_parallel = false: Megatron's experts need "
            "sequence parallelism under tensor parallelism. Set sequence_parallel = true"
        )
    return problems


def _batch_problems(batch: BatchSizes, layout: Layout) -> list[str]:
    problems = []
    prompts = batch.prompts_per_step
    samples = batch.samples_per_prompt
    if prompts % layout.dp:
        problems.append(
            f"rollout.prompts_per_step = {prompts} is not a multiple of the data parallel size {layout.dp} "
            f"({layout.world_size} processes / (tp {layout.tp} * pp {layout.pp} * cp {layout.cp}))"
        )
    elif (prompts // layout.dp * samples) % batch.mini_batches:
        per_rank = prompts // layout.dp * samples
        problems.append(
            f"each data parallel rank has {prompts} / {layout.dp} * {samples} = {per_rank} samples, which do not "
            f"divide into train.mini_batches = {batch.mini_batches}"
        )
    return problems


def format_layout(layout: Layout, batch: BatchSizes) -> str:
    """Return the layout and the batch arithmetic as text, printed before the run starts."""
    prompts = batch.prompts_per_step
    samples = batch.samples_per_prompt
    total = prompts * samples
    updates = batch.mini_batches * batch.epochs
    per_rank = total // max(1, layout.dp)
    return (
        f"layout   {layout.world_size} processes = {layout}\n"
        f"rollout  {prompts} prompts x {samples} samples = {total} samples a step, {per_rank} on each of "
        f"{layout.dp} data parallel ranks\n"
        f"updates  {batch.epochs} epoch(s) x {batch.mini_batches} mini-batches of "
        f"{total // batch.mini_batches} samples = {updates} a step, {updates * batch.num_steps} in "
        f"{batch.num_steps} steps"
    )
