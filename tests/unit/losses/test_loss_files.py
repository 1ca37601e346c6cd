"""Rules for the file of every loss: examples, axes, needs, no torch, pickles; and the 20 lines of DPPO."""

from __future__ import annotations

import doctest
import math
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch

import megatron_dppo as md
from megatron_dppo import losses
from megatron_dppo.config.io import dump_toml, validate
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.loss_registry import loss_classes, loss_names
from megatron_dppo.errors import ConfigError
from megatron_dppo.losses import batch_statistics, policy_loss
from megatron_dppo.losses.dppo import dppo_reference
from megatron_dppo.losses.user_check import made_up_inputs
from megatron_dppo.types import LossInputs
from tests.unit.loss_inputs import loss_config, make_inputs

ROOT = Path(__file__).parents[3]
FILES = sorted(path.stem for path in (ROOT / "megatron_dppo/losses").glob("*.py") if path.stem != "__init__")
INF = math.inf
TOPK = 3


@pytest.mark.parametrize("file", FILES)
def test_the_worked_examples_of_a_file_are_correct(file: str) -> None:
    module = import_module(f"megatron_dppo.losses.{file}")
    names = {"torch": torch, "LossInputs": md.LossInputs, "LossConfig": md.LossConfig}
    result = doctest.testmod(module, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
    classes = [kind for kind in set(loss_classes().values()) if kind.__module__ == module.__name__]
    assert result.attempted >= len(classes)


@pytest.mark.parametrize("name", loss_names())
def test_the_docstring_of_a_loss_has_formula_axes_and_source(name: str) -> None:
    text = import_module(loss_classes()[name].__module__).__doc__ or ""
    for axis in ("Differentiated", "Weight", "Mask", "Source"):
        assert len(re.findall(rf"^{axis}: \S", text, re.MULTILINE)) == 1
    assert re.search(r"^    (grad|loss) = ", text, re.MULTILINE)


@pytest.mark.parametrize("name", loss_names())
def test_a_loss_needs_only_the_inputs_that_it_declares(name: str) -> None:
    config = loss_config(name)
    inputs, _ = make_inputs([0.3, 0.5, 0.6], [0.4, 0.4, 0.4], [1.0, -1.0, 0.5])
    expected = policy_loss(inputs, config).loss_sum
    optional = {
        "recomputed_logprobs",
        "sequence_ids",
        "token_weights",
        "topk_logprobs",
        "rollout_topk_logprobs",
        "topk_valid",
        "topk_other_logprob",
        "topk_other_square",
        "vocab_size",
        "statistics",
    }
    declared = config.required_inputs | ({"topk_other_logprob"} if config.is_topk else set())
    declared |= {"statistics"} if config.update_statistics() else set()
    fields = {key: value for key, value in vars(inputs).items() if key not in optional - declared}
    assert torch.equal(policy_loss(LossInputs(**fields), config).loss_sum, expected)


def test_every_class_with_a_name_of_its_own_is_a_loss() -> None:
    """Files are found by their text, since those that losses share import torch."""
    with_names = set()
    for file in FILES:
        module = import_module(f"megatron_dppo.losses.{file}")
        kinds = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, LossConfig)]
        with_names |= {
            k for k in kinds if k.__module__ == module.__name__ and get_args(k.model_fields["name"].annotation)
        }
    assert with_names == set(loss_classes().values()) and len(with_names) > 15


def test_the_names_of_the_package_are_those_of_its_one_list() -> None:
    for name in losses.__all__:
        value = getattr(losses, name)
        assert not isinstance(value, ModuleType), "a module of this name would hide it"
    with pytest.raises(AttributeError, match=r"'nothing'. It has: BatchTokens, .*policy_loss"):
        _ = losses.nothing  # type: ignore[attr-defined]


def test_configurations_are_read_without_torch() -> None:
    program = (
        "import sys\nfrom megatron_dppo.config.loss import LossConfig\n"
        "from megatron_dppo.config.loss_registry import loss_names\n"
        "for name in loss_names():\n    LossConfig(name=name).required_inputs\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", loss_names())
def test_a_loss_is_pickled_dumped_and_hashed(name: str) -> None:
    config = loss_config(name)
    reloaded = pickle.loads(pickle.dumps(config))
    assert type(reloaded) is type(config) and reloaded == config and hash(reloaded) == hash(config)
    assert LossConfig(**config.model_dump()) == config


