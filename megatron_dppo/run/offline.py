"""Sampling without training, in one process: evaluation and generation with the weights of a folder or checkpoint."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_dppo.config.data import DataConfig
from megatron_dppo.config.io import load_config
from megatron_dppo.config.model import ParallelConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.data.data_rows import iter_rows
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.engines.server_engine import ServerEngine
from megatron_dppo.errors import CheckpointError, ConfigError, DataError, PublishError
from megatron_dppo.files import disk_errors
from megatron_dppo.hf.folder import check_weights_fit, read_hf_config, stream_folder
from megatron_dppo.hf.weight_files import FolderWeights
from megatron_dppo.parallel.platform import Platform, pin_threads
from megatron_dppo.process.marker import first_start
from megatron_dppo.report.metrics import reduce_metrics
from megatron_dppo.rollout.engine import RolloutEngine
from megatron_dppo.rollout.pending import score_completions
from megatron_dppo.rollout.request_scheduler import sampling_params, sampling_seed
from megatron_dppo.run.conversion import open_converter
from megatron_dppo.run.evaluation import metrics_by_set
from megatron_dppo.setup.engines import (
    build_sampling_engine,
    build_weight_sync,
    connect_servers,
    open_generate_function,
    open_scorer,
)
from megatron_dppo.setup.inputs import PromptReader
from megatron_dppo.setup.preflight import check_flags
from megatron_dppo.setup.resume import find_usable_checkpoint
from megatron_dppo.setup.starts import load_run_config
from megatron_dppo.types import Completion, Prompt, SamplingParams
from megatron_dppo.types.model_folder import HfConfig
from megatron_dppo_engines.server import ServerInfo

_VERSION = 0

_TRAINER_METHODS = {"ipc": "the memory of a trainer", "adapter": "the adapters of a trainer"}
"""Weight sync methods that need a trainer, and the data that they send."""


@dataclass(frozen=True)
class Offline:
    """An engine with weights, and the reader of its prompts."""

    config: Config
    engine: RolloutEngine
    prompts: PromptReader
    weights: str
    """Name of the weights, for output."""


def offline_config(target: Path, overrides: Sequence[str]) -> Config:
    """Return the configuration of a TOML file, or of the run in a folder."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("this command runs in one process; start it without torchrun")
    config = load_run_config(target, overrides) if target.is_dir() else load_config(target, overrides)
    check_flags(config.model, config.train)
    return config


def single_prompt_template(data: DataConfig, model: str | Path) -> tuple[bool, str]:
    """Return True if a single prompt goes through the chat template, as the prompts of ``data.train`` do, and why."""
    if data.apply_chat_template is not None:
        return data.apply_chat_template, f"data.apply_chat_template = {str(data.apply_chat_template).lower()}"
    if data.system_prompt is not None or data.chat_template_kwargs:
        return True, "data.system_prompt or data.chat_template_kwargs is set"
    source = data.train if isinstance(data.train, str) else data.train[0]
    try:
        row = next(iter_rows(source, "train", data.prompt_key, data.label_key))
    except DataError as error:
        return False, (
            f"unknown whether the run uses a chat template, because its data cannot be read ({error}). Set "
            "--data.apply_chat_template true if it does"
        )
    if isinstance(row.prompt, list):
        return True, "the prompts of data.train are chat messages"
    if row.is_problem and load_tokenizer(model).chat_template:
        return True, "data.train has bare problems, and the tokenizer has a chat template"
    return False, "the prompts of data.train are plain text"


@contextmanager
def open_offline(config: Config, *, run: Path | None, model: Path | None, step: int | None) -> Iterator[Offline]:
    """Yield an engine that has the weights, and close it at the end.

    They are those of the folder ``model``, of a checkpoint of ``run`` (the newest without ``step``), or ``model.path``.
    """
    if model is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
    platform = Platform.detect()
    pin_threads(config.run.threads_per_rank, 1)
    hf_config, tokenizer = read_hf_config(config.model.path), load_tokenizer(config.model.path)
    now = first_start(run or Path(config.run.output_dir))
    prompts = PromptReader(config, tokenizer, hf_config.max_position_embeddings, now)
    resources = ExitStack()
    servers, function = connect_servers(config.rollout), resources.enter_context(open_generate_function(config))
    engine = build_sampling_engine(config.rollout, hf_config, tokenizer, platform.device, servers, function)
    try:
        if run is not None and model is None:
            name = _load_checkpoint(config, engine, hf_config, platform.device, run, step)
        else:
            name = config.model.path
            check_weights_fit(name, hf_config)
            if note := FolderWeights(name).note():
                print(note, file=sys.stderr)
            _load_weights(config, engine, hf_config, platform.device, lambda: stream_folder(name, hf_config))
        yield Offline(config, engine, prompts, name)
    finally:
        engine.close()
        resources.close()


def _load_checkpoint(
    config: Config, engine: RolloutEngine, hf_config: HfConfig, device: torch.device, run: Path, step: int | None
) -> str:
    """Load the weights of a run's checkpoint into the engine, and return the path of the checkpoint."""
    from megatron_dppo.mcore.checkpoint.folder import checkpoint_name, checkpoints_folder

    folder = checkpoints_folder(run)
    with open_converter(config.model.path, ParallelConfig(), config.model.dtype) as converter:
        if step is None:
            checkpoint, _ = find_usable_checkpoint(folder, accept_unverified=config.checkpoint.accept_unverified)
        else:
            checkpoint = folder / checkpoint_name(step)
        if checkpoint is None or not checkpoint.is_dir():
            available = sorted(path.name for path in folder.glob("step_*"))
            raise CheckpointError(
                f"{str(run)!r} has no {'checkpoint' if step is None else f'checkpoint of step {step}'}; available: "
                f"{', '.join(available) or 'none'}. Choose one with --step, or a Hugging Face folder with --model"
            )
        converter.load_megatron(checkpoint)
        _load_weights(config, engine, hf_config, device, converter.export)
    return str(checkpoint)


