"""``megatron-dppo generate`` on real servers that hold other weights: the answers are those of its own folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from megatron_dppo.commands.main import main
from tests.e2e.runs import CONFIG, flags
from tests.engines.servers import Engine
from tests.engines.tiny import Reference, difference

PROMPTS = ["The quick brown fox", "1+2=", "jumps over the lazy dog, and then"]


def check_answers(engine: Engine, method: str, model: Reference, folder: Path) -> None:
    prompts, output = folder / "prompts.jsonl", folder / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    settings = flags(
        run__output_dir=folder / "run",
        data__label_key="",
        rollout__engine=engine.kind,
        rollout__servers__urls=json.dumps([engine.url]),
        rollout__weight_sync__method=method,
        rollout__dtype="fp32",
        rollout__temperature=0.7,
        rollout__samples_per_prompt=3,
        rollout__max_new_tokens=12,
    )
    source = ["--model", str(model.folder), "--prompts", str(prompts), "--output", str(output)]
    assert main(["generate", str(CONFIG), *source, *settings]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [text for text in PROMPTS for _ in range(3)]
    assert len({tuple(row["token_ids"]) for row in rows}) == len(rows)
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    for row in rows:
        expected = model.logprobs(tokenizer(row["prompt"]).input_ids, row["token_ids"], 0.7)
        assert difference(torch.tensor(row["logprobs"]), expected) < 1e-4


def test_sglang(sglang: Engine, new_model: Reference, tmp_path: Path) -> None:
    check_answers(sglang, "distributed", new_model, tmp_path)


def test_vllm(vllm: Engine, new_model: Reference, tmp_path: Path) -> None:
    check_answers(vllm, "disk", new_model, tmp_path)


def test_an_unreachable_server_is_reported(
    new_model: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = flags(
        run__output_dir=tmp_path / "run",
        rollout__engine="sglang",
        rollout__servers__urls='["http://127.0.0.1:9"]',
        rollout__weight_sync__method="disk",
    )
    assert main(["generate", str(CONFIG), "--model", str(new_model.folder), "--prompt", "1+1=", *settings]) != 0
    assert "http://127.0.0.1:9" in (message := capsys.readouterr().err) and "no inference server" in message
