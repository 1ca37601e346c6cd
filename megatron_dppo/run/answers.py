"""Answers to prompts without training: what they show of held-out sets, or as rows of a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.errors import ConfigError
from megatron_dppo.files.disk import disk_errors
from megatron_dppo.report.metrics import reduce_metrics
from megatron_dppo.rollout.collect import score_completions
from megatron_dppo.run.engines import open_scorer
from megatron_dppo.run.eval_scores import eval_params, metrics_by_set
from megatron_dppo.run.offline import Offline
from megatron_dppo.run.sampling import sampling_params, sampling_seed
from megatron_dppo.types import Completion, Prompt, SamplingParams

_TOGETHER = 1024
"""Responses that ``generate`` asks for at a time: so many are lost at most when it is killed."""


def evaluate(offline: Offline, answers: Path | None = None) -> dict[str, float]:
    """What ``[eval]`` shows of the weights on all of ``data.eval``, as a run logs it under ``eval/``.

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
        completions = _sampled(offline, [prompt for _, prompt in asked], n, eval_params(config))
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
            params = sampling_params(rollout, rollout.max_new_tokens, seed, kept_sets=rollout.filters)
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
