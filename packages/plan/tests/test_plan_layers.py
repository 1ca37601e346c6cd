"""Plans of models whose layers differ: a few layers give those of all, and gated delta nets cost what they compute."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_dppo.config.io import load_config
from megatron_dppo.config.layout import Layout, resolve_layout
from megatron_dppo.config.schema import Config
from megatron_dppo.data.balance import assign_samples, cost
from megatron_dppo.hf.folder import model_shape
from megatron_dppo.mcore.delta_rule import delta_rule
from megatron_dppo.policy.packed import attention_length
from megatron_dppo_plan.arithmetic import longest_sample, plan_kv_cache
from megatron_dppo_plan.child import RehearsalRequest
from megatron_dppo_plan.delta_kernels import REHEARSED_KERNELS, DeltaRule
from megatron_dppo_plan.few_layers import FewLayers, choose_layers, layer_kinds, with_layers
from megatron_dppo_plan.machine import MACHINES
from megatron_dppo_plan.measurement import UpdateMeasurement
from megatron_dppo_plan.meter import Meter
from megatron_dppo_plan.models import count_parameters, load_model_config
from megatron_dppo_plan.plan import make_plan
from megatron_dppo_plan.rehearsal_pool import RehearsalPool
from megatron_dppo_plan.rehearse import RankRole, rehearsed_micro_batches
from megatron_dppo_plan.replacements import counted_keys
from megatron_dppo_plan.step_time import served_model
from tests.distributed.families import family_config
from tests.distributed.layouts import CP, EP, FULL, PP, SELECTIVE, TP, VPP
from tests.distributed.parity import Case, config_for
from tests.unit.configs import config as run_config


@pytest.fixture(scope="module")
def rehearsals() -> Iterator[RehearsalPool]:
    with RehearsalPool(1) as rehearsals:
        yield rehearsals


def layout_of(hf_config: Any, world_size: int = 1, **parallel: Any) -> Layout:
    config = config_for(Case(parallel))
    return resolve_layout(config.parallel, config.batch, world_size, model_shape(hf_config))


def hybrid(layers: int, dense: Sequence[int] = ()) -> Any:
    """A tiny Qwen3-Next: every fourth layer has full attention, some have no experts."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    return of_layers("qwen3_next", layers, layer_types=kinds, mlp_only_layers=list(dense))


def of_layers(family: str, layers: int, **fields: Any) -> Any:
    """A tiny model of a family with more layers."""
    config = family_config(family)
    config.num_hidden_layers = layers
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def test_both_ends_of_a_chunk_stay_and_each_kind_is_added_between_them() -> None:
    model = load_model_config("Qwen3.5-35B-A3B")[0]
    # 40 layers, full attention in 3, 7, ... 39.
    few = choose_layers(model, layout_of(model), 0)
    assert few == FewLayers(base=(0, 3, 38, 39), additions=((0, 28), (3, 8)))
    assert few.variants() == [((0, 3, 38, 39), 0), ((0, 0, 3, 38, 39), 28), ((0, 3, 3, 38, 39), 8)]
    # Four stages of 15 layers: 3 of the first stage's have full attention, 4 of the last one's.
    large = load_model_config("Qwen3.5-397B-A17B")[0]
    layout = layout_of(large, 4, pipeline_model_parallel_size=4)
    assert choose_layers(large, layout, 0) == FewLayers(base=(0, 3, 11, 14), additions=((0, 10), (3, 1)))
    assert choose_layers(large, layout, 3) == FewLayers(base=(45, 47, 58, 59), additions=((45, 9), (47, 2)))
    uniform = load_model_config("Qwen3-30B-A3B")[0]
    assert choose_layers(uniform, layout_of(uniform), 0) == FewLayers(base=(0, 47), additions=((0, 46),))
    # 3 dense layers, then 58 with experts.
    first = load_model_config("DeepSeek-V3")[0]
    assert choose_layers(first, layout_of(first), 0) == FewLayers(base=(0, 2, 3, 60), additions=((0, 1), (3, 56)))
    # Once four and twice five layers are more than twelve.
    short = hybrid(12)
    assert choose_layers(short, layout_of(short), 0) is None


