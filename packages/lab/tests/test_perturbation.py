"""The local engine made to differ from the policy on purpose: its numbers are those that it sampled from."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.config.schema import Config
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.engines.local.sampler import Sampler
from megatron_dppo.errors import ConfigError
from megatron_dppo.functions import packages
from megatron_dppo.hf.folder import build_hf_model, read_hf_config, routing_shape, stream_model
from megatron_dppo.run.guard import FirstUpdateGuard
from megatron_dppo.setup.engines import open_perturbation
from megatron_dppo.types import Completion, Prompt, SamplingParams
from megatron_dppo_doctor.diagnose import run as diagnosis
from megatron_dppo_lab import perturbation as quantized
from megatron_dppo_lab.perturbation import Perturbation, PerturbedModel
from tests.unit.configs import config as configured

MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"
CONFIG, TOKENIZER = read_hf_config(MODEL), load_tokenizer(MODEL)
PROMPTS = [
    Prompt(prompt_id=t, text=t, token_ids=tuple(TOKENIZER(t).input_ids), label="")
    for t in ("7+8-3=", "1+1-2=", "9-9-9=", "5-5+1=")
    for _ in range(16)
]


def sampled(
    perturbation: Perturbation, models: Sequence[Any], dtype: torch.dtype = torch.float32, **settings: Any
) -> list[Completion]:
    """Return the engine's results after it was sent the weights of each of ``models`` in turn."""
    engine = LocalEngine(CONFIG, TOKENIZER, dtype=dtype, device=torch.device("cpu"), perturbation=perturbation)
    for version, model in enumerate(models):
        engine.update_weights(stream_model(model), version)
    completions = engine.generate(PROMPTS, SamplingParams(**{"max_new_tokens": 6, "seed": 4} | settings))
    engine.close()
    return completions


@torch.no_grad()
def whole_distributions(model: Any, prompt: Prompt, completion: Completion) -> Tensor:
    """[R, V] log-probabilities of one pass over prompt and response."""
    tokens = torch.tensor([[*prompt.token_ids, *completion.token_ids.tolist()]])
    logits = model(tokens).logits[0, len(prompt.token_ids) - 1 : -1]
    return logits.float().log_softmax(-1)


def largest_difference(model: Any, completions: Sequence[Completion]) -> float:
    worst = 0.0
    for prompt, result in zip(PROMPTS, completions, strict=True):
        assert result.logprobs is not None
        own = whole_distributions(model, prompt, result).gather(1, result.token_ids.long()[:, None])[:, 0]
        worst = max(worst, (own - result.logprobs).abs().max().item())
    return worst


def quantized_by_modelopt(model: Any, form: str) -> Any:
    """The whole model through modelopt's public entry, its weights alone."""
    quantization = import_module("modelopt.torch.quantization")
    settings = copy.deepcopy(getattr(quantization, quantized.CONFIGS[form]))
    settings["quant_cfg"].append({"quantizer_name": "*input_quantizer", "enable": False})
    return quantization.quantize(copy.deepcopy(model), settings)


@pytest.mark.parametrize("form", quantized.CONFIGS)
def test_log_probabilities_are_those_of_a_model_that_modelopt_quantised_after_each_publish(form: str) -> None:
    pytest.importorskip("modelopt.torch.quantization", reason="pip install 'megatron-dppo[modelopt]'")
    first, second = (build_hf_model(CONFIG, torch.float32, seed=seed) for seed in (1, 2))
    with torch.no_grad():
        for name, parameter in second.named_parameters():
            parameter.mul_(2 if "_proj" in name else 1)  # scales that were kept from the first weights would cut these
    completions = sampled(Perturbation(weights=form), [first, second])
    assert largest_difference(quantized_by_modelopt(second, form), completions) < 2e-4
    assert largest_difference(second, completions) > 1e-2


def test_fp8_weights_are_e4m3_with_one_scale_a_tensor_and_other_parts_are_exact() -> None:
    pytest.importorskip("modelopt.torch.quantization", reason="pip install 'megatron-dppo[modelopt]'")
    model = build_hf_model(CONFIG, torch.float32, seed=1)
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    PerturbedModel(model, Perturbation(weights="fp8"), routing_shape(CONFIG)).quantize_weights()

    def by_hand(weight: Tensor) -> Tensor:
        scale = 448 / weight.abs().max()
        return (weight * scale).to(torch.float8_e4m3fn).float() / scale

    for name, parameter in model.named_parameters():
        if ".experts." in name:
            expected = torch.stack([by_hand(expert) for expert in plain[name]])
        elif "_proj" in name:
            expected = by_hand(plain[name])
        else:
            expected = plain[name]
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=0)


