"""``megatron-dppo plan``: closed-form numbers, every example, what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_dppo.commands.main import main
from megatron_dppo.config.io import load_config
from megatron_dppo.config.layout import resolve_layout
from megatron_dppo.errors import CheckpointError, PlanError
from megatron_dppo.hf.folder import model_shape
from megatron_dppo_plan.arithmetic import plan_batch, plan_kv_cache, plan_transfers
from megatron_dppo_plan.assumed_values import AssumedValues
from megatron_dppo_plan.machine import MACHINES, GpuNode, get_machine
from megatron_dppo_plan.meter import Meter
from megatron_dppo_plan.models import count_parameters, load_model_config
from megatron_dppo_plan.plan import Plan, PlannedModel, make_plan
from megatron_dppo_plan.rehearsal_pool import RehearsalPool
from megatron_dppo_plan.rehearse import rank_roles
from megatron_dppo_plan.search import DEFAULT_AXES, RECOMPUTE, PlanSearch, min_rank_bytes, parse_axes
from megatron_dppo_plan.text import format_candidates, format_plan

EXAMPLES = Path(__file__).parents[3] / "examples"
H100, GIB = MACHINES["h100"], 2**30
PARAMETERS = 30_532_122_624  # of Qwen3-30B-A3B, as its model card counts them: 30.5 B


def big(*overrides: str) -> Any:
    return load_config(EXAMPLES / "qwen3_30b_a3b/dppo.toml", overrides)


def layout_of(config: Any, world_size: int) -> Any:
    return resolve_layout(
        config.parallel, config.batch, world_size, model_shape(load_model_config(config.model.path)[0])
    )


@pytest.fixture(scope="module")
def rehearsals() -> Iterator[RehearsalPool]:
    with RehearsalPool(2) as rehearsals:
        yield rehearsals


@pytest.fixture(scope="module")
def plan_of_30b(rehearsals: RehearsalPool) -> Plan:
    """From a few of its layers; ``test_48_layers_are_extrapolated_from_a_few`` has all of them."""
    return make_plan(big(), 32, H100, rehearsals, kinds=["all"], few_layers=True)


def memory_rows(text: str) -> dict[str, dict[str, float]]:
    """Return GiB by column of each rank of a printed memory table."""
    lines = iter(text.splitlines())
    header = next(line for line in lines if line.startswith("| rank, GiB"))
    columns = [cell.strip() for cell in header.split("|")[1:-1]]
    next(lines)
    rows = {}
    for line in lines:
        if not line.startswith("|"):
            break
        rank, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        values = zip(columns[1:], cells, strict=True)
        rows[rank] = {name: float(value) for name, value in values if name not in ("peak phase", "fits")}
    return rows


PLAN_PAGE = (EXAMPLES.parent / "packages/plan/README.md").read_text(encoding="utf-8")


def test_the_memory_on_the_page_adds_up() -> None:
    parts = ("weights", "gradients", "optimizer", "activations", "head", "row", "replay", "other")
    rows = memory_rows(PLAN_PAGE)
    assert list(rows) == ["0 (all)", "0 (hot, experts x 3)"]
    for row in rows.values():
        assert sum(row[part] for part in parts) == pytest.approx(row["peak"], abs=0.02)
        assert row["total"] == pytest.approx(row["peak"] + 4.0, abs=0.005)  # CUDA context and NCCL
        assert f"yes, {79.10 - row['total']:.2f} left" in PLAN_PAGE
    fullest = f"{rows['0 (hot, experts x 3)']['total']:.1f}"
    assert f"| 32 | {fullest} | yes," in PLAN_PAGE, "the table of other numbers of GPUs has the same run"


@pytest.mark.slow
def test_the_page_has_the_memory_that_the_command_prints(plan_of_30b: Plan) -> None:
    """The columns of at least 0.01 GiB: what is smaller depends on how many layers are rehearsed."""
    quoted = memory_rows(PLAN_PAGE)["0 (all)"]
    printed = memory_rows(format_plan(plan_of_30b))["0 (all)"]
    large = {name: value for name, value in quoted.items() if value >= 0.01}
    assert list(large) == ["weights", "gradients", "optimizer", "activations", "peak", "total"]
    assert {name: printed[name] for name in large} == pytest.approx(large, rel=0.01)


@pytest.mark.slow
def test_static_memory_of_the_30b_example_matches_the_formula(plan_of_30b: Plan) -> None:
    """TP2 EP8 on 32 GPUs: dense weights are split by 2, experts by 8; optimizer state by 16 and by 4."""
    vocabulary = 2 * 151936 // 2 * 2048
    attention = (32 + 2 * 4) * 128 * 2048 // 2 + 32 * 128 * 2048 // 2
    norms, router = 2 * 2048 + 2 * 128, 128 * 2048
    dense = vocabulary + 48 * (attention + norms + router) + 2048
    experts = 48 * 128 // 8 * 3 * 2048 * 768
    static = plan_of_30b.ranks["all"].measured.static
    assert static["weights"] == 2 * (dense + experts)
    assert static["gradients"] == pytest.approx(4 * (dense + experts), rel=1e-4)  # buckets are padded
    assert static["optimizer"] == pytest.approx(12 * (dense // 16 + experts // 4), rel=1e-4)


@pytest.mark.long
def test_the_plan_of_the_30b_example_includes_a_teacher(plan_of_30b: Plan, rehearsals: RehearsalPool) -> None:
    """Its weights are there while it looks, its output layer and hidden states of a row while an update computes."""
    teacher = ("--distillation.teacher_path", "Qwen3-30B-A3B", "--distillation.divergence", "forward_kl")
    plan = make_plan(big(*teacher), 32, H100, rehearsals, kinds=["all"], few_layers=True)
    alone, taught = plan_of_30b.ranks["all"], plan.ranks["all"]
    output_layer, hidden = 2 * 151936 // 2 * 2048, 2 * 17408 // 2 * 2048
    head = taught.measured.peaks["head"]
    assert head.by_phase["teacher"] == output_layer + hidden
    looking = sum(taught.measured.static.values()) + alone.measured.static["weights"]
    assert taught.total - H100.reserved == pytest.approx(max(looking, taught.measured.peak.total), rel=1e-3)
    assert taught.total < 1.25 * alone.total and taught.measured.peak.total < 1.25 * alone.measured.peak.total
    products = [sum(rank.measured.work["head"].flops.values()) for rank in (alone, taught)]
    assert products[1] == pytest.approx(4 / 3 * products[0], rel=0.01)
    text, teacher_model = format_plan(plan), plan.model.teacher
    assert teacher_model is not None
    assert teacher_model.bytes_on_rank(plan.config, plan.layout) == pytest.approx(
        alone.measured.static["weights"], rel=0.01
    )
    assert "GiB of weights per rank in host memory, and " in text and "| teacher" in text


def test_flops_of_the_30b_example_match_the_formula(plan_of_30b: Plan) -> None:
    tokens = 17408
    attention = (32 + 2 * 4) * 128 * 2048 + 32 * 128 * 2048
    experts, router = 8 * 3 * 2048 * 768, 2 * 128 * 2048  # the router's weight is on both ranks
    scores = 4 * tokens * 32 * 128 / 2  # of a token, half of them masked
    forward = 48 * tokens * (2 * (attention + experts + router) + scores) / 2
    work = plan_of_30b.ranks["all"].measured.work
    assert sum(work["forward"].flops.values()) == pytest.approx(forward, rel=0.01)
    assert sum(work["head"].flops.values()) == pytest.approx(3 * 2 * tokens * 2048 * 151936 / 2, rel=0.01)
    # Recomputed once, then twice the products, and five in place of two of attention.
    extra = 48 * tokens * scores * 0.5 / 2
    assert sum(work["backward"].flops.values()) == pytest.approx(3 * forward + extra, rel=0.01)


def test_collectives_of_the_30b_example_match_the_formula(plan_of_30b: Plan) -> None:
    sent = 17408 // 2 * 8 * (2048 * 2 + 4)  # each token to 8 experts, with a weight in fp32
    back = 17408 // 2 * 8 * 2048 * 2
    calls = {
        (phase, name): (count, size)
        for phase, name, ranks, count, size in plan_of_30b.ranks["all"].measured.collectives
        if name == "alltoall_base"
    }
    assert calls["forward", "alltoall_base"] == (48 * 3, 48 * (sent + back))
    assert calls["backward", "alltoall_base"] == (2 * 48 * 3, 2 * 48 * (sent + back))


def test_the_30b_example_fits_32_h100(plan_of_30b: Plan) -> None:
    plan = plan_of_30b
    text = format_plan(plan)
    assert "Fits 32 x h100." in text and "using the sizes of the known model" in text
    assert (plan.model.parameters, plan.model.expert_parameters) == (PARAMETERS, 48 * 128 * 3 * 2048 * 768)
    assert "per recorded step" not in text and "alltoall_base" not in text
    assert "alltoall_base" in format_plan(plan, verbose=True)
    log = plan.config.log.model_copy(update={"rollouts_every": 5})
    recorded = format_plan(replace(plan, config=plan.config.model_copy(update={"log": log})))
    rollout, result = plan.config.rollout, plan.token_bytes
    tokens = rollout.max_new_tokens * (17 + result.total - result.sampled)
    size = rollout.prompts_per_step * rollout.samples_per_prompt * (1000 + tokens) / 2**30
    assert f"at most {size:.2f} GiB on disk per recorded step (log.rollouts_every = 5)" in recorded


def test_colocated_servers_fit_while_sampling_and_while_training(plan_of_30b: Plan) -> None:
    measured = plan_of_30b.ranks["all"].measured
    rehearsed: Any = SimpleNamespace(run=lambda requests, few_layers: [measured for _ in requests])
    shared = ("--rollout.servers.colocated", "true", "--rollout.weight_sync.method", "ipc")
    for share, in_training in ((0.3, True), (0.85, False)):
        config = big(*shared, "--rollout.sglang.mem-fraction-static", str(share))
        plan = make_plan(config, 32, H100, rehearsed, kinds=["all"])
        rank, asleep = plan.ranks["all"], H100.sleeping_server_bytes
        sampling = round(H100.memory * share) + measured.static["weights"] + 2 * GIB + H100.reserved + asleep
        training = plan_of_30b.ranks["all"].total + asleep
        assert (rank.sampling, rank.total) == (sampling, max(sampling, training))
        assert (training > sampling) == in_training == (not plan.oversized_ranks)
        host = (measured.static["weights"] + measured.static["optimizer"]) / GIB
        assert f"up to {host:.2f} GiB of host memory" in format_plan(plan)
    assert plan_of_30b.ranks["all"].sampling is None and "servers  colocated" not in format_plan(plan_of_30b)


@pytest.mark.long
def test_48_layers_are_extrapolated_from_a_few(plan_of_30b: Plan, rehearsals: RehearsalPool) -> None:
    few = plan_of_30b.ranks["all"].measured
    whole = make_plan(big(), 32, H100, rehearsals, kinds=["all"]).ranks["all"].measured
    assert few.static == pytest.approx(whole.static, rel=1e-4)
    assert few.collectives == whole.collectives and few.peaks.keys() == whole.peaks.keys()
    for phase, peak in whole.peaks.items():
        assert few.peaks[phase].total == pytest.approx(peak.total, rel=1e-3), phase
    for phase, work in whole.work.items():
        assert few.work[phase].flops == pytest.approx(work.flops, rel=1e-6), phase
        assert few.work[phase].seconds == pytest.approx(work.seconds, rel=1e-3), phase


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (64, ["--pipeline-model-parallel-size=2", "--context-parallel-size=2"]),
        pytest.param(
            1024, ["--pipeline-model-parallel-size=2", "--tensor-model-parallel-size=4"], marks=pytest.mark.long
        ),
    ],
)
def test_large_layouts_are_rehearsed(world_size: int, flags: Sequence[str], rehearsals: RehearsalPool) -> None:
    config = big(*flags, "--rollout.prompts_per_step=1024")
    plan = make_plan(config, world_size, H100, rehearsals, kinds=["last"], few_layers=True)
    (last,) = plan.ranks.values()
    row = 17408 // plan.layout.tp // plan.layout.cp * 2048 * 2  # bf16, split by sequence and context parallelism
    sent = [(calls, size) for _, name, _, calls, size in last.measured.collectives if name == "send" and size >= row]
    assert last.role.rank == world_size // 2 and plan.oversized_ranks == []
    assert sent and all(size % row <= 24 * calls for calls, size in sent)  # and the shape of each, three int64


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dppo", "sglang", "vllm"])
def test_the_small_examples_are_planned(name: str, rehearsals: RehearsalPool) -> None:
    plan = make_plan(load_config(EXAMPLES / f"chain_sum/{name}.toml"), 2, H100, rehearsals)
    assert set(plan.ranks) == {"all", "hot"} and "Fits 2 x h100." in format_plan(plan)


@pytest.mark.long
def test_a_search_ranks_fitting_settings_by_time(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(EXAMPLES / "qwen3_30b_a3b/dppo.toml"), "--world-size", "32", "--search"]
    assert main([*arguments, "tensor_model_parallel_size=2,4", "recompute=full,none"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    fits, seconds = ([line.split("|")[i].strip() for line in lines] for i in (3, 4))
    assert len(lines) == 4 and "(as configured)" in "".join(lines)
    assert fits[0].startswith("yes") and fits[-1].startswith("NO")
    fast = [float(s) for s, fit in zip(seconds, fits, strict=True) if fit.startswith("yes")]
    assert len(fast) == 2 and fast == sorted(fast)


@pytest.mark.long
def test_a_plan_that_does_not_fit_names_the_nearest_settings_that_do(rehearsals: RehearsalPool) -> None:
    small = replace(H100, name="half", memory=44 * GIB)

    def load(flags: Sequence[str]) -> Any:
        return big(*flags)

    plan = make_plan(big(), 32, small, rehearsals, kinds=["all"], few_layers=True)
    assert plan.oversized_ranks == ["all"]
    assert "NO, " in format_plan(plan) and "Does NOT fit 32 x half: all." in format_plan(plan)
    (nearest,) = PlanSearch(load, 32, small, rehearsals).find_nearest(1)
    assert nearest.plan is not None
    assert (
        len(nearest.flags) == 1
        and nearest.plan.free_bytes > 4.4 * GIB
        and nearest.flags[0] in format_candidates([nearest])
    )
    followed = make_plan(big(*nearest.flags), 32, small, rehearsals, few_layers=True)
    assert followed.fits and not followed.is_tight, "for all kinds of ranks"


@pytest.mark.slow
def test_a_search_without_a_runnable_combination_names_the_reason(rehearsals: RehearsalPool) -> None:
    def search(machine: GpuNode = H100) -> PlanSearch:
        return PlanSearch(lambda flags: big(*flags), 32, machine, rehearsals)

    for axis, message in (
        ("train.micro_batch_token=1", r"train.micro_batch_token = 1: unknown key; did you mean 'micro_batch_tokens'"),
        ("tensor-model-parallel-size=3", "3 .* does not divide the 32 processes"),
    ):
        with pytest.raises(PlanError, match=message):
            search().rank_all(parse_axes([axis]), lambda total, done: None)
    with pytest.raises(PlanError, match="gradients and optimizer"):
        search(replace(H100, name="half", memory=20 * GIB)).rank_all(
            parse_axes(["recompute=full"]), lambda total, done: None
        )
    # Megatron says so, once it is built; the others are ranked all the same.
    (one,) = search().rank_all(parse_axes(["cuda-graph-impl=local"]), lambda total, done: None)
    assert one.plan is None and "a captured router does not read the replayed experts" in one.reason
    assert "cannot run: " in format_candidates([one])


def test_search_arguments_are_parsed() -> None:
    assert parse_axes([]) == DEFAULT_AXES
    assert parse_axes(["--tensor_model_parallel_size=1,2", "train.micro_batch_tokens=17408"]) == {
        "tensor-model-parallel-size": ["1", "2"],
        "train.micro_batch_tokens": ["17408"],
    }
    for text, message in (
        ("tp", "expected KEY=VALUE,VALUE"),
        ("recompute=some", "expected full, selective, none, got 'some'"),
    ):
        with pytest.raises(PlanError, match=message):
            parse_axes([text])
    assert big(*RECOMPUTE["none"]).model.transformer == {}
    assert big(*RECOMPUTE["full"]) == big()


def test_minimum_static_bytes_of_a_rank() -> None:
    config, model = big(), PlannedModel.from_config(big())
    dense = PARAMETERS - model.expert_parameters
    assert min_rank_bytes(config, model, layout_of(config, 32)) == pytest.approx(
        6 * (dense / 2 + model.expert_parameters / 8) + 12 * PARAMETERS / 32, abs=100
    )


def test_rank_kinds_of_a_pipeline() -> None:
    layout = layout_of(big("--pipeline-model-parallel-size", "4"), 64)
    result = rank_roles(layout, has_experts=True)
    assert {name: role.rank for name, role in result.items()} == {"first": 0, "middle": 32, "last": 48, "hot": 0}
    assert result["hot"].expert_load == 3.0 and result["first"].micro_batches == 4
    assert list(rank_roles(layout, has_experts=True, kinds=["last"])) == ["last"]
    with pytest.raises(PlanError, match="--rank-kinds all"):
        rank_roles(layout, has_experts=True, kinds=["all"])


def test_the_key_value_cache_of_the_30b_example() -> None:
    config = big()
    planned = plan_kv_cache(config, load_model_config(config.model.path)[0], PARAMETERS, H100)
    assert planned.bytes_per_token == 2 * 48 * 4 * 128 * 2 == 98304
    cache_bytes = round(H100.memory * 0.85 - PARAMETERS)  # two GPUs, two bytes
    assert (planned.gpus_per_server, planned.cache_bytes, planned.tokens_in_flight) == (
        2,
        cache_bytes,
        2 * cache_bytes // 98304,
    )


def test_quantized_weights_leave_more_cache(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    (tmp_path / "consolidated.safetensors").write_bytes(b"a file that is not the model")
    with (tmp_path / "model-00002-of-00002.safetensors").open("wb") as file:
        file.truncate(PARAMETERS + 1000)  # a sparse file of the size of FP8
    config = big("--rollout.servers.model", str(tmp_path), "--rollout.weight_sync.method", "disk")
    hf_config, layout = load_model_config(config.model.path)[0], layout_of(config, 32)
    planned = plan_kv_cache(config, hf_config, PARAMETERS, H100)
    assert planned.cache_bytes == round(H100.memory * 0.85 - (PARAMETERS + 1000) / 2)
    trained = PARAMETERS, PlannedModel.from_config(big()).expert_parameters
    assert plan_transfers(config, PARAMETERS, trained, layout, H100).sync == PARAMETERS + 1000
    away = big("--rollout.servers.model", str(tmp_path / "away"), "--rollout.weight_sync.method", "disk")
    assert plan_kv_cache(away, hf_config, PARAMETERS, H100).weight_bytes == 2 * PARAMETERS


def test_sync_and_checkpoint_bytes() -> None:
    config, model = big(), PlannedModel.from_config(big())
    layout, experts = layout_of(config, 32), model.expert_parameters
    planned = plan_transfers(config, PARAMETERS, (PARAMETERS, experts), layout, H100)
    assert (planned.sync, planned.checkpoint, planned.sync_buffer) == (2 * PARAMETERS, 14 * PARAMETERS, 2 * GIB)
    assert planned.save_host == 14 * PARAMETERS // 32  # copied, to be written in the background
    assert planned.sync_seconds == pytest.approx(2 * PARAMETERS / (0.7 * 50e9)) and not planned.sync_by_handle
    shared = big("--rollout.servers.colocated", "true", "--rollout.weight_sync.method", "ipc")
    handed = plan_transfers(shared, PARAMETERS, (PARAMETERS, experts), layout, H100)
    assert handed.sync_seconds == pytest.approx(4 * 2 * PARAMETERS / (0.7 * 3.35e12)) and handed.sync_by_handle
    at_once = big("--checkpoint.async_save", "false")
    assert plan_transfers(at_once, PARAMETERS, (PARAMETERS, experts), layout, H100).save_host == 4 * (
        (PARAMETERS - experts) // 2 + experts // 8
    )


def test_adapters_alone_have_gradients_and_optimizer() -> None:
    """The 30B: per layer q [4096], k and v [512], o from 4096, and 128 experts of 768, all of width 2048."""
    config = big("--lora.rank", "32")
    model = PlannedModel.from_config(config)
    experts = 48 * 128 * 3 * 32 * (768 + 2048)
    attention = 48 * 32 * (2 * (4096 + 2048) + 2 * (512 + 2048))
    assert model.trained == (attention + experts, experts)
    layout = layout_of(config, 32)
    planned = plan_transfers(config, model.parameters, model.trained, layout, H100)
    assert (planned.sync, planned.checkpoint) == (2 * PARAMETERS, 14 * (attention + experts))
    dense = PARAMETERS - model.expert_parameters
    adapters = 4 * (attention / 2 + experts / 8) + 12 * (attention + experts) / 32
    expected = 2 * (dense / 2 + model.expert_parameters / 8) + adapters
    assert min_rank_bytes(config, model, layout) == pytest.approx(expected, abs=100)


def test_the_batch_arithmetic() -> None:
    config = big()
    planned = plan_batch(config, layout_of(config, 32))
    assert (planned.samples, planned.samples_per_update, planned.updates) == (4096, 32, 8)
    assert planned.micro_batches == -(-32 * planned.mean_tokens // 17408)


def test_the_parameters_of_the_known_model() -> None:
    config, note = load_model_config("/nowhere/Qwen3-30B-A3B")
    assert count_parameters(config)[0] == PARAMETERS and note is not None
    with pytest.raises(CheckpointError, match="a Hugging Face folder"):
        load_model_config("/nowhere/other")


def test_an_unknown_machine_is_an_error() -> None:
    with pytest.raises(PlanError, match="expected one of h100, h200"):
        get_machine("b200")


def test_the_time_of_collectives() -> None:
    node, links = tuple(range(8)), H100.bandwidth_efficiency
    assert H100.collective_seconds("allreduce", node, 10**9) == pytest.approx(1.75e9 / 450e9 / links)
    assert H100.collective_seconds("alltoall_base", (0, 8), 10**9) == pytest.approx(0.5e9 / 50e9 / links)
    assert H100.collective_seconds("allreduce", (0,), 10**9) == 0
    with pytest.raises(PlanError, match="No cost model"):
        H100.collective_seconds("gossip", node, 1)


def test_a_read_without_an_assumed_value_is_an_error() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), AssumedValues():
        tensor = torch.ones(3)
        with pytest.raises(PlanError, match=r"test_plan\.py:\d+"):
            float(tensor.sum())
        with pytest.raises(PlanError, match="aten::nonzero, whose size depends"):
            tensor.nonzero()


def test_the_meter_follows_storages() -> None:
    with Meter() as meter:
        first = torch.zeros(256)
        view = first[:10]
        with meter.during("later"):
            second = torch.zeros(512)
        assert meter.bytes_in_use == 4 * 768 and meter.bytes_in_phase("later") == 2048
        del first
        assert meter.bytes_in_use == 4 * 768  # the view holds it
        del view, second
        assert meter.bytes_in_use == 0
    assert meter.peak.total == 4 * 768 and meter.peak.by_phase == {"start": 1024, "later": 2048}


@pytest.mark.slow
def test_the_meter_follows_storages_that_are_resized() -> None:
    with Meter() as meter:
        tensor = torch.zeros(256)
        tensor.untyped_storage().resize_(0)
        assert meter.bytes_in_use == 0
        tensor.untyped_storage().resize_(4096)
        assert meter.bytes_in_use == meter.peak.total == 4096
    assert torch.zeros(4).untyped_storage().resize_(0).nbytes() == 0 and meter.bytes_in_use == 4096
