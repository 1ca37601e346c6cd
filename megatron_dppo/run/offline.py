"""Sampling without training, in one process: evaluation and generation with a folder's or checkpoint's weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.config.io import load_config
from megatron_dppo.config.model import ParallelConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.engines.server_engine import ServerEngine
from megatron_dppo.errors import CheckpointError, ConfigError, PublishError
from megatron_dppo.files import disk_errors
from megatron_dppo.hf.folder import FolderWeights, read_hf_config
from megatron_dppo.parallel.platform import Platform, pin_threads
from megatron_dppo.report.metrics import reduce_metrics
from megatron_dppo.rollout.engine import RolloutEngine
from megatron_dppo.rollout.pending import score_completions
from megatron_dppo.rollout.requests import sampling_params, sampling_seed
from megatron_dppo.rollout.server import ServerInfo
from megatron_dppo.run.engines import (
    build_sampling_engine,
    build_weight_sync,
    connect_servers,
    open_generate_function,
    open_scorer,
)
from megatron_dppo.run.evaluation import eval_sampling_params, metrics_by_set
from megatron_dppo.run.inputs import PromptReader
from megatron_dppo.run.preflight import check_flags
from megatron_dppo.run.resume import find_usable_checkpoint
from megatron_dppo.run.starts import load_run_config
from megatron_dppo.types import Completion, Prompt, SamplingParams
from megatron_dppo.weights.conversion import open_converter

_VERSION = 0


_OF_A_TRAINER = {"ipc": "the memory of a trainer", "adapter": "the adapters of a trainer"}
"""Weight sync methods that need a trainer, and what they send."""


@dataclass(frozen=True)
class Offline:
    """An engine with weights, and the reader of its prompts."""

    config: Config
    engine: RolloutEngine
    prompts: PromptReader
    weights: str
    """Name of the weights, for output."""


def offline_config(target: Path, overrides: Sequence[str]) -> Config:
    """The configuration of a TOML file, or of the run in a folder.

    Raises:
        ConfigError: it is neither, or cannot be used.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("this command is one process; start it without torchrun")
    config = load_run_config(target, overrides) if target.is_dir() else load_config(target, overrides)
    check_flags(config)
    return config


@contextmanager
def open_offline(config: Config, *, run: Path | None, model: Path | None, step: int | None) -> Iterator[Offline]:
    """An engine that has the weights.

    Args:
        config: what ``offline_config`` gave.
        run: the folder of a run, whose checkpoint is taken; None = the folder that ``model.path`` names.
        model: a Hugging Face folder instead of either.
        step: of the checkpoint; None = the newest one.

    Raises:
        UserError: there are no such weights, or the servers do not get them.
    """
    if model is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
    platform = Platform.detect()
    pin_threads(config.run.threads_per_rank, 1)
    hf_config, tokenizer = read_hf_config(config.model.path), load_tokenizer(config.model.path)
    prompts = PromptReader(config, tokenizer, hf_config.max_position_embeddings)
    open_parts = ExitStack()
    servers, function = connect_servers(config), open_parts.enter_context(open_generate_function(config))
    engine = build_sampling_engine(config, hf_config, tokenizer, platform.device, servers, function)
    try:
        if run is not None and model is None:
            name = _give_checkpoint(config, engine, hf_config, platform.device, run, step)
        else:
            folder, name = FolderWeights(config.model.path), config.model.path
            _give(config, engine, hf_config, platform.device, lambda: folder.stream(tied=hf_config.tie_word_embeddings))
        yield Offline(config, engine, prompts, name)
    finally:
        engine.close()
        open_parts.close()


def _give_checkpoint(
    config: Config, engine: RolloutEngine, hf_config: Any, device: torch.device, run: Path, step: int | None
) -> str:
    """Give the engine the weights of a run's checkpoint; what they are called."""
    from megatron_dppo.mcore.checkpoint.folder import checkpoint_name, checkpoints_folder

    folder = checkpoints_folder(run)
    with open_converter(config.model.path, ParallelConfig(), config.model.dtype) as converter:
        if step is None:
            checkpoint, _ = find_usable_checkpoint(folder, accept_unverified=config.checkpoint.accept_unverified)
        else:
            checkpoint = folder / checkpoint_name(step)
        if checkpoint is None or not checkpoint.is_dir():
            there = sorted(path.name for path in folder.glob("step_*"))
            raise CheckpointError(
                f"{str(run)!r} has no {'checkpoint' if step is None else f'checkpoint of step {step}'}; there are "
                f"{', '.join(there) or 'none'}. Name one with --step, or a Hugging Face folder with --model"
            )
        converter.load_megatron(checkpoint)
        _give(config, engine, hf_config, device, converter.export)
    return str(checkpoint)