def test_a_model_of_some_layers_has_their_kinds_or_there_is_none() -> None:
    mixed = hybrid(8, dense=[1, 5])
    linear, dense, full = ("linear_attention", False), ("linear_attention", True), ("full_attention", False)
    few = with_layers(mixed, (1, 2, 3), chunks=2)
    assert layer_kinds(few) == [dense, linear, full] * 2 and few.mlp_only_layers == [0, 3]
    assert layer_kinds(mixed)[:4] == [linear, dense, linear, full]
    # Dense layers come first in a DeepSeek-V3.
    first = load_model_config("DeepSeek-V3")[0]
    assert layer_kinds(with_layers(first, (0, 60), chunks=1)) == [(None, True), (None, False)]
    assert with_layers(first, (60, 0), chunks=1) is None
    # A list with an entry for each layer, which the family compares with the number of layers.
    uniform = family_config("minimax_m2")
    uniform.attn_type_list = [1] * 4
    assert layer_kinds(with_layers(uniform, (2, 3, 3), chunks=1)) == [layer_kinds(uniform)[0]] * 3


CASES = [
    (hybrid(16), 4, {**TP, **EP}, FULL, "bf16", 0),
    pytest.param(of_layers("deepseek_v3", 24, first_k_dense_replace=3), 2, EP, FULL, "bf16", 0, marks=pytest.mark.long),
    pytest.param(
        of_layers("gpt_oss", 24, layer_types=["sliding_attention", "full_attention"] * 12),
        *(2, CP, FULL, "bf16", 0),
        marks=pytest.mark.long,
    ),
    (hybrid(40, dense=[1, 22]), 4, {**PP, **CP}, {}, "bf16", 2),
    pytest.param(hybrid(80), 4, {**VPP, **EP}, SELECTIVE, "fp32", 0, marks=pytest.mark.long),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "world_size", "parallel", "transformer", "dtype", "rank"), CASES)
def test_a_plan_from_a_few_layers_is_that_of_all(
    model: Any, world_size: int, parallel: Any, transformer: Any, dtype: str, rank: int, rehearsals: RehearsalPool
) -> None:
    case = Case(parallel, transformer=transformer, micro_batch_tokens=192)
    config = config_for(case, dtype, data={"max_prompt_tokens": 184})
    layout = resolve_layout(config.parallel, config.batch, world_size, model_shape(model), {})
    role = RankRole(rank=rank, micro_batches=rehearsed_micro_batches(layout))
    request = RehearsalRequest(config=config, hf_config=model, layout=layout, role=role, machine=MACHINES["h100"])
    assert choose_layers(model, layout, rank) is not None
    few, whole = (rehearsals.run([request], few_layers=some)[0] for some in (True, False))
    assert_alike(few, whole)
    if transformer == FULL:
        # The inputs that recomputation begins with, and their gradients, are gone after the backward pass.
        left = whole.peaks["reduce"].by_phase
        inputs = model.num_hidden_layers * 192 * model.hidden_size * 2 // (layout.tp * layout.cp)
        assert left.get("forward", 0) + left.get("backward", 0) < inputs / 2


def assert_alike(few: UpdateMeasurement, whole: UpdateMeasurement) -> None:
    # Buffers are padded: in a tiny model that is a part of a percent.
    assert few.static == pytest.approx(whole.static, rel=5e-3)
    assert [entry[:4] for entry in few.collectives] == [entry[:4] for entry in whole.collectives]
    sent = [entry[4] for entry in whole.collectives]
    assert [entry[4] for entry in few.collectives] == pytest.approx(sent, rel=5e-3)
    assert few.peaks.keys() == whole.peaks.keys()
    for phase, peak in whole.peaks.items():
        assert few.peaks[phase].total == pytest.approx(peak.total, rel=5e-3), phase
    for phase, work in whole.work.items():
        assert few.work[phase].flops == pytest.approx(work.flops, rel=1e-6), phase
        assert few.work[phase].seconds == pytest.approx(work.seconds, rel=5e-3), phase


