"""The plug-ins of verl and SkyRL in the released packages: registered, called by the stack, compared with its own DPPO.

``make test-plugins`` installs the packages; the plug-in of TRL is tested beside the others in
``tests/unit/test_integrations.py``, which that command also runs.
"""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.test_integrations import batch, load

ROOT = Path(__file__).parents[2]
PINS = dict(
    line.split("==")
    for line in (ROOT / "tools/engines/plugins_requirements.txt").read_text().splitlines()
    if "==" in line and not line.startswith("#")
)


@pytest.mark.parametrize("name", ["verl", "skyrl", "trl"])
def test_the_pinned_package_is_the_one_that_is_imported(name: str) -> None:
    importlib.import_module(name)
    from importlib.metadata import version

    assert version(name) == PINS[name]


def gradient_of(loss: Tensor, b: dict[str, Tensor]) -> Tensor:
    (result,) = torch.autograd.grad(loss, b["logprobs"])
    return result


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_verl_s_registry_calls_the_loss_with_the_gradient_of_its_own(mode: str, kind: str) -> None:
    from verl.trainer.ppo import core_algos
    from verl.workers.config import FSDPActorConfig

    load("verl")
    ours = core_algos.get_policy_loss_fn(f"megatron_dppo/dppo_binary_{kind}")
    theirs = core_algos.get_policy_loss_fn(f"dppo_{kind}")
    limits = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2, "clip_ratio_c": 1.5}
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **limits)
    b = batch()
    mask = b["mask"].double()
    config.global_batch_info.update(dp_size=2, batch_num_tokens=int(mask.sum()), global_batch_size=3)
    values = (b["mu"], b["logprobs"], b["advantages"], mask, mode, config)
    results = [gradient_of(loss(*values)[0], b) for loss in (ours, theirs)]
    torch.testing.assert_close(results[0], results[1], rtol=1e-8, atol=1e-9)
    assert 0 < (results[0] == 0)[b["mask"]].sum() < b["mask"].sum()


@pytest.fixture
def skyrl_registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SkyRL's registry without the losses of earlier tests: it refuses a name twice."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    functions = {name: each for name, each in PolicyLossRegistry._functions.items() if "megatron_dppo" not in name}
    monkeypatch.setattr(PolicyLossRegistry, "_functions", functions)
    return PolicyLossRegistry


def skyrl_config(name: str) -> Any:
    from skyrl.train.config import AlgorithmConfig

    config = AlgorithmConfig(policy_loss_type=name)
    config.dppo.delta_low, config.dppo.delta_high = 0.1, 0.2
    return config


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_skyrl_s_registry_calls_the_loss_with_the_gradient_of_its_own(skyrl_registry: Any, kind: str) -> None:
    load("skyrl")
    b = batch()
    # SkyRL has no cap of the ratio; here it is 5.
    b["mu"] = b["mu"].maximum(b["logprobs"].detach() - 1.5)
    results = []
    for name in (f"megatron_dppo/dppo_binary_{kind}", "dppo"):
        config = skyrl_config(name)
        config.dppo.dppo_type = f"binary_{kind}"
        function = skyrl_registry.get(name)
        values = (b["logprobs"], b["mu"] + 0.3, b["advantages"], config)
        loss, _ = function(*values, loss_mask=b["mask"].double(), rollout_logprobs=b["mu"])
        results.append(gradient_of(loss, b))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)
    assert 0 < (results[0] == 0)[b["mask"]].sum() < b["mask"].sum()


@pytest.mark.parametrize("is_trainer_first", [True, False])
def test_skyrl_s_trainer_leaves_the_policy_pass_out(
    is_trainer_first: bool, skyrl_registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyrl.backends.skyrl_train.utils import ppo_utils

    name = "megatron_dppo/dppo_binary_tv"
    theirs = frozenset({ppo_utils.PolicyLossType.ROLLOUT_IS, ppo_utils.PolicyLossType.DPPO})
    monkeypatch.setattr(ppo_utils, "LOSSES_WITHOUT_OLD_LOGPROBS", theirs)
    monkeypatch.delitem(sys.modules, "skyrl.train.trainer", raising=False)
    if is_trainer_first:
        importlib.import_module("skyrl.train.trainer")
    load("skyrl")
    trainer = importlib.import_module("skyrl.train.trainer").RayPPOTrainer
    recorded = {"rollout_logprobs": torch.zeros(1)}

    def skips(loss: str, sample: dict[str, Any], **changes: Any) -> bool:
        algorithm = skyrl_config(loss)
        for key, value in changes.items():
            setattr(algorithm, key, value)
        this = Namespace(cfg=Namespace(trainer=Namespace(algorithm=algorithm)))
        return bool(trainer._skip_policy_forward(this, sample))

    assert skips(name, recorded) and skips("dppo", recorded)
    assert not skips("regular", recorded), "this one reads them"
    assert not skips(name, {}) and not skips(name, recorded, use_kl_in_reward=True)
