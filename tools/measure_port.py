"""Count how many published launch files ``megatron-dppo port`` completes.

Usage: ``python tools/measure_port.py CHECKOUT... [--framework-version VERSION]``, each the checkout of a repository.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

from megatron_dppo.errors import ConfigError
from megatron_dppo_port.port import port

_STARTS = re.compile(
    r"^[^#\n]*(-m\s+\S*(main_ppo\w*|main_dapo|fully_async_main)\b|(python3?|\})\s+\S*train(_async)?\.py|main_ppo\.py)",
    re.MULTILINE,
)
"""Lines that start a training of verl or slime."""
_PRIME_RL = re.compile(r"^\[+orchestrator", re.MULTILINE)


def count(checkout: Path, version: str | None) -> Counter[str]:
    """Return the number of launch files by outcome."""
    outcomes: Counter[str] = Counter()
    for file in sorted([*checkout.rglob("*.sh"), *checkout.rglob("*.toml")]):
        text = file.read_text(encoding="utf-8", errors="replace")
        if not (_PRIME_RL if file.suffix == ".toml" else _STARTS).search(text):
            continue
        try:
            result = port(file, root=checkout, version=version)
        except ConfigError:
            outcomes["not read"] += 1
        else:
            outcomes["to fill in" if result.problems else "complete"] += 1
    return outcomes


def main() -> None:
    """Print one line per checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--framework-version")
    options = parser.parse_args()
    for checkout in options.checkouts:
        outcomes = count(checkout, options.framework_version)
        counts = ", ".join(f"{outcomes[name]} {name}" for name in ("complete", "to fill in", "not read"))
        print(f"{checkout.name}: {outcomes.total()} files, {counts}")


if __name__ == "__main__":
    main()
