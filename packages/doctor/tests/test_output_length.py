"""Commands print at most about 30 lines by default, and the rest with ``--verbose``."""

from __future__ import annotations

import pytest

from megatron_dppo.commands.main import main
from megatron_dppo.config.describe import keys, sections
from megatron_dppo_doctor.replay.outcome import ReplayOutcome


def test_help_of_each_section_fits_a_screen_and_verbose_describes_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    fields = keys()
    for name, model in sections():
        if not name:
            continue
        assert main(["help", name]) == 0
        assert len(capsys.readouterr().out.splitlines()) <= 30, name
        assert main(["help", name, "--verbose"]) == 0
        text = capsys.readouterr().out
        paths = [f"{name}.{key}" for key in model.known_fields() if f"{name}.{key}" in fields]
        assert all(f"\n{path}  " in text for path in paths), name
        described = [path for path in paths if fields[path].description]
        assert text.count("\n    ") == len(described), name


def test_replay_lists_the_metrics_that_differ_most_and_verbose_lists_all() -> None:
    equal = {f"equal_{i:02}": (1.0, 1.0) for i in range(30)}
    # The relative difference of metric i is i / 100.
    other = {f"other_{i:02}": (2.0, 2.0 + 0.02 * i) for i in range(1, 26)}
    outcome = ReplayOutcome(
        step=3, tokens=9, largest=0.5, decisions=1, metrics=equal | other, same_layout=True, changed=()
    )
    lines = outcome.text().splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("  other")]
    assert shown == [f"other_{i:02}" for i in range(6, 26)] and len(lines) <= 30
    assert "35 more metrics differ less or not at all (--verbose lists them)" in outcome.text()
    verbose = outcome.text(verbose=True)
    assert all(name in verbose for name in equal | other) and "more metrics" not in verbose
    same = ReplayOutcome(step=3, tokens=9, largest=0.0, decisions=0, metrics=equal, same_layout=True)
    assert len(same.text().splitlines()) < 10 and "identical to the run, bit for bit" in same.text()
