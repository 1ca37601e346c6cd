"""Self-test of a small MoE model: local engine, probe against Megatron under router replay, an update, and a probe."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron_dppo.config.layout import Layout, resolve_layout
from megatron_dppo.config.schema import Config
from megatron_dppo.data.training_samples import to_training_sample
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.hf.folder import DictWeights, build_hf_model, model_shape, routing_shape, stream_model
from megatron_dppo.losses import policy_objective
from megatron_dppo.mcore import setup
from megatron_dppo.mcore.model_parts import Placement
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.objects import is_leader
from megatron_dppo.parallel.platform import DTYPES, Platform
from megatron_dppo.policy.trainer import PolicyTrainer
from megatron_dppo.policy.update import Updater
from megatron_dppo.run.policy_setup import trainer_from_config
from megatron_dppo.types import Completion, Prompt, SamplingParams, VersionSpan
from megatron_dppo.types.model_folder import Tokenizer
from megatron_dppo.weights.probe import compute_readings
from megatron_dppo.weights.probe_requests import ProbeError, ProbeExpectation, ProbeResponse
from megatron_dppo.weights.verdict import ProbeResult, verify_response
from megatron_dppo_doctor.doctor.self_test import SelfTestCheck
from megatron_dppo_engines.server import Generation, ServerInfo

NUM_EXPERTS = 8
NUM_RESPONSES = 4
MAX_NEW_TOKENS = 24
MICRO_BATCH_TOKENS = 128
TOPK = 5
TEMPERATURE = 0.9
PROMPT = tuple(range(3, 20))


class _Tokenizer:
    """Tokenizer without texts: the self-test compares token ids only, and encodes none."""

    eos_token_id = 1
    pad_token_id = 0
    chat_template: str | None = None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return an empty text."""
        return ""

    def get_vocab(self) -> dict[str, int]:
        """Return no texts."""
        return {}


_TOKENIZER = cast(Tokenizer, _Tokenizer())