def test_the_rule_that_a_rehearsal_computes_has_the_products_of_the_real_one() -> None:
    """A chunk has c tokens, keys of d and values of e, counted by hand; torch counts no triangular system."""
    tokens, heads, d, e, c = 192, 3, 8, 12, 64
    q, k = (torch.randn(tokens, heads, d).requires_grad_() for _ in range(2))
    v = torch.randn(tokens, heads, e).requires_grad_()
    decay, beta = (torch.rand(tokens, heads).requires_grad_() for _ in range(2))
    with FlopCounterMode(display=False) as counter:
        delta_rule(*(x[None] for x in (q, k, v, -decay, beta)))
    chunks = heads * tokens // c
    system = 2 * c * c * (d + e)
    real = counter.get_total_flops() + chunks * system
    assert real == chunks * (2 * c * c * (3 * d + 2 * e) + 3 * 2 * c * d * e)
    with Meter() as meter:
        output = DeltaRule.apply(q, k, v, -decay, beta)
        kept = meter.bytes_in_use
        with meter.during("backward"):
            output.sum().backward()
    assert sum(meter.work["start"].flops.values()) == real
    # The recurrence again; then eight and four products within a chunk, two with its inverse, six with states.
    again = 2 * c * c * (d + e) + 2 * 2 * c * d * e
    more = 2 * c * c * (8 * d + 4 * e) + 2 * 2 * c**3 + 6 * 2 * c * d * e
    assert sum(meter.work["backward"].flops.values()) == chunks * (again + more)
    assert q.grad is not None and decay.grad is not None and decay.grad.shape == decay.shape
    # Output, normalized queries and keys, sums of the decay, and the inverse of each chunk's system.
    assert kept == 4 * tokens * heads * (e + 2 * d + 1 + c)


def test_the_other_kernels_keep_their_inputs_alone() -> None:
    tokens, channels, width = 96, 12, 4
    x, gates = (torch.randn(tokens, channels).requires_grad_() for _ in range(2))
    weights = torch.randn(channels, width).requires_grad_(), torch.randn(channels).requires_grad_()
    row: Any = None
    for run in (
        lambda: REHEARSED_KERNELS.convolve(x, weights[0], row),
        lambda: REHEARSED_KERNELS.gate(x, gates, weights[1], 1e-6),
    ):
        with Meter() as meter:
            meter.relabel([x, gates, *weights], "inputs")
            output = run()
            assert output.shape == x.shape and meter.bytes_in_phase("start") < 1.1 * output.nbytes
            # Every channel has a filter of its own; positions before the first token are computed as well.
            assert sum(meter.work["start"].flops.values()) in (2 * (tokens + width - 1) * channels * width, 0)
            output.sum().backward()
    assert all(tensor.grad is not None and tensor.grad.shape == tensor.shape for tensor in (x, gates, *weights))