def _give(
    config: Config,
    engine: RolloutEngine,
    hf_config: Any,
    device: torch.device,
    weights: Callable[[], Iterator[tuple[str, Tensor]]],
) -> None:
    """Until the engine has the weights: its copy, or servers by as many attempts as a run makes."""
    if isinstance(engine, LocalEngine):
        engine.update_weights(weights(), _VERSION)
        return
    assert isinstance(engine, ServerEngine)
    method = config.rollout.weight_sync.method
    if method in _OF_A_TRAINER:
        raise ConfigError(
            f"rollout.weight_sync.method = {method!r} gives servers {_OF_A_TRAINER[method]}, and there is none here; "
            "override it: --rollout.weight_sync.method distributed (or disk)"
        )
    sync, good = build_weight_sync(config, hf_config, device), dict[str, ServerInfo]()
    problems: dict[str, str] = {}
    try:
        for _ in range(config.rollout.weight_sync.attempts):
            result = sync.send(weights(), _VERSION, good)
            good, problems = result.good, {**result.absent, **result.failed}
            if good and not result.failed:
                break
    finally:
        sync.close()
    told = "".join(f"\n  - {url}: {problem}" for url, problem in {**problems, **result.notes}.items())
    if not good:
        raise PublishError(f"no inference server has the weights:{told}")
    if told:
        print(f"of the servers:{told}", flush=True)
    engine.use_version(_VERSION, list(good))


_TOGETHER = 1024
"""Responses that ``generate`` asks for at a time: so many are lost at most when it is killed."""


def evaluate(offline: Offline, answers: Path | None = None) -> dict[str, float]:
    """Evaluate the weights on all of ``data.eval`` and return the metrics that a run logs under ``eval/``.

    Args:
        offline: what answers.
        answers: a JSONL file that gets a row for each answer.

    Raises:
        UserError: there are no held-out prompts, or they cannot be used.
    """
    config, n = offline.config, offline.config.eval.samples_per_prompt
    if not config.data.eval:
        raise ConfigError("there is nothing to evaluate on: set data.eval, as with --data.eval FILE")
    named = {"": config.data.eval} if isinstance(config.data.eval, str) else config.data.eval
    asked: list[tuple[str, Prompt]] = []
    for name, source in named.items():
        prompts = offline.prompts.read(source, "eval", f"eval {name}".strip())
        assert prompts is not None
        asked += [(name, prompts[i]) for i in range(len(prompts))]
    scorer = open_scorer(config)
    try:
        completions = _sampled(offline, [prompt for _, prompt in asked], n, eval_sampling_params(config))
        groups = score_completions(scorer, [prompt for _, prompt in asked], completions)
    finally:
        scorer.close()
    if answers is not None:
        rows = (
            _row(r.prompt, r.completion, {"set": name, "reward": r.score})
            for (name, _), group in zip(asked, groups, strict=True)
            for r in group.rollouts
        )
        write_lines(answers, map(json.dumps, rows))
    return reduce_metrics([metrics_by_set(list(named), [name for name, _ in asked], groups, n)], None)


def generate(offline: Offline, source: str | Sequence[str], *, scored: bool) -> Iterator[dict[str, Any]]:
    """Answers to all prompts of a source in its order, ``rollout.samples_per_prompt`` to each.

    Args:
        offline: what answers, sampling by ``[rollout]``.
        source: as in ``data.train``.
        scored: ask the reward function, too.

    Yields:
        A row for each answer: the prompt, the answer, its tokens and their log-probabilities.

    Raises:
        UserError: the prompts cannot be used.
    """
    prompts = offline.prompts.read(source, "train", "prompts", in_order=True)
    assert prompts is not None
    config, rollout = offline.config, offline.config.rollout
    n, scorer = rollout.samples_per_prompt, open_scorer(config) if scored else None
    part = max(1, _TOGETHER // n)
    try:
        for start in range(0, len(prompts), part):
            asked = [prompts[i] for i in range(start, min(start + part, len(prompts)))]
            seed = sampling_seed(config.run.seed, "generate", start, 0)
            params = sampling_params(rollout, rollout.max_new_tokens, seed, return_sampling_mask=rollout.has_filters)
            completions = _sampled(offline, asked, n, params)
            if scorer is None:
                yield from (_row(asked[i // n], completion, {}) for i, completion in enumerate(completions))
            else:
                groups = score_completions(scorer, asked, completions, is_batch=False)
                yield from (_row(r.prompt, r.completion, {"reward": r.score}) for g in groups for r in g.rollouts)
    finally:
        if scorer is not None:
            scorer.close()


def write_lines(file: Path, lines: Iterable[str]) -> int:
    """Write a new file line by line, as they come; their number.

    Raises:
        DiskError: it cannot be written.
    """
    count = 0
    with disk_errors(file, "the answers"), file.open("x", encoding="utf-8", buffering=1) as target:
        for line in lines:
            target.write(line + "\n")
            count += 1
    return count


def _sampled(offline: Offline, prompts: Sequence[Prompt], n: int, params: SamplingParams) -> list[Completion]:
    return offline.engine.generate([prompt for prompt in prompts for _ in range(n)], params)


def _row(prompt: Prompt, completion: Completion, more: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.text,
        "label": prompt.label,
        "response": completion.text,
        "finish_reason": str(completion.finish_reason),
        **more,
        "token_ids": completion.token_ids.tolist(),
        "logprobs": None if completion.logprobs is None else completion.logprobs.tolist(),
    }
