"""Rollouts of other stacks: their formats, and ledgers of such with one known cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save_file

from megatron_dppo.commands.main import main
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.errors import DataError
from megatron_dppo.hf.folder import build_hf_model, read_hf_config, stream_model
from megatron_dppo.types import Completion, Prompt, SamplingParams
from megatron_dppo_doctor.diagnose.dumps import read_dump
from megatron_dppo_doctor.diagnose.foreign import diagnose_rollouts
from megatron_dppo_doctor.diagnose.ledger import Cause, Ledger
from megatron_dppo_lab.perturbation import Perturbation

MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"
CONFIG, TOKENIZER = read_hf_config(MODEL), load_tokenizer(MODEL)
POLICY = build_hf_model(CONFIG, torch.float32, seed=1)
PLAIN = SamplingParams(max_new_tokens=1)
PROMPTS = [
    Prompt(prompt_id=t, text=t, token_ids=tuple(TOKENIZER(t).input_ids), label="")
    for t in ("7+8-3=", "1+1-2=", "9-9=")
    for _ in range(4)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of the policy."""
    target = tmp_path_factory.mktemp("model")
    shutil.copy(MODEL / "config.json", target)
    save_file({name: tensor.contiguous() for name, tensor in stream_model(POLICY)}, target / "model.safetensors")
    return target


def sampled(perturbation: Perturbation | None = None, **settings: Any) -> list[Completion]:
    engine = LocalEngine(CONFIG, TOKENIZER, dtype=torch.float32, device=torch.device("cpu"), perturbation=perturbation)
    engine.update_weights(stream_model(POLICY), 0)
    completions = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8, seed=4, routed_experts=True, **settings))
    engine.close()
    return completions


def slime(completion: Completion, prompt: Prompt) -> dict[str, Any]:
    """A ``Sample`` as slime's ``to_dict`` gives it (624b824a8), with what it holds besides."""
    assert completion.logprobs is not None and completion.routed_experts is not None
    response = completion.token_ids.tolist()
    return {
        "index": 0,
        "prompt": prompt.text,
        "tokens": [*prompt.token_ids, *response],
        "response": completion.text,
        "response_length": len(response),
        "reward": 1.0,
        "loss_mask": [1] * len(response),
        "weight_versions": ["3"],
        "rollout_log_probs": completion.logprobs.tolist(),
        "rollout_routed_experts": completion.routed_experts.int().numpy(),
        "rollout_top_p_token_ids": None,
        "rollout_top_p_token_offsets": None,
        "remove_sample": False,
        "status": "completed",
        "metadata": {},
        "spec_info": {"spec_accept_token_num": 0},
    }


def write_slime(path: Path, completions: list[Completion], **changes: Any) -> Path:
    samples = [slime(c, p) | changes for c, p in zip(completions, PROMPTS, strict=True)]
    torch.save({"rollout_id": 3, "samples": samples}, path)
    return path


def rows(completions: list[Completion], names: tuple[str, str, str]) -> list[dict[str, Any]]:
    prompt, response, logprobs = names
    return [
        {prompt: list(p.token_ids), response: c.token_ids.tolist(), logprobs: c.logprobs.tolist(), "score": 1.0}
        for c, p in zip(completions, PROMPTS, strict=True)
        if c.logprobs is not None
    ]


def parts(ledger: Ledger) -> Mapping[str, float]:
    assert sum(row.share for row in ledger.rows) == pytest.approx(1, abs=1e-6)
    return {row.cause: row.share for row in ledger.rows}