def test_the_backward_pass_of_a_convolution_counts_its_groups() -> None:
    for channels, groups in ((12, 12), (12, 1), (12, 3)):
        x = torch.randn(2, channels, 20).requires_grad_()
        weight = torch.randn(channels, channels // groups, 4).requires_grad_()
        with Meter() as meter:
            out = torch.nn.functional.conv1d(x, weight, groups=groups)
            with meter.during("backward"):
                out.sum().backward()
        forward = 2 * out.numel() * channels // groups * 4
        assert sum(meter.work["start"].flops.values()) == forward
        assert sum(meter.work["backward"].flops.values()) == 2 * forward
        if groups == 1:
            with FlopCounterMode(display=False) as counter:
                torch.nn.functional.conv1d(x, weight).sum().backward()
            assert counter.get_total_flops() == 3 * forward


@pytest.mark.slow
def test_flops_of_a_gated_delta_net_match_the_formula(rehearsals: RehearsalPool) -> None:
    """The update of a tiny model with 3 layers of linear attention, less that of the same model with 2 of them."""
    model = hybrid(4)
    config = config_for(Case(micro_batch_tokens=192), data={"max_prompt_tokens": 184})
    requests = [
        RehearsalRequest(
            config=config,
            hf_config=with_layers(model, layers, 1),
            layout=layout_of(model),
            role=RankRole(rank=0),
            machine=MACHINES["h100"],
        )
        for layers in ((0, 1, 2, 3), (1, 2, 3))
    ]
    more, less = rehearsals.run(requests)
    flops = sum(more.work["forward"].flops.values()) - sum(less.work["forward"].flops.values())
    tokens, hidden, c, d, e = 192, 64, 64, model.linear_key_head_dim, model.linear_value_head_dim
    heads = model.linear_num_value_heads
    keys, values = model.linear_num_key_heads * d, heads * e
    projections = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
    # 3 chosen experts of 48, one of 40 for every token, its gate, and the router of 8.
    experts = 3 * hidden * (3 * 48 + 40) + hidden + hidden * 8
    # The three positions before the first token are computed as well.
    convolution = 2 * (tokens + 3) * (2 * keys + values) * 4
    chunk = 2 * c * c * (3 * d + 2 * e) + 3 * 2 * c * d * e
    assert flops == 2 * tokens * (projections + experts) + convolution + tokens // c * heads * chunk


def windowed(kinds: str, window: int) -> Any:
    """A tiny gpt-oss with a layer for each letter: a window (s), or full attention (f)."""
    config = family_config("gpt_oss")
    config.num_hidden_layers = len(kinds)
    config.layer_types = [{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]
    config.sliding_window = window
    return config


@pytest.mark.parametrize("window", [1, 5, 96, 191, 192, 500])
def test_a_window_counts_the_pairs_that_its_mask_shows(window: int) -> None:
    tokens = 192
    shown = sum(min(position + 1, window) for position in range(tokens))
    counted = tokens * counted_keys(tokens, window - 1) / 2
    # The whole number of keys is rounded, and half of the square lacks half of its diagonal.
    assert abs(counted - shown) <= tokens / 2
    assert counted_keys(tokens, None) == tokens


@pytest.mark.slow
def test_layers_with_windows_and_sinks_cost_what_their_masks_show(rehearsals: RehearsalPool) -> None:
    """A layer of a tiny model, as the difference of a model with one layer more, against the pairs of its mask."""
    tokens, window = 1536, 64
    config = config_for(Case(micro_batch_tokens=tokens), data={"max_prompt_tokens": tokens - 8})
    kinds = ("sf", "ssf", "sff")
    models = [windowed(kind, window) for kind in kinds]
    base, sliding, full = rehearsals.run(
        [
            RehearsalRequest(
                config=config,
                hf_config=model,
                layout=layout_of(model),
                role=RankRole(rank=0),
                machine=MACHINES["h100"],
            )
            for model in models
        ]
    )

    def flops(measured: UpdateMeasurement) -> int:
        return sum(measured.work["forward"].flops.values())

    hidden, heads, groups, size = 64, models[0].num_attention_heads, models[0].num_key_value_heads, models[0].head_dim
    projections = 2 * hidden * size * (heads + groups)
    # Two chosen experts, and the router.
    experts = 2 * 3 * hidden * models[0].intermediate_size + hidden * models[0].num_local_experts
    matrices = 2 * tokens * (projections + experts)
    pair = 2 * 2 * heads * size
    shown = sum(min(position + 1, window) for position in range(tokens))
    assert flops(sliding) - flops(base) == pytest.approx(matrices + pair * shown, rel=2e-3)
    assert flops(full) - flops(base) == matrices + pair * tokens * tokens // 2
    # A window needs as much memory as full attention: neither keeps a mask.
    activations = [each.peak.total - sum(each.static.values()) for each in (sliding, full)]
    assert activations[0] == pytest.approx(activations[1], rel=0.02)


def test_servers_cache_what_windows_show() -> None:
    """By hand, of gpt-oss-20b: 12 layers with a window of 128, 12 without, 8 heads of 64, keys and values in bf16."""
    model = load_model_config("gpt-oss-20b")[0]
    layer = 2 * 8 * 64 * 2
    longest = 8192
    data = {"max_prompt_tokens": 1024}
    room = {}
    for name, engine, options, window_tokens in (
        ("vllm", "vllm", {}, 128),
        ("without", "vllm", {"disable-hybrid-kv-cache-manager": True}, longest),
        ("sglang", "sglang", {}, 0.8 * longest),
        ("ratio", "sglang", {"swa_full_tokens_ratio": 0.1}, 0.1 * longest),
        ("off", "sglang", {"disable-hybrid-swa-memory": True}, longest),
    ):
        rollout = {"engine": engine, "dtype": "bf16", "max_new_tokens": longest - 1024, engine: options}
        planned = plan_kv_cache(run_config(rollout=rollout, data=data), model, 0, MACHINES["h100"])
        assert (planned.bytes_per_token, planned.window_bytes_per_token, planned.window) == (
            12 * layer,
            12 * layer,
            128,
        )
        assert planned.cache_bytes is not None and planned.tokens_in_flight is not None
        sequence = 12 * layer * (longest + window_tokens)
        room[name] = planned.tokens_in_flight
        assert room[name] == pytest.approx(planned.cache_bytes * longest / sequence, rel=1e-6)
    assert room["vllm"] > 1.9 * room["without"] and room["off"] == room["without"]
    served = served_model(model, 10**9, 0, planned)
    seconds = [
        served.iteration_seconds(1000, 1000 * length, 1, MACHINES["h100"], 1e30) for length in (128, 256, 4096, 4224)
    ]
    # Beyond the window a token reads further keys in half of the layers alone.
    rate = MACHINES["h100"].memory_bandwidth * MACHINES["h100"].bandwidth_efficiency
    assert seconds[1] - seconds[0] == pytest.approx(1000 * 128 * 12 * layer / rate)
    assert seconds[3] - seconds[2] == pytest.approx(seconds[1] - seconds[0])


def test_windows_make_attention_a_cost_of_each_token() -> None:
    gpt = load_model_config("gpt-oss-20b")[0]
    pair, hidden = 2 * 64 * 64, 2880
    # Queries and output of 64 heads of 64, keys and values of 8; 4 experts, the router, the head.
    matrices = 24 * (2 * hidden * 64 * (64 + 8) + 4 * 3 * hidden * hidden + 32 * hidden) + hidden * 201088
    n = attention_length(gpt)
    assert 12 * pair * n * n / 2 == pytest.approx(n * (matrices + 12 * pair * 128))
    every = family_config("mistral")
    every.sliding_window = 5
    assert attention_length(every) == math.inf and cost(100, math.inf) == 100
    rows = assign_samples([9, 8, 7, 3, 2, 1], 2, 15, attention_length=math.inf)
    assert sorted(i for rank in rows for row in rank for i in row) == [0, 1, 2, 3, 4, 5]
    assert [sum((9, 8, 7, 3, 2, 1)[i] for row in rank for i in row) for rank in rows] == [15, 15]


@pytest.mark.parametrize(("name", "billions"), [("Qwen3.5-35B-A3B", 34.7), ("Qwen3.5-397B-A17B", 396.3)])
def test_published_models_are_planned_without_their_folder(name: str, billions: float) -> None:
    config, note = load_model_config(f"/nowhere/{name}")
    parameters, experts = count_parameters(config)
    assert parameters == pytest.approx(1e9 * billions, rel=2e-3) and note is not None and "known model" in note
    layers, hidden, size = config.num_hidden_layers, config.hidden_size, config.moe_intermediate_size
    assert experts == layers * config.num_experts * 3 * hidden * size


ROOT = Path(__file__).parents[3]
SECTION = (ROOT / "docs/results/plan.md").read_text(encoding="utf-8").split("## Rows of 128k")[1].split("\n## ")[0]
LONG_ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]] for line in SECTION.splitlines() if re.match(r"\| \d+k", line)
]


