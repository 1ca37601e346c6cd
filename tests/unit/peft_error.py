"""Weights that PEFT makes of a folder with adapters, against W + s B A in float64.

As a program: a JSON list of cases on the standard input; PEFT's version and the error of each case come out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import peft
import torch

from tests.distributed.lora import Float64
from tests.distributed.parity import Case, hf_reference, samples


def peft_model(case: Case, folder: Path) -> peft.PeftModel:
    """The transformers model with the adapters of a folder."""
    model = hf_reference(case.tied, case.dense, case.shared, case.dense_layers, case.family)
    return peft.PeftModel.from_pretrained(model, str(folder))


def peft_error(case: Case, targets: tuple[str, ...], folder: Path) -> float:
    """Return the relative error of the log-probabilities of a few sequences, by PEFT on the transformers model."""
    side = Float64(case, targets)
    model = peft_model(case, folder)
    worst = 0.0
    with torch.no_grad():
        for sample, expected in zip(samples()[:4], side.logprobs(side.weights()), strict=False):
            logits = model(sample.tokens[None]).logits[0]
            result = logits.log_softmax(-1).gather(-1, sample.labels[:, None]).squeeze(-1)
            worst = max(worst, float((result - expected).norm() / expected.norm()))
    return worst


if __name__ == "__main__":
    print(peft.__version__)
    for asked in json.load(sys.stdin):
        print(peft_error(Case(**asked["case"]), tuple(asked["targets"]), Path(asked["folder"])))
