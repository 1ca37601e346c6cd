"""examples/integrations: the gradient through each stack's plug-in point is that of DPPO-Binary-TV written out here.

TRL and Megatron are the released packages. For verl, SkyRL, slime and NeMo-RL there are stand-ins here of what their
plug-ins import, after the sources that the examples name; tests of their own compare them with verl and SkyRL where
these are installed.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import files
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import megatron_dppo as md

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/integrations"


def load(stack: str, monkeypatch: pytest.MonkeyPatch | None = None, **modules: dict[str, Any]) -> ModuleType:
    """The plug-in, with stand-ins for what it imports."""
    for name, names in modules.items():
        parts = name.split("__")
        for end in range(1, len(parts) + 1):
            stub = ModuleType(".".join(parts[:end]))
            stub.__dict__.update(names if end == len(parts) else {"__path__": []})
            assert monkeypatch is not None
            monkeypatch.setitem(sys.modules, stub.__name__, stub)
    spec = importlib.util.spec_from_file_location(f"integration_{stack}", EXAMPLES / stack / "dppo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batch(seed: int = 0, rows: int = 3, width: int = 7) -> dict[str, Tensor]:
    """Log-probabilities in float64 far enough apart that some tokens of either sign are masked."""
    draw = torch.Generator().manual_seed(seed)
    pi, mu = torch.rand(2, rows, width, generator=draw, dtype=torch.float64) * 0.9 + 0.05
    mask = torch.arange(width) < torch.tensor([[width], [4], [2]])[:rows]
    advantages = torch.tensor([[1.0], [-0.5], [0.7]], dtype=torch.float64)[:rows].expand(rows, width)
    return {"logprobs": pi.log().requires_grad_(), "mu": mu.log(), "mask": mask, "advantages": advantages}


def gradient(
    b: dict[str, Tensor], weights: Tensor, *, low: float = 0.15, high: float = 0.15, cap: float = 1e9
) -> Tensor:
    """-A min(pi / mu, C) w, 0 where the update leads out of the trust region; token by token."""
    result = torch.zeros_like(b["mu"])
    for i in range(len(result)):
        for j in range(result.shape[1]):
            pi, mu, a = b["logprobs"][i, j].exp().item(), b["mu"][i, j].exp().item(), b["advantages"][i, j].item()
            leads_out = (a > 0 and pi - mu > high) or (a < 0 and mu - pi > low)
            if b["mask"][i, j] and not leads_out:
                result[i, j] = -a * min(pi / mu, cap) * weights[i, j]
    kept = (result != 0)[b["mask"]]
    assert kept.any() and not kept.all(), "the case has to mask some tokens and keep some"
    return result


def check(loss: Tensor, b: dict[str, Tensor], expected: Tensor) -> None:
    (actual,) = torch.autograd.grad(loss, b["logprobs"])
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


VERL_ARGUMENTS = [
    "old_log_prob",
    "log_prob",
    "advantages",
    "response_mask",
    "loss_agg_mode",
    "config",
    "rollout_is_weights",
]


def verl_aggregation(
    loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, dp_size: int = 1, batch_num_tokens: int | None = None
) -> Tensor:
    """Two of verl's modes, by their definitions."""
    if loss_agg_mode == "token-mean":
        return (loss_mat * loss_mask).sum() / (batch_num_tokens or loss_mask.sum()) * dp_size
    assert loss_agg_mode == "seq-mean-token-mean"
    return ((loss_mat * loss_mask).sum(1) / loss_mask.sum(1)).mean() * dp_size


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_verl_s_loss_is_registered_and_aggregated_as_verl_does(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry: dict[str, Callable[..., Any]] = {}

    def register_policy_loss(name: str) -> Callable[[Any], Any]:
        return lambda function: registry.setdefault(name, function)

    names = {"register_policy_loss": register_policy_loss, "agg_loss": verl_aggregation}
    load("verl", monkeypatch, verl__trainer__ppo__core_algos=names)
    assert set(registry) == {"megatron_dppo/dppo_binary_tv", "megatron_dppo/dppo_binary_kl"}
    b = batch()
    config = Namespace(clip_ratio_low=0.1, clip_ratio_high=0.2, clip_ratio_c=1.5, global_batch_info={"dp_size": 2})
    values = [b["mu"], b["logprobs"], b["advantages"], b["mask"], mode, config, None]
    loss, metrics = registry["megatron_dppo/dppo_binary_tv"](**dict(zip(VERL_ARGUMENTS, values, strict=True)))
    mask = b["mask"].double()
    weights = mask / mask.sum() if mode == "token-mean" else mask / mask.sum(1, keepdim=True) / len(mask)
    check(loss, b, gradient(b, 2 * weights, low=0.1, high=0.2, cap=1.5))
    assert 0 < metrics["actor/pg_clipfrac"] < 1
    values[-1] = torch.ones(1)
    with pytest.raises(ValueError, match="count twice"):
        registry["megatron_dppo/dppo_binary_tv"](**dict(zip(VERL_ARGUMENTS, values, strict=True)))


def test_verl_s_loss_warns_of_an_anchor_that_is_the_trainer_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    b = batch()
    config = Namespace(clip_ratio_low=0.1, clip_ratio_high=0.2, clip_ratio_c=1.5, global_batch_info={})
    names = {"register_policy_loss": lambda _: lambda function: function, "agg_loss": verl_aggregation}

    def warnings_of(*anchors: Tensor) -> list[str]:
        module = load("verl", monkeypatch, verl__trainer__ppo__core_algos=names)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for anchor in anchors:
                given = (anchor, b["logprobs"], b["advantages"], b["mask"], "token-mean", config)
                module.policy_loss(*given, name="dppo_binary_tv")
        return [str(each.message) for each in caught]

    own = b["logprobs"].detach().where(b["mask"], 0.0)
    (text,) = warnings_of(own, own)
    assert "bypass_mode=True" in text and "calculate_log_probs=True" in text
    assert not warnings_of(b["mu"], own), "after an update they may be equal"
    assert not warnings_of(own + 1e-4), "an engine is hardly this near"


SKYRL_ARGUMENTS = ["log_probs", "old_log_probs", "advantages", "config", "loss_mask", "rollout_logprobs"]


def skyrl_loss(monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Namespace]:
    """The loss that SkyRL calls, and its configuration."""
    registry: dict[str, Callable[..., Any]] = {}

    def register_policy_loss(name: str) -> Callable[[Any], Any]:
        return lambda function: registry.setdefault(name, function)

    names = {"register_policy_loss": register_policy_loss}
    load("skyrl", monkeypatch, skyrl__backends__skyrl_train__utils__ppo_utils=names)
    assert set(registry) == {"megatron_dppo/dppo_binary_tv", "megatron_dppo/dppo_binary_kl"}
    limits, correction = Namespace(delta_low=0.1, delta_high=0.2), Namespace(tis_ratio_type=None)
    return registry["megatron_dppo/dppo_binary_tv"], Namespace(dppo=limits, off_policy_correction=correction)


def test_skyrl_s_loss_is_a_sum_and_refuses_an_anchor_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    loss_fn, config = skyrl_loss(monkeypatch)
    b = batch()
    old = b["mu"] + 0.3  # of the trainer, which the loss must not read
    values = [b["logprobs"], old, b["advantages"], config, b["mask"].double(), b["mu"]]
    loss, metrics = loss_fn(**dict(zip(SKYRL_ARGUMENTS, values, strict=True)))
    check(loss, b, gradient(b, torch.ones_like(b["mu"]), low=0.1, high=0.2, cap=5.0))
    assert 0 < metrics["clip_ratio"] < 1
    with pytest.raises(ValueError, match=r"without rollout_logprobs.*logprobs=0"):
        loss_fn(*values[:-1], rollout_logprobs=None)
    config.off_policy_correction.tis_ratio_type = "token"
    with pytest.raises(ValueError, match=r"tis_ratio_type = 'token'.*count twice"):
        loss_fn(*values)


@pytest.mark.skipif(importlib.util.find_spec("skyrl") is None, reason="skyrl is not installed")
def test_released_skyrl_calls_a_policy_loss_so() -> None:
    path = next(Path(f.locate()) for f in files("skyrl") or [] if str(f).endswith("skyrl_train/utils/ppo_utils.py"))
    functions = {n.name: n.args for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}
    assert [a.arg for a in functions["dppo_policy_loss"].args] == SKYRL_ARGUMENTS
    assert [a.arg for a in functions["register_policy_loss"].args] == ["name"]


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
def test_released_verl_calls_a_policy_loss_so() -> None:
    path = next(Path(f.locate()) for f in files("verl") or [] if str(f) == "verl/trainer/ppo/core_algos.py")
    functions = {n.name: n.args for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}
    assert [a.arg for a in functions["compute_policy_loss_dppo_tv"].args] == VERL_ARGUMENTS
    assert [a.arg for a in functions["register_policy_loss"].args] == ["name"]
    assert {"loss_mat", "loss_mask", "loss_agg_mode"} <= {a.arg for a in functions["agg_loss"].args}


def slime_case(monkeypatch: pytest.MonkeyPatch, b: dict[str, Tensor]) -> tuple[ModuleType, dict[str, Any], Any]:
    lengths = [7, 7, 7]

    def log_probs(logits: Tensor, **options: Any) -> tuple[None, dict[str, list[Tensor]]]:
        assert options["with_entropy"] and options["response_lengths"] == lengths
        rows = list(b["logprobs"])
        return None, {"log_probs": rows, "entropy": [-row for row in rows]}

    names = {"get_log_probs_and_entropy": log_probs, "get_rollout_top_p_logprob_kwargs": lambda args, batch: {}}
    module = load("slime", monkeypatch, slime__backends__megatron_utils__loss=names)
    micro = {
        "unconcat_tokens": [],
        "total_lengths": lengths,
        "response_lengths": lengths,
        "rollout_log_probs": list(b["mu"]),
        "advantages": list(b["advantages"]),
        "ref_log_probs": list(b["mu"] - 0.1),
    }

    def sum_of_sample_mean(x: Tensor) -> Tensor:
        rows = zip(x.split(lengths), b["mask"].double(), strict=True)
        return sum(((row * mask).sum() / mask.sum() for row, mask in rows), torch.zeros(()))

    return module, micro, sum_of_sample_mean


def slime_arguments(**changes: Any) -> Namespace:
    given = {"use_tis": False, "use_opsm": False, "entropy_coef": 0.0, "use_kl_loss": False, "use_unbiased_kl": False}
    return Namespace(**given | {"kl_loss_type": "k1", "kl_loss_coef": 0.1} | changes)


def test_slime_s_loss_is_reduced_by_slime_and_keeps_its_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    b = batch()
    module, micro, reduce = slime_case(monkeypatch, b)
    weights = b["mask"].double() / b["mask"].sum(1, keepdim=True)
    loss, log = module.loss(slime_arguments(), micro, torch.zeros(1, 1, 1), reduce)
    check(loss, b, gradient(b, weights))
    assert log["loss"].ndim == 0 and 0 < log["mask_fraction"] < 3
    table = {"name": "dppo_binary_tv", "divergence_threshold_low": 0.3}
    loss, _ = module.loss(slime_arguments(use_kl_loss=True, megatron_dppo=table), micro, torch.zeros(1, 1, 1), reduce)
    check(loss, b, gradient(b, weights, low=0.3) + 0.1 * weights)  # k1's derivative is 1
    with pytest.raises(ValueError, match="use-tis"):
        module.loss(slime_arguments(use_tis=True), micro, torch.zeros(1, 1, 1), reduce)
    with pytest.raises(ValueError, match="rollout_log_probs"):
        module.loss(slime_arguments(), micro | {"rollout_log_probs": None}, torch.zeros(1, 1, 1), reduce)


def test_nemo_rl_s_loss_is_divided_by_the_global_count(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"LossFunction": object, "LossType": Namespace(TOKEN_LEVEL="t"), "LossInputType": Namespace(LOGPROB="l")}
    module = load("nemo_rl", monkeypatch, nemo_rl__algorithms__loss__interfaces=kinds)
    loss_fn = module.DPPOLossFn(md.LossConfig(name="dppo_binary_tv", ratio_cap=2.0))
    assert (loss_fn.loss_type, loss_fn.input_type, loss_fn.reference_policy_kl_penalty) == ("t", "l", 0.0)
    b = batch()
    sample_mask = torch.tensor([1, 1, 0])
    data = {
        name: torch.nn.functional.pad(b[key].double(), (1, 0))  # column 0 is the first token, which nothing predicts
        for name, key in (("token_mask", "mask"), ("generation_logprobs", "mu"), ("advantages", "advantages"))
    } | {"sample_mask": sample_mask}
    loss, metrics = loss_fn(b["logprobs"], data, torch.tensor(9), torch.tensor(40))
    b["mask"] = b["mask"] & sample_mask[:, None].bool()
    check(loss, b, gradient(b, torch.full_like(b["mu"], 1 / 40), cap=2.0))
    assert metrics["num_valid_samples"] == 2 and metrics["loss"] == loss.item()
    with pytest.raises(ValueError, match="sequence_ids"):
        module.DPPOLossFn(md.LossConfig(name="gspo"))


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig

    from megatron_dppo.data.chat import load_tokenizer

    tokenizer = load_tokenizer(ROOT / "examples/chain_sum/model")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(**sizes, num_key_value_heads=1, head_dim=8, vocab_size=len(tokenizer), tie_word_embeddings=False)
    )
    options = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "max_steps": 2}
    quiet = {"report_to": "none", "logging_steps": 1, "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    args = GRPOConfig(output_dir=str(tmp_path_factory.mktemp("trl")), temperature=0.9, bf16=False, **options, **quiet)
    with pytest.warns(UserWarning, match=r"anchor .*use_vllm=True"):
        return load("trl").DPPOTrainer(
            model,
            lambda completions, **_: [float(i % 3) for i, _ in enumerate(completions)],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["1+2+3=", "4+5="]}),
            processing_class=tokenizer,
            loss=md.LossConfig(name="dppo_binary_tv", divergence_threshold_high=0.004, divergence_threshold_low=0.004),
        )


