"""Data files of every recognised layout, made of the same four sums."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

SUMS = [("1+1=", "2"), ("2+2=", "4"), ("3+4=", "7"), ("9-4=", "5")]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "slime text": [{"prompt": q, "label": a, "metadata": {"level": 1}} for q, a in SUMS],
    "slime messages": [{"prompt": user(q), "label": a, "metadata": {"level": 1}} for q, a in SUMS],
    "verl": [
        {
            "data_source": "math_dapo",
            "prompt": user(q),
            "ability": "MATH",
            "reward_model": {"ground_truth": a, "style": "rule"},
            "extra_info": {"index": f"id-{q}"},
        }
        for q, a in SUMS
    ],
    "aime_2024 of HuggingFaceH4": [
        {"id": i, "problem": q, "solution": f"Add. \\boxed{{{a}}}", "answer": a, "url": "u", "year": "2024"}
        for i, (q, a) in enumerate(SUMS)
    ],
    "aime24 of math-ai": [
        {"id": i, "problem": q, "solution": f"\\boxed{{{a}}}", "url": "u"} for i, (q, a) in enumerate(SUMS)
    ],
    "aime25 of math-ai": [{"problem": q, "answer": a, "id": str(i)} for i, (q, a) in enumerate(SUMS)],
    "AIME_2024 of Maxwell-Jia": [
        {"ID": f"2024-I-{i}", "Problem": q, "Solution": "Add.", "Answer": int(a)} for i, (q, a) in enumerate(SUMS)
    ],
    "gsm8k": [{"question": q, "answer": f"Add them.\n#### {a}"} for q, a in SUMS],
}


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    columns = {name: None for row in rows for name in row}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([columns | row for row in rows]), path)
    return str(path)
