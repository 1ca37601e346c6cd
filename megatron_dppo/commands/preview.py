"""Lines of ``train --dry-run`` about what a run would do: prompts, rewards, sizes, checkpoints."""

from collections.abc import Iterator
from typing import NamedTuple

from megatron_dppo.config.data import DataConfig
from megatron_dppo.config.model import LoraConfig, ModelConfig
from megatron_dppo.config.rollout import AgentConfig, RolloutConfig
from megatron_dppo.config.run import RunConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import RewardError, UserError
from megatron_dppo.files import format_bytes
from megatron_dppo.hf.folder import model_shape
from megatron_dppo.rewards.item import RewardItem, RewardResult
from megatron_dppo.setup.engines import open_scorer
from megatron_dppo.setup.inputs import DataSets, Inputs, ModelInputs
from megatron_dppo.setup.local_engine_memory import LocalEngineMemory
from megatron_dppo.setup.output_checks import checkpoint_bytes, max_checkpoints, num_trained_parameters, run_bytes
from megatron_dppo.types import Prompt

_SHOWN_CHARACTERS = 240
"""Longest text of a prompt or an answer in one line."""
_ASKS_SERVERS = ("reward_model", "judge")


class RewardTrial(NamedTuple):
    """Result of scoring a made-up answer."""

    line: str
    error: UserError | None = None
    """Problem that no run survives, because it does not depend on the answer."""
    failed: bool = False
    """True if this answer has no reward."""


def preview_lines(config: Config, inputs: Inputs) -> Iterator[str]:
    """Yield data, epochs and a prompt of a run whose data could be read."""
    yield inputs.data_summary
    yield epochs_line(config.run, config.rollout, inputs)
    yield from local_engine_lines(config.rollout, config.agent, config.data, inputs)
    prompt = inputs.train_prompts[0]
    yield f"prompt   {_shorten(prompt.text)} (label {_shorten(prompt.label, 60)})"
    yield from overlap_lines(inputs)


def model_lines(config: Config, model: ModelInputs) -> Iterator[str]:
    """Yield the number of parameters, when the run saves them, and the disk space that it takes."""
    yield _parameters(config.model, config.lora, model)
    yield from checkpoint_lines(config, model)


def _parameters(model: ModelConfig, lora: LoraConfig, inputs: ModelInputs) -> str:
    trained = num_trained_parameters(lora, inputs)
    adapters = "" if trained == inputs.num_parameters else f", {trained:,} of them in adapters are trained"
    total = inputs.num_parameters + (trained if adapters else 0)
    family = model_shape(inputs.hf_config).family
    return f"model    {total:,} parameters ({family}, {model.dtype}){adapters}; {model.path}"


def epochs_line(run: RunConfig, rollout: RolloutConfig, data: DataSets) -> str:
    """Return how often a run goes over its prompts."""
    prompts = data.train_prompts
    used = run.num_steps * rollout.prompts_per_step
    passes = f"{used / len(prompts):.3g} passes over {len(prompts):,}"
    if prompts.mix is not None:
        mix = prompts.mix
        counts = {name: mix.count(index, used) for index, name in enumerate(prompts.sizes)}
        passes = ", ".join(
            f"{counts[name]:,} from {name} ({counts[name] / size:.3g} passes over {size:,})"
            for name, size in prompts.sizes.items()
        )
    return (
        f"epochs   {run.num_steps} steps x {rollout.prompts_per_step} prompts = {used:,} prompts = "
        f"{passes}; the longest prompt has {prompts.longest} tokens"
    )


def local_engine_lines(rollout: RolloutConfig, agent: AgentConfig, data: DataConfig, inputs: Inputs) -> Iterator[str]:
    """Yield the memory of the local engine, which splits a batch that needs more."""
    longest = inputs.train_prompts.longest
    # An agent's or a function's later turns begin with all earlier ones.
    if rollout.generate is not None or agent.is_set:
        longest += rollout.max_new_tokens
    memory = LocalEngineMemory.from_config(
        rollout, data, inputs.hf_config, inputs.num_parameters, inputs.layout, longest
    )
    if memory.weights:
        yield (
            f"sampling the local engine takes {format_bytes(memory.weights)} of weights and up to "
            f"{format_bytes(memory.batch)} for a batch in each process"
        )