def test_every_format_gives_the_same_samples_and_an_honest_engine_differs_by_rounding(
    folder: Path, tmp_path: Path
) -> None:
    completions = sampled()
    verl = rows(completions, ("prompts", "responses", "rollout_log_probs"))
    (tmp_path / "verl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in verl))
    trl = rows(completions, ("prompt_ids", "completion_ids", "sampling_logps"))
    parquet.write_table(pyarrow.Table.from_pylist(trl), tmp_path / "trl.parquet")
    files = [write_slime(tmp_path / "slime.pt", completions), tmp_path / "verl.jsonl", tmp_path / "trl.parquet"]
    for file in files:
        read = read_dump(file)
        for dumped, prompt, completion in zip(read, PROMPTS, completions, strict=True):
            assert dumped.sample.tokens.tolist() == [*prompt.token_ids, *completion.token_ids.tolist()][:-1]
            assert dumped.sample.loss_mask.sum() == len(completion.token_ids)
        ledger = diagnose_rollouts(file, str(folder), PLAIN, None)
        assert ledger.total < 1e-5 and ledger.tokens == sum(len(c.token_ids) for c in completions)
        assert Cause.SAMPLER in ledger.absent and "bf16 copy" in ledger.notes[-1]
    assert Cause.ROUTER_IDS not in diagnose_rollouts(files[0], str(folder), PLAIN, None).absent


def test_raw_numbers_of_a_tempered_engine_are_the_samplers(folder: Path, tmp_path: Path) -> None:
    raw = sampled()  # sampled and reported at temperature 1, while training is said to divide by .6
    file = write_slime(tmp_path / "raw.pt", raw)
    ledger = diagnose_rollouts(file, str(folder), SamplingParams(max_new_tokens=1, temperature=0.6), None)
    assert parts(ledger)[Cause.SAMPLER] == pytest.approx(1, abs=1e-3) and ledger.total > 0.01
    assert any("temperature 1 (raw)" in note for note in ledger.notes)


def test_numbers_over_what_a_filter_left_are_the_samplers(folder: Path, tmp_path: Path) -> None:
    file = write_slime(tmp_path / "cut.pt", sampled(top_p=0.7, return_sampling_mask=True))
    ledger = diagnose_rollouts(file, str(folder), SamplingParams(max_new_tokens=1, top_p=0.7), None)
    assert parts(ledger)[Cause.SAMPLER] == pytest.approx(1, abs=1e-2) and ledger.signed < -0.01


def test_sets_in_the_dump_are_those_of_training(folder: Path, tmp_path: Path) -> None:
    completions = sampled(top_p=0.7, return_sampling_mask=True)
    samples = []
    for completion, prompt in zip(completions, PROMPTS, strict=True):
        assert completion.sampling_mask is not None
        offsets = [0, *completion.sampling_mask.counts.cumsum(0).tolist()]
        sets = {"rollout_top_p_token_ids": completion.sampling_mask.ids, "rollout_top_p_token_offsets": offsets}
        samples.append(slime(completion, prompt) | sets)
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "sets.pt")
    ledger = diagnose_rollouts(tmp_path / "sets.pt", str(folder), PLAIN, None)
    assert ledger.total < 1e-5 and Cause.SAMPLER in ledger.absent


def test_experts_of_a_noisy_router_are_counted_under_the_ids_and_their_weights_are_not_guessed(
    folder: Path, tmp_path: Path
) -> None:
    file = write_slime(tmp_path / "noise.pt", sampled(Perturbation(router_noise=1.0)))
    ledger = diagnose_rollouts(file, str(folder), PLAIN, None)
    result = parts(ledger)
    assert result[Cause.ROUTER_IDS] > 0.2 and set(result) == {Cause.ROUTER_IDS, Cause.NOT_SEPARATED}
    assert "not separable" in ledger.absent["router weights"] and ledger.closes is None


