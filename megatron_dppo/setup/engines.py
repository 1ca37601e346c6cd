"""Construction of the rollout engine, the weight publisher and the reward scorer from the configuration."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from megatron_dppo.config.model import LoraConfig
from megatron_dppo.config.rollout import PerturbationConfig, RolloutConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.engines.client_processes import ClientProcesses, ClientProcessSettings
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.engines.local.perturbation import Perturbation
from megatron_dppo.engines.server_engine import ServerEngine, build_contract
from megatron_dppo.engines.serving.command import read_api_key, sglang_targets
from megatron_dppo.export.adapter_folder import adapter_config
from megatron_dppo.functions.packages import load_only
from megatron_dppo.parallel.objects import is_leader
from megatron_dppo.parallel.platform import DTYPES, Platform, coarser
from megatron_dppo.process.marker import first_start
from megatron_dppo.rewards.scorer import RewardScorer, build_scorer
from megatron_dppo.rollout.engine import RolloutEngine
from megatron_dppo.rollout.request_scheduler import oversampled, sampling_params
from megatron_dppo.rollout.turns import GenerateFunction, load_generate
from megatron_dppo.setup.agents import load_agent_package
from megatron_dppo.setup.batch_invariant_engine import BatchInvariantEngine
from megatron_dppo.setup.inputs import Inputs
from megatron_dppo.setup.server_checks import served_quantization
from megatron_dppo.types import SamplingParams
from megatron_dppo.types.model_folder import HfConfig, Tokenizer
from megatron_dppo.types.token_columns import columns_on_request
from megatron_dppo.weights.sync import WeightSync
from megatron_dppo_engines.server import InferenceServer
from megatron_dppo_engines.servers.http import Deadlines
from megatron_dppo_engines.servers.spread import RequestSpread, spread_requests
from megatron_dppo_engines.sglang import SGLangServer
from megatron_dppo_engines.vllm import VLLMServer

if TYPE_CHECKING:
    from megatron_dppo.policy.trainer import PolicyTrainer
    from megatron_dppo.weights.ipc import MemorySharing
    from megatron_dppo.weights.publish import Publisher


def open_perturbation(config: PerturbationConfig) -> Perturbation | None:
    """Return the perturbation of ``[rollout.perturbation]``; None if no key is set."""
    if not config.is_active:
        return None
    return cast(
        Perturbation,
        load_only("megatron_dppo.perturbations", "perturbation", "[rollout.perturbation]")(**config.model_dump()),
    )


def open_scorer(config: Config) -> RewardScorer:
    """Return the scorer of ``[reward]``; no process starts before the first sample."""
    return build_scorer(
        config.reward,
        config.rollout,
        label_key=config.data.label_key,
        is_only_source=config.rollout.generate is None and not config.agent.is_set,
        started_at=first_start(Path(config.run.output_dir)),
    )


def rollout_sampling_params(config: Config) -> SamplingParams:
    """Return the sampling parameters of ``[rollout]`` with the seed of the run and the columns that training needs."""
    routed_experts = config.train.needs_engine_routing
    return replace(
        sampling_params(config.rollout, config.rollout.max_new_tokens, config.run.seed),
        return_sampling_mask=config.rollout.has_filters,
        topk_logprobs=config.topk_logprobs,
        columns=tuple(columns_on_request(config.loss.required_inputs)),
        routed_experts=routed_experts,
        router_weights=routed_experts and config.train.router_replay_weights,
    )


def greedy_sampling_params(rollout: RolloutConfig, seed: int) -> SamplingParams:
    """Return the sampling parameters of the greedy responses of ReMax: no filters, and no columns for training."""
    return SamplingParams(max_new_tokens=rollout.max_new_tokens, temperature=0.0, seed=seed)


def connect_servers(rollout: RolloutConfig) -> list[InferenceServer]:
    """Return a client for each server of the run, without sending anything. Empty for the local engine."""
    if rollout.engine == "local":
        return []
    servers, key = rollout.servers, _key(rollout)
    common: dict[str, Any] = {"api_key": key, "deadlines": _deadlines(rollout), "adapter": _by_adapter(rollout)}
    admin = read_api_key(servers.admin_api_key_env, os.environ, "rollout.servers.admin_api_key_env")
    if rollout.engine == "vllm":
        return [VLLMServer(url, **common) for url in servers.resolved_urls]
    return [SGLangServer(url, admin_api_key=admin, **common) for url in servers.resolved_urls]


def _by_adapter(rollout: RolloutConfig) -> bool:
    return rollout.weight_sync.method == "adapter"


def _served_adapter(lora: LoraConfig, rollout: RolloutConfig, base: str) -> dict[str, Any]:
    """Return the adapter's configuration for the servers, which is PEFT's."""
    settings = adapter_config(lora, base)
    if rollout.engine == "sglang":
        settings["target_modules"] = sglang_targets(lora.target_modules)
    return settings


def _deadlines(rollout: RolloutConfig) -> Deadlines:
    return Deadlines(generate=rollout.servers.timeout_seconds, update=rollout.weight_sync.timeout_seconds)


def _key(rollout: RolloutConfig) -> str | None:
    return read_api_key(rollout.servers.api_key_env, os.environ, "rollout.servers.api_key_env")


def _client_processes(
    rollout: RolloutConfig, hf_config: HfConfig, tokenizer: Tokenizer, servers: Sequence[InferenceServer]
) -> ClientProcesses | None:
    """Return the processes that send requests; None if the trainer sends them itself."""
    count = rollout.servers.client_processes
    if not count or rollout.engine == "local":
        return None
    settings = ClientProcessSettings(
        engine=rollout.engine,
        urls=[server.url for server in servers],
        api_key=_key(rollout),
        deadlines=_deadlines(rollout),
        contract=build_contract(hf_config, tokenizer),
        adapter=_by_adapter(rollout),
    )
    return ClientProcesses(count, settings)


@contextmanager
def open_generate_function(config: Config) -> Iterator[GenerateFunction | None]:
    """Yield the user's ``rollout.generate`` or the agent of ``[agent]``, and close the agent at the end; or None."""
    if config.agent.is_set:
        # Read at the first episode: the folder of the run is opened after the agent.
        now = partial(first_start, Path(config.run.output_dir))
        agents = load_agent_package().AgentFunction(
            config.agent,
            config.data.chat_template_kwargs,
            now,
            part_weights=config.reward.agent_parts,
            run_folder=Path(config.run.output_dir),
        )
        with closing(agents):
            yield agents
    else:
        yield None if config.rollout.generate is None else load_generate(config.rollout.generate)


