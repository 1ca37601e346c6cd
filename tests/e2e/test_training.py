"""A whole run: the reward rises, everything promised is written, the exported model is the trained one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_dppo.data.training_samples import to_training_sample
from megatron_dppo.hf.weight_files import FolderWeights
from tests.e2e.runs import flags, records, train

pytestmark = pytest.mark.e2e


def test_reward_and_held_out_accuracy_rise(base_run: Path) -> None:
    summary = json.loads((base_run / "summary.json").read_text())
    assert summary["eval_after"] > summary["eval_before"] + 0.3, summary
    assert summary["reward_last"] > summary["reward_first"] + 0.15, summary
    assert summary["world_size"] == 2 and "ep2" in summary["layout"]
    assert summary["policy_updates"] == 50
    assert 0 < summary["train_seconds"] < summary["total_seconds"]


def test_everything_promised_is_written(base_run: Path) -> None:
    for name in ("metrics.jsonl", "tensorboard", "curves.png", "checkpoints/step_000025", "hf", "samples.jsonl"):
        assert (base_run / name).exists(), name
    step = records(base_run)[-1]
    for key in ("train/mask_fraction", "train/abs_prob_diff", "train/entropy", "rollout/reward", "eval/accuracy"):
        assert key in step, key
    output = (base_run / "output.txt").read_text()
    assert "step 25/25" in output and "held-out problems" in output and str(base_run / "hf") in output


def test_rollout_in_bf16_differs_from_training_in_fp32_a_little(base_run: Path) -> None:
    first = records(base_run)[1]
    assert 1e-5 < first["train/abs_prob_diff_first"] < 0.02


def test_exported_folder_loads_in_transformers_with_the_same_logprobs(base_run: Path, tmp_path: Path) -> None:
    """The resumed Megatron model and the exported folder agree: a run of 0 further steps evaluates both."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base_run / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base_run / "hf")
    exported = FolderWeights(base_run / "hf")
    assert exported["model.norm.weight"].dtype == torch.float32
    ids = tokenizer("7+8-3=").input_ids + tokenizer("7+8=15,15-3=12 \\boxed{12}", add_special_tokens=False).input_ids
    sample = to_training_sample(ids[:7], [*ids[7:], tokenizer.eos_token_id], None, 1.0)
    with torch.no_grad():
        logits = model(sample.tokens[None]).logits[0].double()
    expected = logits.log_softmax(-1).gather(-1, sample.labels[:, None]).squeeze(-1)
    torch.save({"sample": vars(sample), "expected": expected}, tmp_path / "reference.pt")
    from tests.distributed.spawn import run_distributed
    from tests.e2e.checkpoint_logprobs import compare

    run_distributed(compare, 2, str(base_run), str(tmp_path / "reference.pt"))


def test_the_best_checkpoint_is_kept_beside_the_newest(short_run: list[str], tmp_path: Path) -> None:
    options = flags(
        run__num_steps=4, optimizer__lr=0.02, eval__every=1, checkpoint__keep=1, checkpoint__keep_best="true"
    )
    result = train([*short_run, *options])
    assert result.returncode == 0, result.stderr
    accuracy = {r["step"]: r["eval/accuracy"] for r in records(tmp_path / "run") if r["step"] > 0}
    best = max(accuracy, key=lambda step: (accuracy[step], -step))
    folder = tmp_path / "run/checkpoints"
    assert json.loads((folder / "best.json").read_text()) == {"checkpoint": f"step_{best:06d}"}
    assert {p.name for p in folder.glob("step_*")} == {f"step_{best:06d}", "step_000004"}
    assert best < 4, "a learning rate this high ruins the model, so that the best is not the last"


def test_a_solved_run_ends_well_stays_ended_and_goes_on_towards_a_higher_goal(
    short_run: list[str], tmp_path: Path
) -> None:
    options = flags(
        run__num_steps=4, eval__every=2, checkpoint__save_every=4, train__max_staleness=1, log__curves="true"
    )
    folder = tmp_path / "run"
    first = train([*short_run, *options, "--eval.stop_at_accuracy", "0.0"])
    assert first.returncode == 0 and "reached eval.stop_at_accuracy = 0.0" in first.stdout, first.stderr
    assert [r["step"] for r in records(folder)] == [0, 1, 2]
    for name in ("checkpoints/step_000002", "hf/model.safetensors", "summary.json", "curves.png"):
        assert (folder / name).exists(), name
    second = train([*short_run, *options, "--eval.stop_at_accuracy", "0.0"])
    assert second.returncode == 0 and "solved   eval" in second.stdout, second.stderr
    assert [r["step"] for r in records(folder)] == [0, 1, 2]
    on = train([*short_run, *options, "--eval.stop_at_accuracy", "1.5"])
    assert on.returncode == 0 and "solved   eval" not in on.stdout, on.stderr
    assert [r["step"] for r in records(folder)] == [0, 1, 2, 3, 4]


def test_epochs_at_learning_rate_zero_change_no_weight(short_run: list[str], base_model: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"{n}+1=", "label": str(n + 1)}) for n in range(6)]
    (tmp_path / "six.jsonl").write_text("\n".join(rows))
    more = flags(
        run__num_steps="null",
        run__num_epochs=2,
        data__train=tmp_path / "six.jsonl",
        optimizer__lr=0,
        optimizer__min_lr=0,
        # Hot enough that siblings differ, whatever the model has learned.
        rollout__temperature=2.0,
    )
    result = train([*short_run, *more])
    assert result.returncode == 0, result.stdout + result.stderr
    steps = records(tmp_path / "run")[1:]
    assert [step["step"] for step in steps] == [1, 2, 3]  # 2 * 6 prompts, 4 a step
    assert all(step["train/learning_rate"] == 0 for step in steps)
    assert any(step["train/grad_norm"] > 0 for step in steps), "without gradients nothing is shown"
    before, after = FolderWeights(base_model), FolderWeights(tmp_path / "run/hf")
    assert before.names() == after.names() and all(torch.equal(before[name], after[name]) for name in before.names())


def test_fp16_lowers_its_loss_scale_until_nothing_overflows(short_run: list[str], tmp_path: Path) -> None:
    first = 2**18
    more = flags(model__dtype="fp16", rollout__dtype="fp16", run__num_steps=6, optimizer__initial_loss_scale=first)
    result = train([*short_run, *more])
    assert result.returncode == 0, result.stdout + result.stderr
    steps = records(tmp_path / "run")[1:]
    skipped = [step["train/skipped_updates"] for step in steps]
    assert skipped[0] > 0 and skipped[-1] == 0, skipped
    assert steps[-1]["train/loss_scale"] == first / 2 ** sum(skipped)
    assert steps[-1]["train/policy_version"] == 2 * len(steps) - sum(skipped), "every other update was applied"
    assert all(step["train/abs_prob_diff_first"] < 2e-3 for step in steps)
