"""Write examples/data/: real competition problems with whole-number answers, from the CHAMP data set (MIT licence).

pip install --no-deps champ-dataset==1.0.0 && python tools/make_example_data.py examples/data

CHAMP (Mao, Kim, Zhou, 2024) is read from its wheel. A checksum of the problem's name decides between training and
held-out, so that the files are the same on every run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import zlib
from pathlib import Path
from typing import Any

INSTRUCTION = "\n\nReason step by step, and write the final answer in \\boxed{}."


def problems() -> list[dict[str, Any]]:
    """All CHAMP problems whose answer is a whole number."""
    spec = importlib.util.find_spec("champ_dataset")
    if spec is None or spec.origin is None:
        raise SystemExit("champ-dataset is not installed: pip install --no-deps champ-dataset==1.0.0")
    file = Path(spec.origin).parent / "dataset_files/v0.json"
    everything = json.loads(file.read_text(encoding="utf-8"))["problems"].values()
    return [p for p in everything if re.fullmatch(r"-?\d+", p["_answer"].strip())]


def is_held_out(problem: dict[str, Any]) -> bool:
    """Return True for the third of the problems that is held out."""
    return zlib.crc32(problem["identifier"].encode()) % 3 == 0


def messages(problem: dict[str, Any]) -> list[dict[str, str]]:
    """Return the problem as one user message."""
    return [{"role": "user", "content": problem["_text"].strip() + INSTRUCTION}]


def main() -> None:
    """Write both files."""
    import pyarrow
    import pyarrow.parquet

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    every = problems()
    with (folder / "champ_train.jsonl").open("w", encoding="utf-8") as file:
        for p in every:
            if not is_held_out(p):
                about = {"id": p["identifier"], "category": p["category"]}
                row = {"prompt": messages(p), "label": p["_answer"].strip(), "metadata": about}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    rows = [
        {
            "data_source": "champ",
            "prompt": messages(p),
            "ability": "math",
            "reward_model": {"ground_truth": p["_answer"].strip(), "style": "rule"},
            "extra_info": {"index": p["identifier"]},
        }
        for p in every
        if is_held_out(p)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "champ_eval.parquet", compression="zstd")


if __name__ == "__main__":
    main()