def test_routers_choose_by_their_logits_with_the_noise_of_the_seed() -> None:
    """One pass over the prompts, beside a model whose routers add the same numbers by a path of their own."""
    sigma, model = 0.7, build_hf_model(CONFIG, torch.float32, seed=1)
    perturbation = Perturbation(router_noise=sigma)
    completions = sampled(perturbation, [model], max_new_tokens=1, routed_experts=True)
    noisy, generator = copy.deepcopy(model), torch.Generator()
    generator.manual_seed(random.Random("router/4").getrandbits(62))
    for layer in noisy.model.layers:

        def forward(hidden: Tensor, gate: Any = layer.mlp.gate) -> tuple[Tensor, Tensor, Tensor]:
            hidden = hidden.reshape(-1, gate.hidden_dim)
            logits = hidden @ gate.weight.T
            logits = logits + sigma * torch.randn(logits.shape, generator=generator)
            best, experts = logits.topk(gate.top_k)  # the largest logits, and softmax over them
            return logits, best.softmax(-1), experts

        layer.mlp.gate.forward = forward
    distinct = list(dict.fromkeys(prompt.token_ids for prompt in PROMPTS))
    with torch.no_grad():
        expected = noisy(torch.tensor(distinct)).logits[:, -1].log_softmax(-1)
    worst = 0.0
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.logprobs is not None
        own = expected[distinct.index(prompt.token_ids), int(completion.token_ids[0])]
        worst = max(worst, abs(float(own - completion.logprobs[0])))
    assert worst < 1e-4 < 1e-2 < largest_difference(model, completions)
    second, other = sampled(perturbation, [model]), sampled(perturbation, [model], seed=5)
    for one, two in zip(sampled(perturbation, [model]), second, strict=True):
        assert one.logprobs is not None and two.logprobs is not None
        assert one.token_ids.equal(two.token_ids) and one.logprobs.equal(two.logprobs)
    assert [c.token_ids.tolist() for c in second] != [c.token_ids.tolist() for c in other]


def test_recorded_routes_are_those_of_the_noisy_routers() -> None:
    model = build_hf_model(CONFIG, torch.float32, seed=1)
    plain, noisy = (
        [
            c.routed_experts
            for c in sampled(Perturbation(router_noise=s), [model], max_new_tokens=1, routed_experts=True)
        ]
        for s in (0.0, 1e3)
    )
    same = [bool((a == b).all(-1).float().mean() > 0.5) for a, b in zip(plain, noisy, strict=True) if a is not None]
    assert len(same) == len(PROMPTS) and not any(same)


def test_a_hidden_filter_draws_from_the_nucleus_and_reports_the_whole_distribution() -> None:
    model = build_hf_model(CONFIG, torch.float32, seed=1)
    generations = sampled(Perturbation(unrecorded_top_p=0.5), [model])
    assert largest_difference(model, generations) < 1e-4
    outside = {0.5: 0, 1.0: 0}
    for top_p, completions in ((0.5, generations), (1.0, sampled(Perturbation(), [model]))):
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            probabilities = whole_distributions(model, prompt, completion).exp().double()
            for row, token in zip(probabilities, completion.token_ids.tolist(), strict=True):
                likelier = row[row > row[token] * (1 + 1e-5)].sum()  # the nucleus ends with the token that reaches p
                outside[top_p] += bool(likelier >= 0.5)
    assert outside[0.5] == 0 < outside[1.0]
    greedy = [sampled(Perturbation(unrecorded_top_p=p), [model], temperature=0.0) for p in (0.5, 1.0)]
    assert [c.token_ids.tolist() for c in greedy[0]] == [c.token_ids.tolist() for c in greedy[1]]