def section(**loss: object) -> dict[str, object]:
    return {
        "run": {"output_dir": "out", "num_steps": 1},
        "model": {"path": "model"},
        "data": {"train": "task:chain_sum"},
        "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_new_tokens": 1},
        "optimizer": {"lr": 1.0},
        "loss": loss,
    }


def test_a_resolved_configuration_of_an_older_version_still_loads() -> None:
    flat = {
        "name": "grpo",
        "options": {},
        "mask_options": {},
        "topk": 20,
        "topk_eviction": False,
        "direction": "sampled",
        "tail": "proportional",
        "sequence_max": 0.05,
        "sequence_mean": 0.001,
        "position_floor": 0.8,
        "prefix_budget": 0.02,
        "centering": "truncate",
    }
    config = validate(section(**flat), "a test")
    assert config.loss == LossConfig(name="grpo")
    assert "sequence_max" not in dump_toml(config)


def test_a_key_of_another_loss_is_refused_with_the_losses_that_have_it() -> None:
    with pytest.raises(ConfigError, match=r"sequence_max = 0.1"):
        validate(section(name="grpo", sequence_max=0.1), "a test")
    with pytest.raises(ConfigError, match=r"loss.sequence_maxx = 0.1"):
        validate(section(name="trm", sequence_maxx=0.1), "a test")


EDGES = {
    "impossible now": ([-INF, -0.5], [-0.7, -0.7], [1.0, 1.0]),
    "impossible in the rollout": ([-0.5, -0.5], [-INF, -0.7], [1.0, 1.0]),
    "unknown in the rollout": ([-0.5, -0.5], [math.nan, -0.7], [1.0, -1.0]),
    "no advantage": ([-0.1, -0.1], [-2.0, -0.2], [0.0, 0.0]),
    "far above the cap": ([-0.01, -90.0], [-8.0, -95.0], [-1.0, 1.0]),
    "beyond what exp can": ([-1.0], [-120.0], [-1.0]),
    "certain": ([0.0, 0.0], [0.0, -1e-9], [1.0, -1.0]),
    "on the threshold": ([math.log(0.65)], [math.log(0.5)], [1.0]),
}


def compare(logprobs: torch.Tensor, mu: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, **keys) -> None:
    leaves = [logprobs.clone().requires_grad_() for _ in range(2)]
    inputs = LossInputs(logprobs=leaves[0], rollout_logprobs=mu, advantages=advantages, loss_mask=mask)
    thresholds = dict.fromkeys(("divergence_threshold_low", "divergence_threshold_high"), keys["threshold"])
    output = policy_loss(inputs, LossConfig(ratio_cap=keys["ratio_cap"], **thresholds)).loss_sum
    reference = dppo_reference(leaves[1], mu, advantages, mask, **keys)
    torch.testing.assert_close(output, reference, rtol=1e-12, atol=1e-14)
    output.backward()
    reference.backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("edge", EDGES.values(), ids=list(EDGES))
def test_the_reference_is_the_loss_at_the_edges(edge: tuple[list[float], ...], mask: bool) -> None:
    columns = [torch.tensor(column, dtype=torch.float64) for column in edge]
    compare(*columns, torch.full((len(edge[0]),), mask), threshold=0.15, ratio_cap=5.0)