def test_numbers_of_their_trainer_are_compared_where_the_dump_has_them(folder: Path, tmp_path: Path) -> None:
    completions = sampled()
    moved = [
        {**row, "old_log_probs": [value - 0.5 for value in row["rollout_log_probs"]]}
        for row in rows(completions, ("prompts", "responses", "rollout_log_probs"))
    ]
    (tmp_path / "verl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in moved))
    ledger = diagnose_rollouts(tmp_path / "verl.jsonl", str(folder), PLAIN, None)
    assert parts(ledger)[Cause.OTHER_TRAINER] == pytest.approx(1, abs=1e-3) and ledger.signed == pytest.approx(
        -0.5, abs=1e-4
    )


def test_tokens_without_a_loss_are_left_out(tmp_path: Path) -> None:
    completions = sampled()
    write_slime(tmp_path / "some.pt", completions, rollout_routed_experts=None)
    whole = read_dump(tmp_path / "some.pt")
    samples = [slime(c, p) for c, p in zip(completions, PROMPTS, strict=True)]
    samples[0]["remove_sample"] = True
    samples[1]["loss_mask"][0] = 0
    torch.save({"samples": samples}, tmp_path / "masked.pt")
    masked = read_dump(tmp_path / "masked.pt")
    assert len(masked) == len(whole) - 1 and masked[0].sample.loss_mask.sum() == whole[1].sample.loss_mask.sum() - 1
    assert len(read_dump(tmp_path / "masked.pt", 3)) == 2


WRONG = {
    "verl.jsonl": ({"input": "1+1", "output": "2", "gts": "2", "score": 1.0, "step": 1}, "calculate_log_probs"),
    "trl.jsonl": ({"prompt": "1+1", "completion": "2", "step": 1, "advantage": 0.0}, "log_extra"),
    "ids.jsonl": ({"prompts": [1], "responses": [2, 3]}, "calculate_log_probs"),
    "other.jsonl": ({"text": "1+1"}, "no token ids"),
    "length.jsonl": (
        {"prompts": [1], "responses": [2, 3], "rollout_log_probs": [-1.0]},
        "has 1 entries for 2 response tokens",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_dump_lacks_is_said_with_the_setting_that_writes_it(name: str, tmp_path: Path) -> None:
    row, words = WRONG[name]
    (tmp_path / name).write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=words):
        read_dump(tmp_path / name)


def test_nothing_in_a_torch_file_is_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"samples": [Trap()]}, tmp_path / "trap.pt")
    with pytest.raises(DataError, match="weights_only"):
        read_dump(tmp_path / "trap.pt")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(DataError, match=r"gen_batch\.dp"):
        (tmp_path / "gen_batch.dp").touch()
        read_dump(tmp_path / "gen_batch.dp")
    torch.save({"samples": [slime(sampled()[0], PROMPTS[0]) | {"rollout_log_probs": None}]}, tmp_path / "none.pt")
    with pytest.raises(DataError, match="return_logprob"):
        read_dump(tmp_path / "none.pt")


def test_another_model_is_refused_and_the_command_prints_and_writes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompts": [1], "responses": [100_000], "rollout_log_probs": [-1.0]}
    (tmp_path / "wide.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["diagnose", "--rollouts", str(tmp_path / "wide.jsonl"), "--model", str(folder)]) == 2
    assert "another tokenizer or model" in capsys.readouterr().err
    bad = write_slime(tmp_path / "bad.pt", sampled(), rollout_routed_experts=np.zeros((2, 1, 1), np.int32))
    assert main(["diagnose", "--rollouts", str(bad), "--model", str(folder)]) == 2
    file, target = write_slime(tmp_path / "right.pt", sampled()), tmp_path / "ledger.json"
    arguments = ["diagnose", "--rollouts", str(file), "--model", str(folder), "--limit", "3", "--json", str(target)]
    assert main(arguments) == 0
    assert "engine, not separated" in capsys.readouterr().out
    assert json.loads(target.read_text())["closes"] is True, "rounding"


def test_weights_that_compute_no_numbers_are_told(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = {name: tensor.clone() for name, tensor in stream_model(POLICY)}
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, broken / "model.safetensors")
    (tmp_path / "ok.jsonl").write_text('{"prompts": [1, 2], "responses": [3, 4], "rollout_log_probs": [-1, -2]}\n')
    with pytest.raises(DataError, match=r"not finite.*--model"):
        diagnose_rollouts(tmp_path / "ok.jsonl", str(broken), PLAIN, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either the folder"),
        (["RUN", "--rollouts", "x"], "either the folder"),
        (["--rollouts", "x"], "--model"),
        (["RUN", "--top-p", "0.9"], "needs --rollouts"),
        (["--rollouts", "x", "--model", "y", "--temperature", "0"], "above 0"),
        (["--rollouts", "x", "--model", "y", "--train.mini_batches=2"], "unexpected argument"),
        (["nowhere"], "not the folder of a run"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", *arguments]) == 2
    assert words in capsys.readouterr().err