def test_a_hidden_temperature_moves_the_draws_and_not_what_is_reported() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(40_000, -1)
    rows = torch.arange(len(logits))
    temperature, hidden = 0.8, 0.5

    def draw(temperature: float, **options: float) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(3)
        return Sampler(SamplingParams(max_new_tokens=4, temperature=temperature), generator, len(rows), **options)(
            logits, rows
        )

    tokens, reported = draw(temperature, unrecorded_temperature=hidden)
    assert reported.allclose((logits / temperature).log_softmax(-1))
    shares = tokens.bincount(minlength=4).double() / len(rows)
    expected = (logits[0].double() / (temperature * hidden)).softmax(-1)
    # Five standard deviations; without the hidden temperature the first share is .72 and not .92.
    assert ((shares - expected).abs() < 5 * (expected * (1 - expected) / len(rows)).sqrt()).all()
    greedy = [draw(0.0, unrecorded_temperature=value)[0] for value in (hidden, 1.0)]
    assert greedy[0].equal(greedy[1]) and draw(temperature)[0].equal(draw(temperature, unrecorded_temperature=1.0)[0])
    # Before the hidden filter: at half the temperature the nucleus of .85 is the first id alone.
    assert draw(temperature, unrecorded_temperature=hidden, unrecorded_top_p=0.85)[0].max() == 0
    assert draw(temperature, unrecorded_top_p=0.85)[0].max() == 1


def test_the_engine_has_the_hidden_temperature_of_its_configuration() -> None:
    model = build_hf_model(CONFIG, torch.float32, seed=1)
    cold = sampled(Perturbation(unrecorded_temperature=1e-5), [model])
    greedy = sampled(Perturbation(), [model], temperature=0.0)
    assert [c.token_ids.tolist() for c in cold] == [c.token_ids.tolist() for c in greedy]
    assert largest_difference(model, cold) < 1e-4


def test_a_diagnosis_of_what_it_cannot_see_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "read_starts", lambda folder: [{"world_size": 1}])
    for value, is_refused in ((0.8, True), (1.0, False)):
        loaded = config(unrecorded_temperature=value)
        monkeypatch.setattr(diagnosis, "load_run_config", lambda *_, loaded=loaded, **__: loaded)
        refusal = pytest.raises(ConfigError, match=r"unrecorded_temperature = 0\.8: a diagnosis compares")
        with refusal if is_refused else nullcontext():
            assert diagnosis.load_diagnosed_config(tmp_path, []) is loaded


def test_without_modelopt_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(quantized, "import_module", missing)
    with pytest.raises(ConfigError, match=r"weights = 'int4'.*pip install 'megatron-dppo\[modelopt\]'"):
        LocalEngine(
            CONFIG,
            TOKENIZER,
            dtype=torch.float32,
            device=torch.device("cpu"),
            perturbation=Perturbation(weights="int4"),
        )


def config(**perturbation: Any) -> Config:
    return configured(rollout={"perturbation": perturbation})


def test_servers_are_not_perturbed() -> None:
    with pytest.raises(ConfigError, match=r"rollout.engine = 'sglang'"):
        configured(rollout={"engine": "sglang", "perturbation": {"router_noise": 0.1}})


@pytest.mark.parametrize(
    "bad",
    [
        {"weights": "fp4"},
        {"router_noise": -0.1},
        {"unrecorded_top_p": 0.0},
        {"unrecorded_temperature": 0.0},
        {"noise": 1.0},
    ],
)
def test_values_that_mean_nothing_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        config(**bad)


def test_the_guard_of_the_first_update_does_not_stop_a_difference_that_is_asked_for() -> None:
    configs = [config(**p) for p in ({}, {"router_noise": 0.1})]
    guards = [
        FirstUpdateGuard.from_config(c.train, c.rollout, c.model, nonfinite_fraction=0.0, is_on_policy=True)
        for c in configs
    ]
    guards[1]({"abs_prob_diff": 0.5})
    assert guards[0].max_prob_diff is not None and guards[1].max_prob_diff is None


def test_the_trainer_opens_what_the_section_says(monkeypatch: pytest.MonkeyPatch) -> None:
    section = config(router_noise=0.1, weights="int8", unrecorded_top_p=0.9, state_dtype="bf16").rollout.perturbation
    opened = open_perturbation(section)
    assert isinstance(opened, Perturbation) and vars(opened) == section.model_dump()
    assert open_perturbation(config().rollout.perturbation) is None
    monkeypatch.setattr(packages, "entry_points", lambda group: [])
    assert open_perturbation(config().rollout.perturbation) is None, "a run without one needs no package"
    with pytest.raises(ConfigError, match=r"\[rollout.perturbation\] needs"):
        open_perturbation(section)


def test_a_start_with_coarse_weights_asks_for_modelopt_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(quantized, "import_module", missing)
    Perturbation(router_noise=0.1).check()
    with pytest.raises(ConfigError, match=r"weights = 'fp8'.*megatron-dppo\[modelopt\]"):
        Perturbation(weights="fp8").check()