def _load_weights(
    config: Config,
    engine: RolloutEngine,
    hf_config: HfConfig,
    device: torch.device,
    weights: Callable[[], Iterator[tuple[str, Tensor]]],
) -> None:
    """Load weights into the engine: copy them, or send them to the servers with the attempts of a run."""
    if isinstance(engine, LocalEngine):
        engine.update_weights(weights(), _VERSION)
        return
    assert isinstance(engine, ServerEngine)
    method = config.rollout.weight_sync.method
    if method in _TRAINER_METHODS:
        raise ConfigError(
            f"rollout.weight_sync.method = {method!r} sends {_TRAINER_METHODS[method]}, and this command has no "
            "trainer; override it: --rollout.weight_sync.method distributed (or disk)"
        )
    sync = build_weight_sync(config, hf_config, device)
    good: dict[str, ServerInfo] = {}
    problems: dict[str, str] = {}
    try:
        # A server that failed may take the weights at the next attempt; the good ones keep them.
        for _ in range(config.rollout.weight_sync.attempts):
            result = sync.send(weights(), _VERSION, good)
            good, problems = result.good, {**result.absent, **result.failed}
            if good and not result.failed:
                break
    finally:
        sync.close()
    messages = "".join(f"\n  - {url}: {problem}" for url, problem in {**problems, **result.notes}.items())
    if not good:
        raise PublishError(f"no inference server has the weights:{messages}")
    if messages:
        print(f"messages of the servers:{messages}", flush=True)
    engine.use_version(_VERSION, list(good))


_MAX_BATCH_RESPONSES = 1024
"""Responses per batch of ``generate``: at most this many are lost if it is killed."""


class OfflineEvaluation(NamedTuple):
    """Metrics that a run logs under ``eval/``, and a row for each response."""

    metrics: dict[str, float]
    rows: Iterator[dict[str, Any]]


def evaluate(offline: Offline) -> OfflineEvaluation:
    """Evaluate the weights on all of ``data.eval``."""
    config = offline.config
    num_samples = config.eval.samples_per_prompt
    if not config.data.eval:
        raise ConfigError("data.eval is not set, so there are no prompts to evaluate on. Fix: pass --data.eval FILE")
    sources = {"": config.data.eval} if isinstance(config.data.eval, str) else config.data.eval
    named_prompts: list[tuple[str, Prompt]] = []
    for name, source in sources.items():
        prompts = offline.prompts.read(source, "eval", f"eval {name}".strip())
        assert prompts is not None
        named_prompts += [(name, prompts[i]) for i in range(len(prompts))]
    scorer = open_scorer(config)
    try:
        all_prompts = [prompt for _, prompt in named_prompts]
        completions = _sample(
            offline,
            all_prompts,
            num_samples,
            sampling_params(config.eval, config.eval_max_new_tokens, config.run.seed),
        )
        groups = score_completions(scorer, all_prompts, completions)
    finally:
        scorer.close()
    rows = (
        _row(r.prompt, r.completion, {"set": name, "reward": r.score})
        for (name, _), group in zip(named_prompts, groups, strict=True)
        for r in group.rollouts
    )
    names = [name for name, _ in named_prompts]
    metrics = reduce_metrics([metrics_by_set(list(sources), names, groups, num_samples)], None)
    return OfflineEvaluation(metrics, rows)


def generate(offline: Offline, source: str | Sequence[str], *, scored: bool) -> Iterator[dict[str, object]]:
    """Sample ``rollout.samples_per_prompt`` responses to each prompt of a source; yield a row for each, in order."""
    prompts = offline.prompts.read(source, "train", "prompts", in_order=True)
    assert prompts is not None
    config = offline.config
    rollout = config.rollout
    num_samples = rollout.samples_per_prompt
    scorer = open_scorer(config) if scored else None
    batch_size = max(1, _MAX_BATCH_RESPONSES // num_samples)
    try:
        for start in range(0, len(prompts), batch_size):
            batch = [prompts[i] for i in range(start, min(start + batch_size, len(prompts)))]
            seed = sampling_seed(config.run.seed, "generate", start, 0)
            params = replace(
                sampling_params(rollout, rollout.max_new_tokens, seed), return_sampling_mask=rollout.has_filters
            )
            completions = _sample(offline, batch, num_samples, params)
            if scorer is None:
                yield from (_row(batch[i // num_samples], completion, {}) for i, completion in enumerate(completions))
            else:
                groups = score_completions(scorer, batch, completions, is_batch=False)
                yield from (_row(r.prompt, r.completion, {"reward": r.score}) for g in groups for r in g.rollouts)
    finally:
        if scorer is not None:
            scorer.close()


def write_lines(file: Path, lines: Iterable[str]) -> int:
    """Write a new file line by line, as the lines are produced, and return their number."""
    count = 0
    fix = "Fix the cause, move this file away, and start the same command again"
    with disk_errors(file, "the responses", fix), file.open("x", encoding="utf-8", buffering=1) as target:
        for line in lines:
            target.write(line + "\n")
            count += 1
    return count


def _sample(offline: Offline, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams) -> list[Completion]:
    return offline.engine.generate([prompt for prompt in prompts for _ in range(num_samples)], params)


def _row(prompt: Prompt, completion: Completion, scores: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.text,
        "label": prompt.label,
        "response": completion.text,
        "finish_reason": str(completion.finish_reason),
        **scores,
        "token_ids": completion.token_ids.tolist(),
        "logprobs": None if completion.logprobs is None else completion.logprobs.tolist(),
    }
