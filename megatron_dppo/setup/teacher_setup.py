"""Construction of the teacher, and checks that it fits the policy (vocabulary, tokenizer, layout, weights)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_dppo.config.distillation import DistillationConfig
from megatron_dppo.config.layout import pipeline_split, resolve_parallel
from megatron_dppo.config.model import ModelConfig, ParallelConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.engines.serving.command import read_api_key
from megatron_dppo.engines.teacher import TeacherServers
from megatron_dppo.errors import CheckpointError, ConfigError, ErrorCollector, UserError
from megatron_dppo.hf.families import get_family
from megatron_dppo.hf.folder import check_weights_fit, model_shape, read_hf_config
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.setup.inputs import ModelInputs
from megatron_dppo.types.model_folder import HfConfig, Tokenizer

if TYPE_CHECKING:
    from megatron_dppo.mcore.teacher_model import MegatronTeacher


_MAX_EXAMPLES = 3


def teacher_problems(config: Config, policy: ModelInputs) -> Iterable[UserError]:
    """Return the problems of ``distillation.teacher_path``; none without a teacher."""
    path, problems = config.distillation.teacher_path, ErrorCollector()
    if path is None:
        return []
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    problems.attempt(_check, path, config.parallel, longest, policy, problems)
    return problems.errors


def teacher_servers(distillation: DistillationConfig, *, rank: int = 0, ranks: int = 1) -> TeacherServers | None:
    """Return the servers of ``distillation.teacher_urls``; ranks start with evenly spaced ones. None without URLs."""
    if not distillation.teacher_urls:
        return None
    return TeacherServers(
        distillation.teacher_urls,
        distillation.teacher_engine,
        api_key=read_api_key(distillation.teacher_api_key_env, os.environ, "distillation.teacher_api_key_env"),
        timeout_seconds=distillation.teacher_timeout_seconds,
        max_in_flight=distillation.teacher_max_in_flight,
        first=rank * len(distillation.teacher_urls) // ranks,
    )


def _check(path: str, parallel: ParallelConfig, longest: int, policy: ModelInputs, problems: ErrorCollector) -> None:
    name = f"distillation.teacher_path = {path!r}"
    if not (Path(path) / "config.json").is_file():
        raise CheckpointError(f"{name} is not a Hugging Face folder: config.json is missing")
    hf_config = read_hf_config(path)
    problems.attempt(_check_vocabulary, name, hf_config, policy)
    problems.attempt(_check_tokenizer, name, path, policy.tokenizer)
    problems.attempt(_check_layout, name, hf_config, parallel, policy)
    problems.attempt(get_family(hf_config).rope, hf_config)
    longest = min(longest, policy.hf_config.max_position_embeddings)
    if hf_config.max_position_embeddings < longest:
        problems.add(
            ConfigError(
                f"{name} has {hf_config.max_position_embeddings} positions, but data.max_prompt_tokens + "
                f"rollout.max_new_tokens = {longest}; lower them"
            )
        )
    problems.attempt(check_weights_fit, path, hf_config, "distillation.teacher_path")


def _check_vocabulary(name: str, hf_config: HfConfig, policy: ModelInputs) -> None:
    if hf_config.vocab_size != policy.hf_config.vocab_size:
        raise ConfigError(
            f"{name} has a vocabulary of {hf_config.vocab_size}, the policy one of {policy.hf_config.vocab_size}. A "
            "teacher scores tokens of the policy, so both need the same vocabulary (one model family, same padding)"
        )


def _check_tokenizer(name: str, path: str, policy: Tokenizer) -> None:
    policy_ids = policy.get_vocab()
    teacher_ids = load_tokenizer(path).get_vocab()
    tokens = policy_ids.keys() | teacher_ids.keys()
    differing = sorted(token for token in tokens if policy_ids.get(token) != teacher_ids.get(token))
    if differing:
        examples = ", ".join(
            f"{token!r} is {teacher_ids.get(token)} in the teacher and {policy_ids.get(token)} in the policy"
            for token in differing[:_MAX_EXAMPLES]
        )
        raise ConfigError(
            f"{name} has another tokenizer than model.path: {len(differing)} tokens differ ({examples}); use a "
            "teacher with the policy's tokenizer"
        )


def _check_layout(name: str, hf_config: HfConfig, parallel: ParallelConfig, policy: ModelInputs) -> None:
    shape = model_shape(hf_config)
    if not shape.num_experts:  # a dense teacher is replicated over the ranks that split the policy's experts
        dense: dict[str, Any] = {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
        parallel = parallel.model_copy(update=dense)
    try:
        split = pipeline_split(shape.num_layers, policy.layout.pp, policy.layout.vpp)
        resolve_parallel(parallel, policy.layout.world_size, shape, split)
    except ConfigError as error:
        raise ConfigError(f"{name} must support the parallel layout of the policy: {error}") from error


def build_teacher(
    distillation: DistillationConfig,
    model: ModelConfig,
    temperature: float,
    inputs: ModelInputs,
    groups: ParallelGroups,
    platform: Platform,
) -> MegatronTeacher | TeacherServers | None:
    """Return the teacher of ``[distillation]``. None without distillation."""
    path = distillation.teacher_path
    if path is None:
        return teacher_servers(distillation, rank=dist.get_rank(groups.dp), ranks=inputs.layout.dp)
    from megatron_dppo.mcore.model_parts import Placement
    from megatron_dppo.mcore.teacher_model import MegatronTeacher

    return MegatronTeacher(
        model=model,
        distillation=distillation,
        temperature=temperature,
        placement=Placement(read_hf_config(path), inputs.layout, groups, platform),
        weights=FolderWeights(path),
    )
