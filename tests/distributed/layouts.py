"""The layouts on which every loss is checked, by number of processes. 8 run in ``make test-matrix`` only."""

from __future__ import annotations

from tests.distributed.parity import Case

TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
VPP = {**PP, "virtual_pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
EP4 = {"expert_model_parallel_size": 4}
ETP = {**EP, "expert_tensor_parallel_size": 2}
CP = {"context_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe_act", "layernorm"]}

LAYOUTS: dict[int, list[Case]] = {
    1: [
        Case(),
        Case(tied=True),
        Case(dense=True),
        Case(shared=True),
        Case(micro_batch_tokens=8),  # less than most samples
        Case(micro_batch_tokens=29),
        Case(filtered=True),
    ],
    2: [
        Case(TP),
        Case(TP, shared=True),
        Case(TP, tied=True, fused_head=False),
        Case(CP, fused_head=False),
        Case(CP),
        Case(CP, dense=True),
        Case(PP, tied=True),
        Case(VPP),
        Case(EP),
        Case(EP, transformer=ALLGATHER),
        Case({}),
        Case(TP, filtered=True),
        Case(CP, filtered=True, fused_head=False),
        Case(PP, filtered=True),
    ],
    4: [
        Case({**TP, **CP}, filtered=True),
        Case({**TP, **CP}),
        Case({**CP, **PP}),
        Case({**CP, **EP4}),
        Case({**TP, **ETP, **OVERLAP}, transformer=SELECTIVE),
    ],
    8: [
        Case({**TP, **CP, **PP}),
        Case({**TP, **EP4}),
        Case({**TP, **PP, **ETP}, tied=True),
        Case({**CP, **VPP, **EP}),
        Case({**TP, **PP}, dense=True),
        Case({**TP, **EP, **OVERLAP}, transformer=FULL),
        Case({**CP, **EP4}, transformer=SELECTIVE),
    ],
}

LINEAR_LAYOUTS: dict[int, list[Case]] = {
    1: [Case(family="qwen3_next", micro_batch_tokens=29), Case(family="qwen3_5_moe_text", filtered=True)],
    2: [
        Case(TP, family="qwen3_5_moe_text"),
        Case(CP, family="qwen3_next"),
        Case(EP, family="qwen3_next", fused_head=False, transformer=SELECTIVE),
        Case(VPP, family="qwen3_5_moe_text"),
    ],
    4: [
        Case({**TP, **ETP, **OVERLAP}, family="qwen3_5_moe_text", transformer=SELECTIVE),
        Case({**CP, **PP}, family="qwen3_next", transformer=FULL),
    ],
}
"""Layouts of these families on which losses are checked.

None is tied: the sharper output layer, which is the embedding then, would leave these models certain of each token.
"""


def describe(case: Case) -> str:
    """The switches of a case in short, for a table."""
    short = {"tensor_model_parallel_size": "TP", "pipeline_model_parallel_size": "PP", "context_parallel_size": "CP"}
    short |= {"expert_model_parallel_size": "EP", "expert_tensor_parallel_size": "ETP"}
    short |= {"virtual_pipeline_model_parallel_size": "VPP"}
    sizes = [f"{short[key]}{value}" for key, value in case.parallel.items() if key in short]
    flags = [key for key, value in case.parallel.items() if value is True]
    other = [f"{value}" for key, value in case.transformer.items() if "recompute_gran" in key or "dispatcher" in key]
    kind = (
        [case.family] * bool(case.family)
        + ["dense"] * case.dense
        + ["tied"] * case.tied
        + ["shared expert"] * case.shared
    )
    kind += [f"micro-batches of {case.micro_batch_tokens}"] * (case.micro_batch_tokens != Case().micro_batch_tokens)
    kind += ["filtered"] * case.filtered
    kind += ["plain head"] * (not case.fused_head)
    return " ".join([*sizes, *flags, *other, *kind]) or "data parallel only"