@pytest.mark.parametrize("ratio_cap", [0.5, 5.0, 1e9])
@pytest.mark.parametrize("threshold", [1e-3, 0.15, 1.0])
def test_the_reference_is_the_loss_on_random_tokens(threshold: float, ratio_cap: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, mu = (torch.rand(500, generator=generator, dtype=torch.float64).log() for _ in range(2))
    advantages = torch.randn(500, generator=generator, dtype=torch.float64)
    advantages[::5] = 0
    mask = torch.rand(500, generator=generator) < 0.8
    compare(logprobs, mu, advantages, mask, threshold=threshold, ratio_cap=ratio_cap)


LIMITS: dict[str, tuple[str, tuple[Any, ...], tuple[Any, ...]]] = {
    "ratio_cap": ("dppo_binary_tv", (0.5, 1e-3), (0, -0.5)),
    "divergence_threshold_low": ("dppo_binary_tv", (1e-3, 1.0), (0, -0.1, 1.1)),
    "divergence_threshold_high": ("dppo_binary_kl", (1e-3, 2.0), (0, -0.1)),
    "dual_clip": ("ppo_clip", (1.01, 3.0), (1.0, 0.5)),
    "clip_ratio_low": ("grpo", (1e-3, 0.999), (0, 1.0, -0.1)),
    "clip_ratio_high": ("gspo", (1e-3, 1.5), (0, -0.1)),
    "ratio_floor": ("cispo", (1e-3, 0.9), (0, -0.1)),
    "position_floor": ("cppo", (1e-3, 1.0), (0, 1.01)),
    "prefix_budget": ("cppo", (1e-3, 2.0), (0, -1)),
    "sequence_max": ("trm", (1e-3, 2.0), (0, -0.5)),
    "sequence_mean": ("trm", (1e-3, 2.0), (0, -0.5)),
    "gate_temperature_low": ("sapo", (0.5, 9.0), (0, -0.5)),
    "gate_temperature_high": ("sapo", (0.5, 9.0), (0, -0.5)),
    "threshold_age": ("dppo_binary_tv", (0.5, 9.0), (0, -0.5)),
    "threshold_knee": ("ppo_clip", (0.5, 9.0), (0, -0.5)),
    "ratio_range": ("spo", (0.1, 12.5), (0, -0.5)),
    "weight_power_low": ("vespo", (0, 3.0), (-0.5,)),
    "weight_power_high": ("vespo", (0, 3.0), (-0.5,)),
    "weight_decay_low": ("vespo", (0.1, 3.0), (0, -0.5)),
    "weight_decay_high": ("vespo", (0.1, 3.0), (0, -0.5)),
    "log_clip_low": ("gmpo", (0.1, 3.0), (0, -0.5)),
    "log_clip_high": ("gmpo", (0.1, 3.0), (0, -0.5)),
    "kl_coef": ("grpo", (0, 0.5), (-1e-3,)),
    "entropy_coef": ("grpo", (0, 0.5), (-1e-3,)),
    "topk": ("dppo_topk_tv", (1, 64), (0, -1)),
}
"""Key: a loss with it, values that are allowed, values that are not."""


@pytest.mark.parametrize("key", LIMITS)
def test_limits_of_a_key(key: str) -> None:
    name, allowed, refused = LIMITS[key]
    for value in allowed:
        extra = {"kl_target": "rollout"} if key == "kl_coef" and value else {}
        assert getattr(LossConfig(**{"name": name, key: value, **extra}), key) == value
    for value in refused:
        with pytest.raises(ValueError, match=rf"{key}(.|\n)*(greater|less|at most)"):
            LossConfig(**{"name": name, key: value})


@pytest.mark.parametrize("name", loss_names())
def test_a_loss_depends_on_other_tokens_exactly_if_it_says_so(name: str) -> None:
    """Heads call a loss on chunks of tokens if ``needs`` allows it: tokens one by one must give the same gradient."""
    config = LossConfig(name=name, **({"topk": TOPK} if LossConfig(name=name).is_topk else {}))
    is_same = []
    inputs = made_up_inputs(TOPK)
    inputs = replace(inputs, statistics=batch_statistics(inputs, config))
    mu = inputs.rollout_logprobs
    assert mu is not None
    # From close to the sampling policy to far from it; the last one moves all tokens as far as the update wants.
    policies = [mu + moved * (inputs.logprobs - mu) for moved in (0.02, 0.1, 0.3, 1.0)]
    policies.append((0.4 + 0.13 * inputs.advantages.sign()).log())
    for log_pi in policies:
        log_mu = torch.full_like(mu, 0.4).log() if log_pi is policies[-1] else mu
        inputs = replace(inputs, logprobs=log_pi, rollout_logprobs=log_mu)
        columns = {key: value for key, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
        parts = []
        for row in range(len(mu)):
            alone = replace(inputs, **{key: value[row : row + 1] for key, value in columns.items()})
            parts.append(gradient(replace(alone, sequence_ids=torch.zeros(1, dtype=torch.int64)), config))
        is_same.append(torch.allclose(torch.cat(parts), gradient(inputs, config), rtol=1e-5, atol=1e-7))
    assert all(is_same) == (not config.needs.sequences)
    idle = gradient(inputs, config)[inputs.advantages == 0]
    assert not idle.any() and not config.needs.zero_advantage, "heads may skip rows whose gradient is 0"


def gradient(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
    assert inputs.topk_logprobs is not None
    leaf = inputs.logprobs.clone().requires_grad_()
    inputs = replace(inputs, logprobs=leaf, topk_logprobs=inputs.topk_logprobs.clone().requires_grad_())
    (result,) = torch.autograd.grad(policy_loss(inputs, config).loss_sum, leaf)
    return result
