#!/usr/bin/env python
"""Make the base model of ``megatron-dppo demo`` anew: ``python tools/make_demo_base.py FOLDER``.

Writes ``FOLDER/rare_chain-0-HASH`` (about three minutes of one core); HASH is of its settings. To ship
it, move it to ``packages/lab/src/megatron_dppo_lab/bases/`` and delete the old one there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_dppo_lab.demo import Demo
from megatron_dppo_lab.runner import make_base_at
from megatron_dppo_lab.store import Store


def main() -> None:
    """Train the model, also where the package has it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    run = Demo().runs[0]
    store = Store(folder)
    target = folder / store.base(run).name
    if target.exists():
        parser.error(f"{target} is there; nothing was made")
    make_base_at(store, run, target, print)
    for file in target.iterdir():
        file.chmod(0o644)
    print(target)


if __name__ == "__main__":
    main()
