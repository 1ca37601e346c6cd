"""The inference servers before the first step: all are asked at the same time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ServerError, UserError
from megatron_dppo.run.inputs import Inputs
from megatron_dppo.serving.checks import Needs, server_problems
from megatron_dppo.serving.command import api_key

_SECONDS = 10.0


@dataclass(frozen=True)
class ServersFound:
    """What the servers said."""

    problems: list[UserError]
    usable: bool
    """whether one of them has no problem"""


def check_servers(config: Config, inputs: Inputs | None, *, generating: bool) -> ServersFound:
    """Ask each server what it is, and whether it is ``generating``; no servers, no problems."""
    if config.rollout.engine == "local":
        return ServersFound([], usable=True)
    needs, urls = needs_of(config, inputs), config.rollout.servers.resolved_urls
    key = api_key(config.rollout.servers.api_key_env, os.environ, "rollout.servers.api_key_env")

    def ask(url: str) -> Sequence[UserError]:
        try:
            found = server_problems(url, needs, key, timeout=_SECONDS, generating=generating)
            return [ServerError(url, problem) for problem in found]
        except UserError as error:
            return [error]

    with ThreadPoolExecutor(max_workers=min(32, len(urls))) as pool:
        found = list(pool.map(ask, urls))
    return ServersFound([error for errors in found for error in errors], usable=any(not errors for errors in found))


def needs_of(config: Config, inputs: Inputs | None) -> Needs:
    """What the run wants from each of its servers; without ``inputs`` with the longest prompt that it may have."""
    assert config.rollout.engine != "local"
    answers = {"train": config.rollout.max_new_tokens, "eval": config.eval_max_new_tokens if config.data.eval else 0}
    if inputs is None:
        context = config.data.max_prompt_tokens + max(answers.values())
    else:
        held_out = [prompts.longest + answers["eval"] for prompts in inputs.eval_prompts.values()]
        context = max(inputs.train_prompts.longest + answers["train"], *held_out, 0)
    return Needs(
        engine=config.rollout.engine,
        context=context,
        topk=config.topk_logprobs,
        routed_experts=config.train.needs_engine_routing,
        weight_sync=config.rollout.weight_sync.method,
        adapter_rank=config.lora.rank if config.rollout.weight_sync.method == "adapter" else 0,
        delta=config.rollout.weight_sync.delta,
        quantized=config.rollout.servers.model is not None,
        colocated=config.rollout.servers.colocated,
        kept_ids=config.rollout.top_k if config.rollout.filters else 0,
    )