def build_engine(
    rollout: RolloutConfig,
    train: TrainConfig,
    inputs: Inputs,
    trainer: PolicyTrainer,
    platform: Platform,
    servers: Sequence[InferenceServer],
    function: GenerateFunction | None,
) -> RolloutEngine | None:
    """Return the engine that samples for this rank; None if it receives the rollouts of its replica's leader.

    With ``rollout.batch_invariant`` all ranks of a replica sample together, and every rank has an engine.
    """
    if rollout.batch_invariant:
        return BatchInvariantEngine(trainer, inputs.hf_config, inputs.tokenizer, train.micro_batch_tokens)
    if not is_leader(trainer.groups.replica):
        return None
    model = (inputs.hf_config, inputs.tokenizer)
    ranks = (trainer.dp_rank, trainer.layout.dp)
    return build_sampling_engine(rollout, *model, platform.device, servers, function, ranks=ranks)


def build_sampling_engine(
    rollout: RolloutConfig,
    hf_config: HfConfig,
    tokenizer: Tokenizer,
    device: torch.device,
    servers: Sequence[InferenceServer],
    function: GenerateFunction | None,
    *,
    ranks: tuple[int, int] = (0, 1),
) -> LocalEngine | ServerEngine:
    """Return an engine without weights. ``ranks`` are this rank's index and the number of ranks that send requests."""
    if rollout.engine == "local":
        return LocalEngine(
            hf_config,
            tokenizer,
            dtype=DTYPES[rollout.dtype],
            device=device,
            function=function,
            perturbation=open_perturbation(rollout.perturbation),
        )
    spread = _request_spread(rollout, len(servers), *ranks)
    return ServerEngine(
        servers,
        tokenizer,
        hf_config,
        max_in_flight=spread.max_in_flight,
        health_seconds=rollout.servers.health_seconds,
        unavailable_timeout_seconds=rollout.servers.unavailable_timeout_seconds,
        first=spread.first,
        siblings_per_server=spread.siblings_per_server,
        function=function,
        client_processes=_client_processes(rollout, hf_config, tokenizer, servers),
    )


