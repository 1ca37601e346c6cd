"""TransformerConfig and GPTModel from a Hugging Face configuration; model families add their own fields."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.moe import moe_utils
from torch.distributed import ProcessGroup

from megatron_dppo.config.layout import Layout
from megatron_dppo.config.model import ModelConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.hf.families import get_family
from megatron_dppo.hf.families.family import raise_unsupported
from megatron_dppo.hf.folder import model_shape
from megatron_dppo.mcore.fusions import (
    check_fp8,
    default_fusions,
    output_layer_without_fusion,
    row_multiple,
    summarize_kernels,
)
from megatron_dppo.mcore.head import hand_out_hidden_states
from megatron_dppo.mcore.mapping import use_fp32_decays
from megatron_dppo.mcore.overrides import checked_overrides
from megatron_dppo.mcore.pipeline import check_pipeline_split
from megatron_dppo.mcore.row_padding import check_padding_support
from megatron_dppo.mcore.setup import parallel_sizes
from megatron_dppo.mcore.spec import block_spec
from megatron_dppo.mcore.transformer_engine import (
    check_attention_support,
    correct_tensor_parallel_marks,
    has_transformer_engine,
)
from megatron_dppo.parallel.platform import DTYPES, Platform
from megatron_dppo.types import MicroBatch
from megatron_dppo.types.model_folder import HfConfig

Chunks = list[GPTModel]
"""The parts of the model on this rank: one, or several with a virtual pipeline."""


class LoadBalancingLosses:
    """Load-balancing losses that Megatron's routers logged since the last call."""

    def __init__(self, config: TransformerConfig, dp_group: ProcessGroup | None) -> None:
        self._dp_group = dp_group
        kinds = config.moe_router_load_balancing_type
        is_used = config.num_moe_experts is not None and bool(config.moe_aux_loss_coeff)
        names = [kinds] if isinstance(kinds, str) else kinds
        self._names = [_TRACKER_NAMES[name] for name in names if name in _TRACKER_NAMES] if is_used else []
        self._num_layers = config.num_layers
        frequency = config.moe_layer_freq
        self._num_routers = sum(frequency) if isinstance(frequency, list) else config.num_layers

    def collect(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Return each loss by name and clear the log; a collective.

        A loss is the mean over layers, micro-batches with tokens and ranks, without its coefficient. 1 is perfect
        balance.
        """
        if not self._names:
            return {}
        # A rank with fewer micro-batches than others runs empty ones, whose loss is logged as 0.
        num_rows = torch.tensor(sum(batch.num_padding < len(batch.tokens) for batch in batches))
        dist.all_reduce(num_rows, group=self._dp_group)
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        # A pipeline stage without routers has logged nothing, and still takes part in the reduction.
        for name in self._names:
            tracker.setdefault(name, {"values": torch.zeros(self._num_layers, device=device)})
        moe_utils.reduce_aux_losses_tracker_across_ranks(self._names)
        # Megatron's values are means over the data-parallel ranks.
        count = self._num_routers * int(num_rows) / dist.get_world_size(self._dp_group)
        values = {name: float(tracker[name]["values"].sum()) / count for name in self._names}
        moe_utils.clear_aux_losses_tracker()
        return values


_TRACKER_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
VOCAB_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this times the tensor-parallel size."""


def padded_vocab_size(vocab_size: int, tensor_model_parallel_size: int) -> int:
    """Return the rows of the embedding. Entries from ``vocab_size`` on never enter the softmax."""
    multiple = VOCAB_MULTIPLE * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def transformer_config(
    hf_config: HfConfig, model: ModelConfig, layout: Layout, platform: Platform, *, router_replay: bool = False
) -> TransformerConfig:
    """Return Megatron's TransformerConfig of a model.

    Defaults, fused kernels, the family's fields and ``model.transformer`` follow each other; later ones win.
    """
    has_te = platform.is_cuda and has_transformer_engine()
    shape = model_shape(hf_config)
    check_attention_support(
        model.dtype,
        layout.cp,
        transformer_engine=has_te,
        windows=bool(shape.window_layers) or shape.has_attention_sinks,
        cp_comm_type=model.transformer.get("cp_comm_type"),
    )
    family_fields = get_family(hf_config).fields(hf_config, shape)
    # The name of Megatron's argument, which its TransformerConfig has as a function.
    if family_fields.pop("quick_geglu", False):
        family_fields["activation_func"] = quick_gelu
    _check_routes(hf_config, family_fields)
    values: dict[str, Any] = dict(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        num_attention_heads=hf_config.num_attention_heads,
        # A family with experts in every layer may have no such key.
        ffn_hidden_size=getattr(hf_config, "intermediate_size", None),
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        **training_fields(model, layout, platform),
        moe_enable_routing_replay=router_replay,
    )
    overrides = checked_overrides(model.transformer, router_replay=router_replay)
    check_padding_support(overrides, layout.row_multiple * row_multiple(overrides))
    check_fp8(overrides, model.dtype, platform, transformer_engine=has_te)
    fused = default_fusions(
        overrides, is_cuda=platform.is_cuda, engine=has_te, experts=bool(family_fields.get("num_moe_experts"))
    )
    kind = MLATransformerConfig if family_fields.get("multi_latent_attention") else TransformerConfig
    try:
        config = kind(**(values | fused | family_fields | overrides))
    # Megatron raises ValueError, AssertionError, ImportError, AttributeError, ...
    except Exception as error:
        raise ConfigError(
            f"Megatron's TransformerConfig rejects this model, layout and model.transformer = {model.transformer}: "
            f"{type(error).__name__}: {error}. Fix: change model.transformer or [parallel]"
        ) from error
    check_pipeline_split(config, layout)
    _set_yarn(config, get_family(hf_config).rope(hf_config).yarn or {})
    return config


def _check_routes(hf_config: HfConfig, family_fields: Mapping[str, Any]) -> None:
    """Check that a token's experts exist, and that their router gets a gradient."""
    topk, experts = family_fields.get("moe_router_topk", 0), family_fields.get("num_moe_experts", 0)
    if topk > experts:
        raise_unsupported(hf_config, "num_experts_per_tok", topk, f"at most the {experts} experts")
    if topk == 1 and family_fields.get("moe_router_pre_softmax") is False:
        # The weight of the only expert is always 1, so the router has no gradient.
        raise_unsupported(hf_config, "num_experts_per_tok", 1, "at least 2 with norm_topk_prob = true")


def _set_yarn(config: TransformerConfig, yarn: Mapping[str, object]) -> None:
    if yarn and config.apply_rope_fusion:
        raise ConfigError(
            "model.transformer.apply_rope_fusion = true with YaRN: the fused kernel leaves out YaRN's factor in packed "
            "rows. Fix: remove the key"
        )
    for name, value in yarn.items():
        setattr(config, f"yarn_{name}", value)


def training_fields(model: ModelConfig, layout: Layout, platform: Platform) -> dict[str, Any]:
    """Return the TransformerConfig fields that follow from the run, whatever the model."""
    dtype = DTYPES[model.dtype]
    return dict(
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bf16=model.dtype == "bf16",
        fp16=model.dtype == "fp16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=not platform.is_cuda,
        # False would be faster, but Megatron marks tensor-parallel weights only while it initializes them. Without the
        # marks the gradient norm, and so clipping, is wrong under tensor parallelism.
        perform_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        # The loss returns sums. Megatron divides the gradients once, by the token count of all micro-batches and
        # ranks. With False each micro-batch would be divided by its own count.
        calculate_per_token_loss=True,
        # Pipeline stages exchange the length of each row. The allgather dispatcher rejects variable lengths, and all
        # its rows are padded to one length.
        variable_seq_lengths=layout.pp > 1 and model.transformer.get("moe_token_dispatcher_type") != "allgather",
        # Megatron checks this field for dense models too, and its default rejects variable lengths.
        moe_token_dispatcher_type="alltoall",
        **parallel_sizes(layout),
        sequence_parallel=layout.sequence_parallel,
        overlap_p2p_comm=layout.overlap_p2p_comm,
        # The interleaved schedule refuses both at once.
        batch_p2p_comm=not layout.overlap_p2p_comm,
    )


def kernel_summary(config: TransformerConfig, model: ModelConfig) -> str:
    """Return one line for the start of a run on CUDA: the kind of layers, fused kernels, and why one is off."""
    return summarize_kernels(config, model.transformer, engine=has_transformer_engine())


def build_model(config: TransformerConfig, hf_config: HfConfig, pp_rank: int, device: torch.device) -> Chunks:
    """Return this rank's model chunks, one per virtual pipeline stage, with weights that are not loaded yet."""

    def make(vp_stage: int | None, **stage: bool) -> GPTModel:
        model = GPTModel(
            config,
            block_spec(config, model_shape(hf_config), vp_stage),
            vocab_size=padded_vocab_size(hf_config.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=hf_config.max_position_embeddings,
            **get_family(hf_config).rope(hf_config).arguments(),
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
            vp_stage=vp_stage,
            **stage,
        )
        use_fp32_decays(model)
        return model

    try:
        return make_chunks(config, pp_rank, device, make)
    # No RuntimeError: the memory of a GPU may be too small.
    except (AssertionError, ValueError, TypeError, NotImplementedError, ImportError, AttributeError) as error:
        raise ConfigError(
            "Megatron cannot build the model with this layout and model.transformer: "
            f"{type(error).__name__}: {error}. Fix: change model.transformer or [parallel]"
        ) from error


def make_chunks(
    config: TransformerConfig, pp_rank: int, device: torch.device, make: Callable[..., GPTModel]
) -> list[GPTModel]:
    """Return this rank's model chunks, made by ``make(vp_stage, pre_process=..., post_process=...)``."""
    vpp_size = config.virtual_pipeline_model_parallel_size
    last_stage = config.pipeline_model_parallel_size - 1
    with output_layer_without_fusion() as chunks:
        for stage in range(vpp_size or 1):
            # The embedding is in the first chunk of the first stage, the output layer in the last of the last one.
            model = make(
                stage if vpp_size else None,
                pre_process=pp_rank == 0 and stage == 0,
                post_process=pp_rank == last_stage and stage == (vpp_size or 1) - 1,
            )
            correct_tensor_parallel_marks(model)
            hand_out_hidden_states(model)
            chunks.append(model.to(device))
    return chunks
