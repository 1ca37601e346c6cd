"""The simulation of pool, sync, probe and rollouts: many schedules hold, each mechanism of ours is needed, a seed is
enough to see a failure again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product

import pytest

from source_folders import SOURCES
from tests.faults.mutants.__main__ import ROOT
from tests.faults.mutants.patches import PATCHES
from tests.faults.simulation.faults import ALL_SPOILS, BY_HAND, SPOILS, TWO_LIVES, Fault, Plan, draw
from tests.faults.simulation.mutations import MUTATIONS, OLD_WEIGHTS_AGAIN, Mutation
from tests.faults.simulation.outcome import Outcome
from tests.faults.simulation.run import run_many, shrunk
from tests.faults.simulation.seams import installed
from tests.faults.simulation.world import simulate

SCHEDULES = int(os.environ.get("SCHEDULES", "1000"))
MOST = 150
"""Schedules within which a mechanism that was taken out has to show."""


@pytest.fixture(autouse=True)
def seams() -> Iterator[None]:
    with installed():
        yield


def wrong(outcome: Outcome) -> bool:
    """Return True if anything went wrong, also if only the last net held it."""
    return outcome.failed or bool(outcome.guard_only or outcome.unseen)


def test_no_schedule_breaks_an_invariant(capsys: pytest.CaptureFixture[str]) -> None:
    failed = run_many(-len(BY_HAND), SCHEDULES + len(BY_HAND), 2)
    with capsys.disabled():
        print("\n" + capsys.readouterr().out)
    assert not failed


def shows(mutation: Mutation, plans: Iterator[Plan]) -> Plan | None:
    """The first schedule that only the mutated code fails."""
    for _, plan in zip(range(MOST), plans, strict=False):
        with mutation.applied():
            mutated = simulate(plan)
        if wrong(mutated) and not wrong(simulate(plan)):
            return plan
    return None


@pytest.mark.parametrize("every", [1, 3])
def test_no_wrong_tensor_is_used_after_a_full_proof_or_a_sample(every: int) -> None:
    calls = {"ipc": "/update_weights_from_tensor", "disk": "/update_weights_from_disk"}
    plans = []
    for seed, kind in product(range(6), range(len(SPOILS))):
        plan = replace(draw(seed), servers=2 + seed % 2, steps=3, method=("ipc", "disk")[seed % 2], attempts=3)
        nth = 2 + seed + kind if plan.method == "ipc" else 2 + kind % 2
        fault = Fault("spoil_tensor", seed % 2, 0, 1, ALL_SPOILS + kind, on=calls[plan.method], nth=nth)
        plans.append(replace(plan, faults=(fault,), probe_every=3, checksum_every=every))
    assert not [plan for plan in plans if wrong(simulate(plan))]
    with MUTATIONS["checksums are not compared"].applied():
        assert len([plan for plan in plans if wrong(simulate(plan))]) > len(plans) / 3


@pytest.mark.parametrize("name", [name for name in MUTATIONS if "by the name" not in name])
def test_the_simulation_finds_that(name: str) -> None:
    mutation = MUTATIONS[name]
    plans = chain([OLD_WEIGHTS_AGAIN], map(draw, range(10**4)))
    assert shows(mutation, (plan for plan in plans if mutation.fits(plan)))


def test_a_version_of_an_earlier_life_is_not_taken_for_one_of_this() -> None:
    spans = [TWO_LIVES.faults[1].span + more for more in range(-6, 9, 2)]
    plans = [replace(TWO_LIVES, faults=(TWO_LIVES.faults[0], replace(TWO_LIVES.faults[1], span=s))) for s in spans]
    assert not any(wrong(simulate(plan)) for plan in plans)
    assert shows(MUTATIONS["a server is taken back by the name of its weights"], iter(plans))


def test_a_failure_shrinks_to_the_fault_that_makes_it() -> None:
    mutation = MUTATIONS["the contract is not checked"]
    plan = shows(mutation, (plan for plan in map(draw, range(10**6)) if mutation.fits(plan) and len(plan.faults) > 2))
    assert plan is not None
    with mutation.applied():
        plan = replace(plan, faults=(*plan.faults, Fault("slow", 0, 0.0, 1.0, 0)))
        small = shrunk(plan, simulate, wrong)
    assert len(small.faults) < len(plan.faults) and any(fault.kind.startswith("lie:") for fault in small.faults)


def test_a_seed_gives_the_same_events_in_another_process() -> None:
    command = [sys.executable, "-m", "tests.faults.simulation", "--verbose", "--seed"]
    seed = next(s for s in range(1000) if len(draw(s).faults) > 3 and draw(s).stopping)
    one, other = (subprocess.run([*command, str(seed)], capture_output=True, text=True, check=True) for _ in range(2))
    assert one.stdout == other.stdout and one.stdout.count("\n") > 100
    events: list[str] = []
    simulate(draw(seed + 1))
    simulate(draw(seed), events.append)
    assert len(events) == sum("  " in line and line[:10].strip()[:1].isdigit() for line in one.stdout.splitlines())


def test_each_change_of_the_package_fits_its_file_and_a_sample_is_found() -> None:
    for patch in PATCHES:
        package, _, path = patch.path.partition("/")
        text = (SOURCES[package] / path).read_text()
        assert text.count(patch.old) == 1 and patch.old != patch.new, patch.name
    command = [sys.executable, "-m", "tests.faults.mutants", "--count", "100", "--every", "13", "--skip", "2"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("killed  ") == len(PATCHES[2::13])
