"""Routes of training samples, complete, for router replay."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_dppo.types import RoutingShape, TrainingSample
from megatron_dppo_engines.route_checks import check_form, missing_rows


def with_all_routes(
    samples: Sequence[TrainingSample], shape: RoutingShape, rank_shape: RoutingShape | None = None
) -> list[TrainingSample]:
    """Return the samples with routes; those without any (a lost request) get missing rows.

    Checked are the shapes: the length of the sample, and the layers of the model or of this rank (``rank_shape``).
    """
    if samples and all(sample.routed_experts is None for sample in samples):
        raise ValueError(
            f"train.router_replay needs the experts that the rollout engine chose, but none of {len(samples)} samples "
            "has them; let the engine return them (SGLang: --enable-return-routed-experts, vLLM: "
            "--enable-return-routed-experts), or set train.router_replay = 'off'"
        )
    layers = {sample.routed_experts.shape[1] for sample in samples if sample.routed_experts is not None}
    if rank_shape is not None and layers == {rank_shape.num_layers}:
        shape = rank_shape
    result = []
    for i, sample in enumerate(samples):
        if sample.routed_experts is None:
            sample = replace(sample, routed_experts=missing_rows(sample.num_tokens, shape))
        else:
            check_form(sample.routed_experts, shape, sample.num_tokens, f"sample {i}")
        result.append(sample)
    return result
