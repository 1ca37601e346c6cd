"""docs/upstream.md: bugs of Megatron Core are there as its cases say, in both versions; and one family by HybridModel.

The wheel of the newer version comes from the package registry; without it these tests fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.test_doc_blocks import fenced, missing_lines
from tests.unit.wheels import unpacked

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
MEGATRON = "0.19.2"


def blocks(language: str) -> Iterator[str]:
    page = (ROOT / "docs/upstream.md").read_text("utf-8")
    return (body for _, found, body in fenced(page) if found == language)


def run(front: Path | None, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(map(str, [*([front] if front else []), ROOT, os.environ.get("PYTHONPATH", "")]))
    env = os.environ | {"PYTHONPATH": path, "TORCH_COMPILE_DISABLE": "1"} | variables
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, out + errors
    return out


def printed_by_the_second_rank(program: Path, front: Path | None, store: Path) -> str:
    text = program.read_text().replace(
        'dist.init_process_group("gloo")',
        f'dist.init_process_group("gloo", init_method="file://{store}", rank=int(__import__("os").environ["RANK"]), '
        "world_size=2)",
    )
    assert str(store) in text
    ranks = [run(front, "-c", text, RANK=str(rank)) for rank in range(2)]
    return [output(rank) for rank in ranks][1]


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(f"megatron-core=={MEGATRON}", tmp_path_factory.mktemp("megatron"))


def test_the_cases_print_what_the_page_says_on_both_versions(newer: Path, tmp_path: Path) -> None:
    program = tmp_path / "cases.py"
    program.write_text("\n".join(blocks("python")))
    expected = "".join(blocks("text")).splitlines()
    assert len(expected) == 5
    with ThreadPoolExecutor() as threads:
        fronts = {"installed": None, "newer": newer}
        outputs = {
            name: threads.submit(printed_by_the_second_rank, program, front, tmp_path / name)
            for name, front in fronts.items()
        }
        for name, future in outputs.items():
            printed = future.result().splitlines()
            wrong = [a for e, a in zip(expected, printed, strict=True) if missing_lines(e, a)]
            assert not wrong, f"{name}: {wrong}"


def test_a_family_by_hybrid_model_is_the_same_with_other_names(newer: Path) -> None:
    lines = [json.loads(line) for line in output(run(newer, "-m", "tests.unit.hybrid_model")).splitlines()]
    assert [line["pattern"] for line in lines] == ["*E*E*E*E", "GEG-GE*E"]
    for line in lines:
        assert line["megatron"] == MEGATRON
        assert line["names_follow"] and line["same_outputs"] and line["same_gradients"]
        assert line["gpt_takes_hidden_states"] and not line["takes_hidden_states"]
    same_layers, mixed_layers = (line["shared_keys"] for line in lines)
    assert same_layers == ["embedding.word_embeddings.weight", "output_layer.weight"]
    # GPTModel's layer 2 and HybridModel's, which is the attention of layer 1.
    assert "decoder.layers.2.self_attention.A_log" in mixed_layers
