"""Interface of ``import megatron_dppo`` for other trainers: names, signatures and pickles stay, its examples are true,
and it needs nothing but torch and pydantic."""

from __future__ import annotations

import doctest
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch

import megatron_dppo as md
from source_folders import SOURCES

ROOT = Path(__file__).parents[2]
KNOWN = Path(__file__).parents[1] / "data" / "public_api.json"
NAMES = [name for name in md.__all__ if name != "__version__"]
PROGRAM = """
import sys
from functools import partial
import megatron_dppo as md
assert not [m for m in sys.modules if m.split(".")[0] in ("torch", "pydantic")], "loaded when it is asked for"
import torch
for name in md.__all__:
    getattr(md, name)
inputs = md.LossInputs(
    logprobs=torch.tensor([0.5, 0.9]).log().requires_grad_(),
    rollout_logprobs=torch.tensor([0.4, 0.5]).log(),
    advantages=torch.tensor([1.0, 1.0]),
    loss_mask=torch.tensor([True, True]),
)
md.dppo_loss(inputs, md.LossConfig(name="dppo_binary_tv")).loss_sum.backward()
assert torch.allclose(inputs.logprobs.grad, torch.tensor([-1.25, 0.0]))
torch.manual_seed(0)
hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
labels, mask = torch.arange(5), torch.ones(5, dtype=torch.bool)
logprobs = (hidden @ weight.T).detach().log_softmax(1).gather(1, labels[:, None])[:, 0]
targets = md.TokenTargets(labels=labels, advantages=torch.ones(5), loss_mask=mask, rollout_logprobs=logprobs)
loss = partial(md.policy_loss, config=md.LossConfig(name="dppo_binary_kl"))
md.dppo_head_loss(hidden, weight, targets, loss, group=None, vocab_size=11).loss_sum.backward()
found = hidden.grad, weight.grad
hidden.grad = weight.grad = None
(-(hidden @ weight.T).log_softmax(1).gather(1, labels[:, None]).sum()).backward()
assert torch.allclose(found[0], hidden.grad, atol=1e-5) and torch.allclose(found[1], weight.grad, atol=1e-5)
for name in ("megatron", "transformers", "numpy", "safetensors", "aiohttp", "triton", "psutil"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(f"{name} is there: this environment proves nothing")
print("done")
"""


def requirements(name: str, found: set[str]) -> set[str]:
    """The installed distributions that one needs, itself among them."""
    try:
        needed = distribution(name).requires or []
    except PackageNotFoundError:
        return found
    found.add(name)
    for line in needed:
        other = re.split(r"[\s;<>=!~\[(]", line)[0]
        if "extra ==" not in line and other not in found and other != "triton":
            requirements(other, found)
    return found


def test_loss_and_head_need_torch_and_pydantic_alone(tmp_path: Path) -> None:
    """In an environment that has only these, and what they need themselves."""
    for name in requirements("pydantic", requirements("torch", set())):
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}:
            if not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(Path(str(installed.locate_file(top))))
    for name, folder in SOURCES.items():  # the wheel has all of them
        (tmp_path / name).symlink_to(folder)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-S", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


def described() -> dict[str, str]:
    """Signatures, without quotes and modules of types; of configurations their fields."""
    result = {}
    for name in NAMES:
        value = getattr(md, name)
        if hasattr(value, "known_fields"):
            fields = value.known_fields()
            result[name] = ", ".join(f"{key}={field.default!r}" for key, field in sorted(fields.items()))
        else:
            result[name] = re.sub(r"(?<![\w.])(?:[a-z_]\w*\.)+(?=\w)|['\"]", "", str(inspect.signature(value)))
    return result


def test_names_and_signatures_are_those_that_were_promised() -> None:
    """On purpose only: ``python -m tests.unit.test_public_api`` writes the promise anew."""
    assert described() == json.loads(KNOWN.read_text())
    assert set(md.__all__) <= set(dir(md))
    assert md.KeptSets is md.SamplingMask, "the earlier name still works"
    with pytest.raises(AttributeError, match=r"'nothing'; it has .*policy_loss"):
        _ = md.nothing


def test_pickles_give_back_what_they_got() -> None:
    config = md.LossConfig(name="dppo_topk_tv", topk=7, divergence_threshold_low=0.3)
    reloaded = pickle.loads(pickle.dumps(config))
    assert isinstance(reloaded, md.LossConfig) and type(reloaded) is type(config) and reloaded == config
    inputs = md.LossInputs(
        logprobs=-torch.ones(2, requires_grad=True), advantages=torch.ones(2), loss_mask=torch.tensor([True, False])
    )
    back = pickle.loads(pickle.dumps(inputs))
    assert torch.equal(back.loss_mask, inputs.loss_mask) and back.rollout_logprobs is None
    output = md.policy_loss(
        md.LossInputs(**{**vars(inputs), "rollout_logprobs": torch.zeros(2)}), md.LossConfig(name="dppo_binary_tv")
    )
    back = pickle.loads(pickle.dumps(output))
    assert torch.equal(back.loss_sum, output.loss_sum) and back.metrics.keys() == output.metrics.keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_each_name_is_true(name: str) -> None:
    value = getattr(md, name)
    names = {**vars(sys.modules[value.__module__]), **{other: getattr(md, other) for other in NAMES}, "torch": torch}
    (example,) = [result for result in doctest.DocTestFinder(recurse=False).find(value, name, globs=names)]
    assert example.examples, f"{name} has no example"
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert not said, "".join(said)


def test_the_command_says_its_version() -> None:
    command = [sys.executable, "-m", "megatron_dppo.commands.main", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert re.fullmatch(rf"megatron-dppo {re.escape(md.__version__)} \(.*torch \d.*megatron-core \d.*\)\n", done.stdout)


if __name__ == "__main__":
    KNOWN.write_text(json.dumps(described(), indent=1) + "\n")