def long_row_config(row: Sequence[str]) -> Config:
    """The configuration of a line of the page's table: the recipe, the flags of its length, and its own."""
    flags = dict(line.split(": ", 1) for line in SECTION.split("```flags\n")[1].split("```")[0].splitlines())
    own = re.findall(r"`([^`]+)`", row[2])
    return load_config(ROOT / "examples/qwen3_5_35b_a3b/dppo.toml", [*flags[row[0]].split(), *" ".join(own).split()])


def test_the_page_of_long_rows_has_layouts_that_exist_and_costs_that_are_computed() -> None:
    assert len(LONG_ROWS) >= 3
    for row in LONG_ROWS:
        config = long_row_config(row)
        tokens = int(row[0].removesuffix("k")) * 1024
        assert longest_sample(config) == config.train.micro_batch_tokens == tokens
        model = load_model_config(config.model.path)[0]
        layout = resolve_layout(config.parallel, config.batch, int(row[1]), model_shape(model))
        assert 16 % (layout.tp * layout.cp) == 0
        left = round(79.1 - float(row[3]), 1)
        assert row[4] == (f"yes, {left} left" if left > 0 else f"no, {-left} too much")
    for name, length, factor in (("Qwen3.5-35B-A3B", 73056, 2.8), ("Qwen3-30B-A3B", 15471, 9.5)):
        computed = attention_length(load_model_config(name)[0])
        assert round(computed) == length and f"{length:,}" in SECTION
        assert round(cost(131072, computed) / 131072, 1) == factor and f"{factor} times" in SECTION


@pytest.mark.long
@pytest.mark.parametrize("row", LONG_ROWS, ids=lambda row: "-".join(row[:2]))
def test_the_page_of_long_rows_has_the_plans_of_its_commands(row: list[str], rehearsals: RehearsalPool) -> None:
    plan = make_plan(long_row_config(row), int(row[1]), MACHINES["h100"], rehearsals, kinds=["hot"], few_layers=True)
    assert plan.ranks["hot"].total / 2**30 == pytest.approx(float(row[3]), rel=0.01)
    assert plan.step.updates == pytest.approx(float(row[5]), rel=0.03)