def overlap_lines(data: DataSets) -> Iterator[str]:
    """Yield a warning for each set of held-out prompts that shares prompts with the training data."""
    if not data.eval_prompts:
        return
    # Hashes instead of the texts, which would all be in memory.
    train = {hash(prompt.text) for prompt in data.train_prompts}
    for name, prompts in data.eval_prompts.items():
        shared = sum(hash(prompt.text) in train for prompt in prompts)
        if shared:
            label = f"data.eval.{name}" if name else "data.eval"
            yield (
                f"warning  {shared} of {len(prompts)} prompts of {label} are also in data.train: the held-out score "
                "measures memory, too. Remove them from one of the two"
            )


def try_reward(config: Config, prompt: Prompt) -> RewardTrial | None:
    """Score a made-up answer: the label, in a box. None: the reward may come from the user's program.

    A function that fails on it is a warning (the format may be another one), a value that is no reward an error.
    """
    reward = config.reward
    functions = [each.function for each in reward.functions.values()] if reward.functions else [reward.function]
    if remote := [name for name in functions if name in _ASKS_SERVERS]:
        return RewardTrial(f"reward   not tried: {remote[0]} sends requests to a server")
    if config.rollout.generate is not None or config.agent.is_set:
        return None
    answer = f"The answer is \\boxed{{{prompt.label}}}."
    made_up = f"the made-up answer {_shorten(answer, 80)}"
    try:
        result = _score(config, prompt, answer)
    except UserError as error:
        return RewardTrial(f"warning  the reward failed on {made_up}: {error}", failed=True)
    if result.is_wrong_type:
        problem = RewardError(
            f"the reward of {made_up} cannot be used: {result.error}. Fix: end the function with `return float(...)`, "
            "or a table with 'score', and accept the arguments of its signature (docs/rewards.md)"
        )
        return RewardTrial(f"reward   {made_up} has none", problem, failed=True)
    if result.failed:
        return RewardTrial(f"warning  the reward failed on {made_up}: {result.error}", failed=True)
    parts = ", ".join(f"{name} {value:.4g}" for name, value in result.parts.items())
    detail = f" ({parts})" if parts else ""
    return RewardTrial(f"reward   {made_up} scores {result.reward:.4g}{detail}")


def _score(config: Config, prompt: Prompt, answer: str) -> RewardResult:
    scorer = open_scorer(config)
    try:
        item = RewardItem(
            prompt=prompt.text,
            completion=answer,
            label=prompt.label,
            metadata={**prompt.metadata, "finish_reason": "stop"},
            source=prompt.source,
            messages=prompt.messages,
        )
        return scorer.score([item], is_batch=False)[0]
    finally:
        scorer.close()


def checkpoint_lines(config: Config, inputs: ModelInputs) -> Iterator[str]:
    """Yield when a run saves, and the disk space that it takes."""
    checkpoint = config.checkpoint
    times = []
    if checkpoint.save_every_minutes is not None:
        minutes = f"{checkpoint.save_every_minutes:g} minutes"
        times.append(f"the first after {minutes}, then every {minutes} in the background")
    if checkpoint.save_every:
        steps = range(checkpoint.save_every, config.run.num_steps, checkpoint.save_every)
        if steps:
            times.append(f"at steps {', '.join(map(str, steps[:3]))}{', ...' if len(steps) > 3 else ''}")
    times.append(f"at the end (step {config.run.num_steps}) and at SIGTERM")
    yield f"saves    {'; '.join(times)}. A kill costs the steps since the last one"
    size = checkpoint_bytes(config.model, config.lora, inputs)
    most = max_checkpoints(config.checkpoint, config.run.num_steps)
    yield (
        f"disk     {format_bytes(size)} a checkpoint, at most {most} at a time = {format_bytes(most * size)}; "
        f"the whole run {format_bytes(run_bytes(config, inputs))} in {config.run.output_dir}"
    )


def _shorten(text: str, limit: int = _SHOWN_CHARACTERS) -> str:
    """Return a text in quotes on one line, without its middle if it is long."""
    shown = repr(text)
    if len(shown) <= limit:
        return shown
    half = limit // 2 - 3
    return f"{shown[:half]} ... {shown[-half:]}"