@pytest.mark.parametrize("fused_head", [False, True])
def test_trl_s_trainer_has_the_gradient_with_and_without_the_head(trl_trainer: Any, fused_head: bool) -> None:
    trl_trainer.fused_head = fused_head
    model = trl_trainer.model
    trl_trainer.current_gradient_accumulation_steps = 1
    draw = torch.Generator().manual_seed(3)
    prompt, answer = torch.randint(3, 10, (3, 4), generator=draw), torch.randint(3, 10, (3, 7), generator=draw)
    b = batch()
    seen = torch.ones(3, 4, dtype=torch.long)
    seen[0, 0] = 0

    def logprobs() -> Tensor:
        ids, mask = torch.cat([prompt, answer], 1), torch.cat([seen, b["mask"].long()], 1)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, 3:-1].double() / 0.9
        return logits.log_softmax(-1).gather(-1, answer[..., None])[..., 0]

    b["logprobs"] = logprobs()
    b["mu"] = b["logprobs"].detach() + 0.3 * torch.randn(3, 7, generator=draw, dtype=torch.float64)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": seen,
        "completion_ids": answer,
        "completion_mask": b["mask"].long(),
        "advantages": b["advantages"][:, 0].float(),
        "sampling_per_token_logps": b["mu"].float(),
        "num_items_in_batch": torch.tensor(13.0),
    }
    trl_trainer.compute_loss(model, inputs).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected = gradient(b, torch.full_like(b["mu"], 1 / 13), low=0.004, high=0.004)
    b["logprobs"].backward(expected)
    for got, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, rtol=2e-4, atol=1e-6)
    model.zero_grad()
    reduced = reduced_gradients(trl_trainer, model, inputs)
    assert sum(reduced) == sum(p.numel() for p in model.parameters()), "every gradient goes over the ranks"


def reduced_gradients(trainer: Any, model: Any, inputs: dict[str, Any]) -> list[int]:
    """Sizes of the buckets that DistributedDataParallel reduces in a backward pass."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sizes: list[int] = []

    def record(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sizes.append(bucket.buffer().numel())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    try:
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, lambda _, bucket: record(bucket))
        trainer.compute_loss(wrapped, inputs).backward()
    finally:
        dist.destroy_process_group()
        model.zero_grad()
    return sizes


def test_trl_trains(trl_trainer: Any) -> None:
    trl_trainer.fused_head = True
    before = [p.detach().clone() for p in trl_trainer.model.parameters()]
    trl_trainer.train()
    assert any(not torch.equal(a, b) for a, b in zip(before, trl_trainer.model.parameters(), strict=True))
    assert any("mask_fraction" in record for record in trl_trainer.state.log_history)


@pytest.mark.slow
def test_megatron_s_schedule_gets_the_gradient_from_the_head(tmp_path: Path) -> None:
    script = Path(__file__).with_name("integration_megatron.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert set(results) == {"dppo_binary_tv", "dppo_topk_tv"}
    for result in results.values():
        assert result["worst"] < 1e-4 and 0 < result["masked"] < result["tokens"], results
