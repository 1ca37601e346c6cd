"""Checkpoints by time on a virtual clock, and the host memory that a save in the background may take."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_dppo.process.save_timer import SaveTimer, available_host_bytes, has_memory_for_copies


def simulate(
    seconds_per_step: list[float], seconds_per_save: list[float], minutes: float | None = 30.0
) -> list[tuple[float, float]]:
    """Begin and end of each save of a run that asks after every step."""
    now = 0.0
    timer = SaveTimer(minutes, clock=lambda: now)
    saves: list[tuple[float, float]] = []
    for seconds in seconds_per_step:
        now += seconds
        if timer.is_due():
            with timer.measure(by_time=True):
                began = now
                now += seconds_per_save[len(saves) % len(seconds_per_save)]
            saves.append((began, now))
    return saves


def test_a_run_saves_first_after_30_minutes_and_then_30_minutes_after_each_save() -> None:
    """Steps of a minute, saves of ten seconds: at 30:00, then the first step that ends 30 minutes after 30:10."""
    assert simulate([60.0] * 100, [10.0])[:3] == [(1800.0, 1810.0), (3610.0, 3620.0), (5420.0, 5430.0)]
    assert simulate([60.0] * 29, [10.0]) == []
    assert simulate([60.0] * 100, [10.0], minutes=None) == []
    assert simulate([7200.0] * 3, [10.0])[0] == (7200.0, 7210.0), "a step that is longer than the interval"


def test_expensive_saves_take_at_most_5_percent_of_the_time() -> None:
    """300 s a save: the second one waits until both are 5 % of the run, 12,000 s after the start."""
    assert [began for began, _ in simulate([100.0] * 300, [300.0])][:3] == [1800.0, 12000.0, 18000.0]
    rng = random.Random(0)
    for _ in range(200):
        steps = [rng.uniform(1, 4000) for _ in range(400)]
        saves = simulate(steps, [rng.uniform(0, 500)] * 1)
        spent = 0.0
        for index, (began, ended) in enumerate(saves):
            assert index == 0 or began - saves[index - 1][1] >= 1800
            spent += ended - began
            # The cost of the first one is not known before it.
            assert index == 0 or spent <= 0.05 * began + 1e-6
        assert len(saves) > 10


def test_saves_for_another_reason_begin_the_interval_anew_and_do_not_use_up_the_5_percent() -> None:
    now = 0.0
    timer = SaveTimer(30.0, clock=lambda: now)
    for _ in range(10):
        now += 1700.0
        assert not timer.is_due()
        with timer.measure(by_time=False):
            now += 200.0
    now += 1800.0
    assert timer.is_due()


def machine(root: Path, available_kib: int, limits: dict[str, tuple[str, str]]) -> Path:
    """A machine's files below ``root``; ``limits`` has memory.max and memory.current by control group."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable:  {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text("0::/job/step\n")
    for group, (limit, used) in limits.items():
        folder = root / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(used + "\n")
    return root


def test_free_host_memory_is_that_of_the_machine_or_of_the_narrowest_control_group(tmp_path: Path) -> None:
    assert available_host_bytes(machine(tmp_path / "a", 1000, {})) == 1_024_000
    assert available_host_bytes(machine(tmp_path / "b", 1000, {"job/step": ("max", "5")})) == 1_024_000
    narrow = {"job": ("9000", "2000"), "job/step": ("max", "5")}
    assert available_host_bytes(machine(tmp_path / "c", 1000, narrow)) == 7000
    assert available_host_bytes(machine(tmp_path / "d", 1000, {"job": ("10", "20")})) == 0


def test_copies_of_all_processes_of_a_machine_must_fit_half_of_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dppo.process.save_timer.available_host_bytes", lambda: 800)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert has_memory_for_copies(100) and not has_memory_for_copies(101)
