"""benchmarks/head.py: its counters count right, and every re-expressed method computes the loss it claims to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("head", "head_bench", "head_peers")]:
        del sys.modules[name]


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_every_method_gives_the_loss_and_gradients_of_float64(
    entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from head_bench.reference import measure_errors, reference
    from head_peers import liger, nemo, trl, verl_fused
    from head_peers.registry import METHODS
    from head_peers.task import Size, make_task

    for module, name, several in (
        (liger, "CHUNK_TOKENS", 32),
        (nemo, "CHUNK_TOKENS", 32),
        (trl, "CHUNK_VOCAB", 128),
        (verl_fused, "FORWARD_VOCAB", 64),
        (verl_fused, "BACKWARD_VOCAB", 160),
    ):
        monkeypatch.setattr(module, name, several)
    size = Size(72, 600, 32, 8, torch.float32, zero_share=0.3, entropy_gradient=entropy_gradient)
    task = replace(make_task(size), temperature=0.7)
    exact = {with_ids: reference(task, with_ids) for with_ids in (False, True)}
    assert 0 < int(exact[True].keep_mask.sum()) < 72, "the task must have tokens on both sides of the trust region"
    for method in METHODS:
        if entropy_gradient and "d" not in method.gradients:
            continue
        errors: Any = measure_errors(method.run, task, exact[method.offers_ids(1)])
        values = [errors.logprobs, errors.entropy, errors.grad_hidden, errors.grad_weight]
        values += [errors.id_logprobs] if method.offers_ids(1) else []
        assert max(values) < 2e-5, (method.name, errors)
        assert method.offers_ids(1) == (errors.id_logprobs is not None)


def test_the_counter_counts_products_traffic_and_large_tensors() -> None:
    from head_bench.counters import counted

    left, right = torch.ones(8, 16), torch.ones(16, 4)
    with counted() as result:
        torch.mm(left, right)
    assert result.flops == 2 * 8 * 16 * 4
    assert result.traffic == 4 * (8 * 16 + 16 * 4 + 8 * 4) and result.large_traffic == 0
    with counted() as result:
        torch.addmm(torch.zeros(8, 4), left, right)
    assert result.flops == 2 * 8 * 16 * 4
    big, index = torch.zeros(2**22 + 4), torch.zeros(4, dtype=torch.int64)
    with counted() as result:
        big.add_(1)  # read and written
        big.zero_()  # written
        big.view(2, -1).t()  # neither
        big.gather(0, index)  # four entries read, four written
    assert result.large_traffic == 3 * big.numel() * 4
    assert result.traffic == result.large_traffic + 4 * 4 * 2 + 4 * 8


def test_the_counter_sees_backward_passes() -> None:
    from head_bench.counters import counted

    left, right = torch.ones(8, 16, requires_grad=True), torch.ones(16, 4, requires_grad=True)
    with counted() as result:
        (left @ right).sum().backward()
    assert result.flops == 3 * 2 * 8 * 16 * 4


def test_the_peak_is_exact_and_sees_temporaries_inside_an_operation() -> None:
    from head_bench.counters import peak_bytes

    def two_then_one() -> torch.Tensor:
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        return torch.cat([second, second])

    assert peak_bytes(two_then_one) == 4 * 1500
    wide = torch.zeros(1000, 1000)
    assert peak_bytes(lambda: wide.logsumexp(1)) > 4 * 1000 * 1000


@pytest.mark.slow
def test_ratios_are_of_the_same_round() -> None:
    from head_bench.timing import paired_ratios

    seconds = {"ours": iter([0.0, 1.0, 10.0, 100.0]), "peer": iter([0.0, 3.0, 20.0, 200.0])}
    runs = {name: (lambda name=name: called.append(name)) for name in seconds}
    called: list[str] = []

    def clock(run: Any) -> float:
        run()
        return next(seconds[called[-1]])

    for times in seconds.values():
        next(times)
    result = paired_ratios(runs, "ours", 3, clock=clock)
    assert (result["peer"].least, result["peer"].median, result["peer"].most) == (2.0, 2.0, 3.0)
    assert result["ours"].spread == 0


def test_a_gate_that_fails_makes_the_benchmark_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import head
    from head_bench.results import Check
    from head_peers.task import Size

    assert not Check("not a number", float("nan"), 1.0).holds
    small = Size(48, 512, 16, 4)
    monkeypatch.setattr("head_bench.results.PEAK", 1e3)  # this small, other things than logits count
    monkeypatch.setattr(head, "SHORT", head.Profile(small, small, small, small, small))
    monkeypatch.setattr(head.tensor_parallel, "measure", lambda *args: _parallel(bytes_a_token=32))
    arguments = ["--gates-only", "--methods", "Stable-RL", "--out", str(tmp_path)]
    assert head.main(arguments) == 0
    assert (tmp_path / "head.json").exists() and (tmp_path / "head.png").exists()
    monkeypatch.setattr(head.tensor_parallel, "measure", lambda *args: _parallel(bytes_a_token=36))
    assert head.main(arguments) == 1


def test_further_needs_of_the_head_cost_no_further_product() -> None:
    from head_bench import needs
    from head_bench.timing import Ratio
    from head_peers.task import Size

    counts = needs.products(Size(48, 512, 16, 4))
    assert list(counts) == list(needs.NEEDS) and needs.BASE in counts
    taught = [name for name in counts if name.startswith("teacher")]
    assert {round(counts[name][0], 2) for name in taught} == {4.0}, "the teacher's own logits, and nothing else"
    assert {round(counts[name][0], 2) for name in counts if name not in taught} == {3.0}
    ratio = Ratio(1.05, 0.9, 1.2, 0.1, 9)
    lines = needs.table(counts, {"kept": dict.fromkeys(counts, ratio)}).splitlines()
    assert len(lines) == 2 + len(counts) and lines[-1].endswith("| 1.05 (0.90..1.20) |")


def _parallel(bytes_a_token: int) -> dict[str, Any]:
    errors = {"logprobs": 0.0, "grad_hidden": 0.0, "grad_weight": 0.0}
    one = {"collectives": [["allgather", 48 * bytes_a_token]], "backward_collectives": [], "errors": errors}
    return {"ours A": one | {"loss_calls": 1}, "ours B": one | {"loss_calls": 1}}
