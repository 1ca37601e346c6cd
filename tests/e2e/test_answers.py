"""``megatron-dppo eval`` and ``generate`` against transformers' own generation and log-probabilities."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.commands.main import main
from tests.e2e.runs import ROOT, environment

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def exported(base_run: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base_run / "hf", dtype=torch.float32).eval()


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_eval_of_the_newest_checkpoint_is_greedy_generation_of_the_exported_model(
    base_run: Path, exported: Any, tmp_path: Path
) -> None:
    arguments = ["eval", str(base_run), "--answers", "answers.jsonl", "--json", "values.json"]
    settings = ["--rollout.dtype", "fp32", "--eval.max_prompts", "24", "--eval.max_new_tokens", "24"]
    result = subprocess.run(
        [sys.executable, "-m", "megatron_dppo.commands.main", *arguments, *settings],
        env=environment(),
        cwd=tmp_path,  # not where the run was started, whose configuration has relative paths
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    values, answers = json.loads((tmp_path / "values.json").read_text()), rows(tmp_path / "answers.jsonl")
    assert values.pop("weights").endswith("checkpoints/step_000025") and len(answers) == 24
    from transformers import AutoTokenizer

    tokenizer, right = AutoTokenizer.from_pretrained(base_run / "hf"), 0
    for answer in answers:
        ids = tokenizer(answer["prompt"], return_tensors="pt").input_ids
        expected = exported.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        assert answer["token_ids"] == expected.tolist()
        boxed = re.search(r"\\boxed\{(-?\d+)\}", tokenizer.decode(expected))
        right += boxed is not None and boxed[1] == answer["label"]
        assert answer["reward"] == float(boxed is not None and boxed[1] == answer["label"])
    assert values["accuracy"] == pytest.approx(right / 24)
    assert values["response_length"] == pytest.approx(sum(len(a["token_ids"]) for a in answers) / 24)


def test_generate_without_labels_tells_the_distribution_that_it_drew_from(
    base_run: Path, exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("9-4=", "1+2+3=", "8+7=")))
    arguments = ["generate", "examples/chain_sum/dppo.toml", "--model", str(base_run / "hf"), "--prompts", str(prompts)]
    sampling = {"dtype": "fp32", "temperature": "0.7", "top_k": "3", "samples_per_prompt": "4", "max_new_tokens": "20"}
    flags = [part for name, value in sampling.items() for part in (f"--rollout.{name}", value)]
    assert main([*arguments, *flags, "--data.label_key", "", "--output", str(output)]) == 0
    result = rows(output)
    assert [row["prompt"] for row in result] == [text for text in ("9-4=", "1+2+3=", "8+7=") for _ in range(4)]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base_run / "hf")
    for row in result:
        prompt = tokenizer(row["prompt"]).input_ids
        ids = torch.tensor([prompt + row["token_ids"]])
        with torch.no_grad():
            scores = exported(ids).logits[0, len(prompt) - 1 : -1].double() / 0.7
        kept = scores >= scores.topk(3).values[:, -1:]
        logprobs = scores.masked_fill(~kept, -torch.inf).log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(row["token_ids"])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row["logprobs"]).double(), expected, rtol=0, atol=1e-4)
        assert row["label"] == "" and "reward" not in row
    # 1 for each of the three prompts if siblings were the same.
    assert len({tuple(row["token_ids"]) for row in result}) > 3, "siblings are drawn apart"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "{run}", "--step", "7"], "no checkpoint of step 7; available: step_000025"),
        (["eval", "{config}", "--step", "7"], "--step 7 needs the folder of a run"),
        (["eval", "{run}/hf"], "is not the folder of a run"),
        (["eval", "{config}", "--model", "{run}/hf", "--data.eval", "null"], "data.eval is not set"),
        (["eval", "{config}", "--json", "{run}/summary.json"], "exists already"),
        (["eval", "{config}", "--answers", "{run}/none/a.jsonl"], "folder that does not exist"),
        (["generate", "{config}", "--prompt", "1+1=", "--score"], "--prompt has none"),
        (["generate", "{config}", "--model", "{run}/hf", "--data.label_key", "", "--score"], "compares answers with"),
        (["generate", "{config}", "--model", "{run}"], "config.json is missing"),
        (["generate", "{config}", "--nonsense", "1"], "nonsense"),
    ],
)
def test_bad_requests_are_refused(
    base_run: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(ROOT)
    names = {"run": str(base_run), "config": "examples/chain_sum/dppo.toml"}
    assert main([argument.format(**names) if argument else "" for argument in arguments]) != 0
    assert message in capsys.readouterr().err