def hf_config() -> Any:
    """Return the config of a Qwen3-MoE model with grouped queries; a step takes about a second on a CPU."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=509,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )


def check_model(platform: Platform) -> Iterator[SelfTestCheck]:
    """Check the model in fp32, and on CUDA also in bf16, the dtype of a run."""
    world_size = dist.get_world_size()
    config = _run_config("fp32", world_size)
    layout = resolve_layout(config.parallel, config.batch, world_size, model_shape(hf_config()))
    groups = setup.initialize_megatron(layout, platform, seed=1, timeout_minutes=1)
    for dtype in ("fp32", "bf16") if platform.is_cuda else ("fp32",):
        yield from _check_dtype(platform, dtype, layout, groups)


def _run_config(dtype: str, world: int) -> Config:
    expert_parallel = world if NUM_EXPERTS % world == 0 else 1
    return Config.model_validate(
        {
            "run": {"output_dir": "unused", "num_steps": 2},
            "model": {"path": "unused", "dtype": dtype},
            "parallel": {"expert_model_parallel_size": expert_parallel},
            "data": {"train": "unused"},
            "rollout": {
                "prompts_per_step": world,
                "samples_per_prompt": 2,
                "max_new_tokens": MAX_NEW_TOKENS,
                "dtype": dtype,
                "temperature": TEMPERATURE,
            },
            "train": {"micro_batch_tokens": MICRO_BATCH_TOKENS, "router_replay": "rollout"},
            "loss": {"name": "pg_is"},
            "optimizer": {"lr": 1e-2},
        }
    )


def _check_dtype(platform: Platform, dtype: str, layout: Layout, groups: ParallelGroups) -> Iterator[SelfTestCheck]:
    model_config = hf_config()
    config = _run_config(dtype, dist.get_world_size())
    placement = Placement(model_config, layout, groups, platform)
    trainer = trainer_from_config(
        config, placement, DictWeights(stream_model(build_hf_model(model_config, torch.float32, seed=0))), total_steps=2
    )
    engine = LocalEngine(model_config, _TOKENIZER, dtype=DTYPES[dtype], device=platform.device)
    try:
        for version, when in enumerate(("before an update", "after it")):
            engine.update_weights(trainer.export_weights(), version)
            responses = _sample(engine)
            yield from _check_probe(trainer, responses, dtype, f"{dtype}, {when}")
            if version == 0:
                yield from _check_update(trainer, config, responses, dtype)
    finally:
        engine.close()


def _sample(engine: LocalEngine) -> list[Completion]:
    prompts = [Prompt(prompt_id=str(i), text="", token_ids=PROMPT, label="") for i in range(NUM_RESPONSES)]
    params = SamplingParams(
        max_new_tokens=MAX_NEW_TOKENS,
        temperature=TEMPERATURE,
        topk_logprobs=TOPK,
        routed_experts=True,
        seed=dist.get_rank(),
    )
    return engine.generate(prompts, params)


def _check_probe(
    trainer: PolicyTrainer, responses: Sequence[Completion], dtype: str, when: str
) -> Iterator[SelfTestCheck]:
    """Apply the probe of inference servers to the local engine."""
    shape = hf_config()
    info = ServerInfo(
        engine="sglang", engine_version="embedded", model="self-test", policy_version=0, max_context=256, world_size=1
    )
    expected = ProbeExpectation(
        prompt="",
        prompt_token_ids=PROMPT,
        vocab_size=shape.vocab_size,
        end_tokens=(_TOKENIZER.eos_token_id,),
        temperature=TEMPERATURE,
        dtype=dtype,
        topk_logprobs=TOPK,
        routing=routing_shape(shape),
    )
    answer = ProbeResponse(info=info, url="embedded engine", generations=tuple(map(_generation, responses)))
    (readings,) = compute_readings(trainer, [answer], expected, MICRO_BATCH_TOKENS) or [[]]
    result: ProbeResult | None = None
    cause = ""
    if is_leader(trainer.groups.replica):
        try:
            result = verify_response(answer, expected, readings)
        except ProbeError as error:
            cause = str(error)
    # Only the leader has a verdict; the other ranks report 0 and the maximum over ranks decides.
    failed = float(result is None and is_leader(trainer.groups.replica))
    yield SelfTestCheck(f"probe of the local engine, {when} (0 = it agrees with Megatron)", failed, 0.0, note=cause)
    if result is not None and result.replayed is not None:
        replayed, routes = result.replayed.mean, result.routes or 0.0
    else:
        replayed = routes = 0.0 if not failed else float("inf")
    is_fp32 = dtype == "fp32"
    yield SelfTestCheck(f"router replay, {when}: mean |log p - log q|", replayed, 3e-5 if is_fp32 else 0.5)
    yield SelfTestCheck(f"router replay, {when}: fraction of live routes that differ", routes, 0.02 if is_fp32 else 0.4)


def _generation(response: Completion) -> Generation:
    assert response.logprobs is not None
    return Generation(
        token_ids=response.token_ids,
        logprobs=response.logprobs,
        finish_reason=response.finish_reason,
        versions=(VersionSpan(response.policy_version, 0, len(response.token_ids)),),
        topk_token_ids=response.topk_token_ids,
        topk_logprobs=response.topk_logprobs,
        routed_experts=response.routed_experts,
    )


def _check_update(
    trainer: PolicyTrainer, config: Config, responses: Sequence[Completion], dtype: str
) -> Iterator[SelfTestCheck]:
    """Check one update: forward with the engine's routes, backward, reduction, optimizer."""
    samples = [
        to_training_sample(PROMPT, response.token_ids, response.logprobs, 1.0 - 0.5 * i, None, response.routed_experts)
        for i, response in enumerate(responses)
    ]
    batches = Updater(trainer, config.train, config.loss).pack_batches(samples)
    result = trainer.update(batches, policy_objective(config.loss))
    has_gradient = result.grad_norm > 0 and result.grad_norm < float("inf")
    yield SelfTestCheck(f"update, {dtype} (0 = its gradient is finite and nonzero)", float(not has_gradient), 0.0)
    missing = result.metrics["router_missing"]
    yield SelfTestCheck(f"update, {dtype}: fraction of tokens without the engine's routes", missing, 0.0)