def _request_spread(rollout: RolloutConfig, servers: int, rank: int, ranks: int) -> RequestSpread:
    per_rank = math.ceil(rollout.prompts_per_step / ranks)
    return spread_requests(
        rank=rank,
        ranks=ranks,
        servers=servers,
        prompts=oversampled(per_rank, rollout.oversample) * ranks,
        siblings=rollout.samples_per_prompt,
        max_in_flight=rollout.servers.max_in_flight,
    )


def build_weight_sync(
    config: Config, hf_config: HfConfig, device: torch.device, sharing: MemorySharing | None = None
) -> WeightSync:
    """Return the sync that sends weights to the servers, with separate clients."""
    settings = config.rollout.weight_sync
    return WeightSync(
        connect_servers(config.rollout),
        settings,
        model_folder=Path(config.rollout.servers.model or config.model.path),
        weights_folder=Path(settings.folder or Path(config.run.output_dir) / "weights"),
        dtype=DTYPES[config.rollout.dtype],
        device=device,
        tied=hf_config.tie_word_embeddings,
        sharing=sharing,
        adapter=_served_adapter(config.lora, config.rollout, config.model.path)
        if _by_adapter(config.rollout)
        else None,
        quantization=served_quantization(config.rollout),
    )


def build_publisher(
    config: Config,
    inputs: Inputs,
    trainer: PolicyTrainer,
    engine: RolloutEngine | None,
    platform: Platform,
    sharing: MemorySharing | None = None,
) -> Publisher:
    """Return the publisher of new weights to the engines of all ranks; ``sharing`` is that of ``find_sharing``."""
    from megatron_dppo.weights.adapter_proof import AdapterProof
    from megatron_dppo.weights.probe import Probe
    from megatron_dppo.weights.publish import BatchInvariantPublisher, LocalPublisher, ServerPublisher

    if isinstance(engine, BatchInvariantEngine):
        return BatchInvariantPublisher(trainer, engine)
    if config.rollout.engine == "local":
        assert engine is None or isinstance(engine, LocalEngine)
        return LocalPublisher(trainer, engine)
    assert engine is None or isinstance(engine, ServerEngine)
    # Rank 0 alone talks to the servers; the other ranks take part in gathering the weights.
    sync = build_weight_sync(config, inputs.hf_config, platform.device, sharing) if dist.get_rank() == 0 else None
    probe = Probe(
        trainer,
        rollout_sampling_params(config),
        hf_config=inputs.hf_config,
        tokenizer=inputs.tokenizer,
        prompts=inputs.train_prompts,
        # The coarser of the two roundings bounds the difference that the probe allows.
        dtype=coarser(config.rollout.rounding_dtype, config.model.dtype),
        micro_batch_tokens=config.train.micro_batch_tokens,
    )
    adapters = None
    if _by_adapter(config.rollout):
        proves_base = config.rollout.weight_sync.checksum_every > 0
        adapters = AdapterProof(trainer, sync, probe, proves_base=proves_base)
    return ServerPublisher(
        trainer, engine, sync, rollout=config.rollout, probe=probe, sharing=sharing, adapters=adapters
    )
