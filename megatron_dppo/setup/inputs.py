"""Model folder, tokenizer and data, read and checked before any process group is built.

Every rank reads the model's configuration and the tokenizer. The data sets are read by rank 0 alone and sent to the
others (``share_inputs``).
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from pathlib import Path

from torch.distributed import ProcessGroup

from megatron_dppo.config.layout import Layout, ModelShape, resolve_layout
from megatron_dppo.config.model import LoraConfig
from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.config.run import RunConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.data.chat import ChatOptions, load_tokenizer
from megatron_dppo.data.prompts import LoadedRows, PromptDataset, load_rows
from megatron_dppo.data.tasks import Split
from megatron_dppo.errors import ConfigError, ErrorCollector
from megatron_dppo.hf.families import FAMILIES, check_adapter_targets, get_family, mark_bridged
from megatron_dppo.hf.folder import (
    check_weights_fit,
    is_nested_config,
    model_shape,
    num_joined_experts,
    parameter_count,
    read_hf_config,
)
from megatron_dppo.parallel.objects import broadcast_object
from megatron_dppo.setup.bridge_checks import bridge_problems
from megatron_dppo.source_names import name_sources
from megatron_dppo.types import PromptLimits
from megatron_dppo.types.model_folder import HfConfig, Tokenizer


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Inputs that every rank reads."""

    hf_config: HfConfig
    num_parameters: int
    tokenizer: Tokenizer
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class DataSets:
    """Data sets that rank 0 reads for all ranks."""

    train_prompts: PromptDataset
    eval_prompts: dict[str, PromptDataset]
    """Held-out sets by name; a single one without a name is called ``""``; empty = no evaluation."""
    data_summary: str
    """Numbers of rows read and dropped, for the console."""


@dataclass(frozen=True, kw_only=True)
class Inputs(ModelInputs, DataSets):
    """Model, tokenizer and data of a run."""


@dataclass(frozen=True, kw_only=True)
class PartialModelInputs:
    """Readable parts of ``ModelInputs``: the data are checked even if the model has problems."""

    tokenizer: Tokenizer | None
    """None if it cannot be loaded."""
    context_length: int | None
    layout: Layout | None
    """None if the sizes do not divide, or the model's configuration cannot be read."""
    complete: ModelInputs | None
    """None if the model has problems."""


def read_inputs(config: Config, world_size: int) -> Inputs:
    """Read model folder and data, and check that everything fits together."""
    problems = ErrorCollector()
    model = read_model(config, world_size, problems)
    data = read_data(config, model, problems)
    problems.raise_if_any()
    assert model.complete is not None and data is not None
    return Inputs(**vars(model.complete), **vars(data))


def resolve_num_steps(config: Config, inputs: DataSets) -> Config:
    """Return the configuration with ``run.num_steps`` computed from ``run.num_epochs``, unchanged without epochs."""
    epochs = config.run.num_epochs
    if epochs is None:
        return config
    steps = math.ceil(epochs * len(inputs.train_prompts) / config.rollout.prompts_per_step)
    run = config.run.model_copy(update={"num_steps": steps, "num_epochs": None})
    return config.model_copy(update={"run": run})


def read_model(config: Config, world_size: int, problems: ErrorCollector) -> PartialModelInputs:
    """Read the model's configuration and tokenizer, check files and layout, and add problems to ``problems``."""
    errors = ErrorCollector()
    hf_config = errors.attempt(read_hf_config, config.model.path)
    if hf_config is not None and config.model.provider == "megatron-bridge":
        mark_bridged(hf_config)
    shape = None if hf_config is None else errors.attempt(model_shape, hf_config)
    layout = None
    if shape is not None:
        chosen = (config.parallel, config.batch, world_size, shape, config.model.transformer)
        layout = errors.attempt(resolve_layout, *chosen)
    if hf_config is not None and shape is not None:
        errors.attempt(check_model, config, hf_config, shape)
    # Without a config.json there is no model, which is one problem and not two.
    has_model = (Path(config.model.path) / "config.json").is_file()
    tokenizer = errors.attempt(load_tokenizer, config.model.path) if has_model else None
    if tokenizer is not None and hf_config is not None:
        errors.attempt(_check_vocabulary, config.model.path, tokenizer, hf_config)
    complete = None
    if not errors.errors:
        assert hf_config is not None and tokenizer is not None and layout is not None
        parameters = parameter_count(hf_config)
        complete = ModelInputs(hf_config=hf_config, num_parameters=parameters, tokenizer=tokenizer, layout=layout)
    for error in errors.errors:
        problems.add(error)
    context_length = None if hf_config is None else hf_config.max_position_embeddings
    return PartialModelInputs(tokenizer=tokenizer, context_length=context_length, layout=layout, complete=complete)


def read_data(config: Config, model: PartialModelInputs, problems: ErrorCollector) -> DataSets | None:
    """Read and tokenize the data, and add its problems. Return None if the data or the model have problems."""
    reader = PromptReader(config, model.tokenizer, model.context_length)
    train = problems.attempt(reader.read, config.data.train, "train", "train")
    named = {"": config.data.eval} if isinstance(config.data.eval, str) else config.data.eval or {}
    held_out = {
        name: problems.attempt(reader.read, source, "eval", f"eval {name}".strip()) for name, source in named.items()
    }
    if problems.errors or train is None:
        return None
    return DataSets(
        train_prompts=train,
        eval_prompts={name: prompts for name, prompts in held_out.items() if prompts is not None},
        data_summary="\n".join(reader.summary),
    )


def share_inputs(model: ModelInputs, inputs: Inputs | None, group: ProcessGroup) -> Inputs:
    """Return the inputs of this rank with the data sets of rank 0. A collective of all ranks.

    Every rank holds all prompts, packed: leaders use those of their rollouts, and all count positions in one stream.
    """

    def read() -> tuple[PromptDataset, dict[str, PromptDataset], str]:
        assert inputs is not None, "rank 0 has read the data"
        return inputs.train_prompts, inputs.eval_prompts, inputs.data_summary

    train, held_out, summary = broadcast_object(read, group)
    if inputs is not None:
        return inputs
    return Inputs(**vars(model), train_prompts=train, eval_prompts=held_out, data_summary=summary)


def check_model(config: Config, hf_config: HfConfig, shape: ModelShape) -> None:
    """Check that the model supports the configuration."""
    problems, path = ErrorCollector(), config.model.path
    if config.model.provider == "megatron-bridge":
        for problem in bridge_problems(config, hf_config.model_type):
            problems.add(problem)
    if hf_config.model_type in FAMILIES:
        problems.attempt(get_family(hf_config).rope, hf_config)
        if not config.model.random_init:
            problems.attempt(check_weights_fit, path, hf_config)
    method = config.rollout.weight_sync.method
    if config.rollout.engine != "local" and method != "disk":
        reason = "whose language model is nested in a model for images" if is_nested_config(path) else None
        if num_joined_experts(path) is not None:
            reason = "which has one tensor for all experts of a layer"
        if reason is not None:
            problems.add(
                ConfigError(
                    f"rollout.weight_sync.method = {method!r} with {path!r}, {reason}: its weights have other names "
                    "in the servers. Set it to 'disk'"
                )
            )
    if config.rollout.engine != "local":
        problems.attempt(check_served_keys, path, hf_config)
    if config.loss.is_topk and config.loss.topk > shape.vocab_size:
        problems.add(
            ConfigError(
                f"loss.topk = {config.loss.topk} is above the {shape.vocab_size} entries of the vocabulary of "
                f"{path!r}; use at most that"
            )
        )
    if config.train.router_replay != "off" and shape.num_experts is None:
        problems.add(
            ConfigError(
                f"train.router_replay = {config.train.router_replay!r}, but {path!r} is a dense model, which has no "
                "routers; set it to 'off'"
            )
        )
    if config.rollout.perturbation.router_noise and shape.num_experts is None:
        problems.add(
            ConfigError(
                f"rollout.perturbation.router_noise = {config.rollout.perturbation.router_noise}, but {path!r} is a "
                "dense model, which has no routers; remove it"
            )
        )
    problems.attempt(config.train.layer_noise.layers, hf_config.num_hidden_layers)
    for problem in family_problems(config.rollout, config.lora, shape):
        problems.add(problem)
    if config.lora.rank:
        problems.attempt(check_adapter_targets, config.lora.target_modules, shape)
    if config.model.reference_path is not None:
        problems.attempt(_check_reference, config.model.reference_path, shape)
    problems.raise_if_any()


def check_served_keys(path: str, hf_config: HfConfig) -> None:
    """Check that servers compute the model as its config.json says."""
    values = hf_config.to_dict()
    for key, value in get_family(hf_config).served_keys(values).items():
        if values.get(key, value) != value:
            raise ConfigError(
                f"{path}/config.json has {key} = {values[key]!r}; SGLang and vLLM compute models of type "
                f"{hf_config.model_type!r} with {value!r} whatever it says. Fix: set rollout.engine to 'local'"
            )


def _check_vocabulary(path: str, tokenizer: Tokenizer, hf_config: HfConfig) -> None:
    """Check that the model has an embedding for every token of its tokenizer."""
    largest, token = max((index, token) for token, index in tokenizer.get_vocab().items())
    if largest >= hf_config.vocab_size:
        raise ConfigError(
            f"model.path = {path!r}: the tokenizer has token {token!r} with id {largest}, and config.json has "
            f"vocab_size = {hf_config.vocab_size}, so ids must be below that. Fix: use the model's own tokenizer, or "
            "resize the model's embeddings"
        )


def family_problems(rollout: RolloutConfig, lora: LoraConfig, shape: ModelShape) -> Iterator[ConfigError]:
    """Yield settings that models of this family do not support."""
    has_windows = bool(shape.window_layers)
    has_state_dtype = rollout.perturbation.state_dtype != "fp32"
    for key, has_it, reason in (
        ("batch_invariant", shape.has_latent_attention, "its attention kernel is for grouped queries; use false"),
        ("batch_invariant", shape.linear is not None, "linear attention has no batch-invariant kernel; use false"),
        (
            "batch_invariant",
            has_windows or shape.has_attention_sinks,
            "its attention kernel has neither windows nor sinks; use false",
        ),
        (
            "engine",
            # SGLang has windows for gpt-oss, the family with sinks.
            rollout.engine == "sglang" and has_windows and not shape.has_attention_sinks,
            "SGLang computes its layers without their sliding window; use 'vllm' or 'local'",
        ),
        (
            "engine",
            # Its loader copies past the ones that a reload counts (gpt_oss.py, line 1220; layerwise.py, line 266).
            rollout.engine == "vllm" and shape.has_attention_sinks,
            "vLLM 0.32 keeps the old experts and sinks of such a model in an update; use 'sglang' or 'local'",
        ),
        (
            "perturbation.router_noise",
            shape.has_router_bias,
            "the noise is for routers that choose by a softmax; use 0",
        ),
        (
            "perturbation.state_dtype",
            shape.linear is None and has_state_dtype,
            "it has no linear attention, so no recurrent states; remove it",
        ),
    ):
        if has_it and (value := attrgetter(key)(rollout)):
            yield ConfigError(f"rollout.{key} = {value!r} with a model of type {shape.family!r}: {reason}")
    experts = {"gate_proj", "up_proj", "down_proj"} & set(lora.target_modules)
    if lora.rank and experts and get_family(shape).fused_experts.is_interleaved:
        yield ConfigError(
            f"lora.target_modules = {lora.target_modules!r} with a model of type {shape.family!r}: adapters of "
            "one projection of its experts have no form that PEFT or servers load. Use q_proj, k_proj, v_proj, o_proj"
        )


class PromptReader:
    """Reader of prompts from the sources of the configuration.

    Without a tokenizer or a context length it reads the files only to find their problems. Without ``now`` the chat
    template sees the date of the run that this start begins or resumes. ``summary`` has one line for each source.
    """

    def __init__(
        self, config: Config, tokenizer: Tokenizer | None, context_length: int | None, now: datetime | None = None
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._now = now or _template_time(config.run)
        self.summary: list[str] = []

    def read(
        self, source: str | Sequence[str], split: Split, name: str, *, in_order: bool = False
    ) -> PromptDataset | None:
        """Return the prompts of a source. Prompts of ``train`` are shuffled with ``run.seed`` unless ``in_order``."""
        config, data = self._config, self._config.data
        listed = [source] if isinstance(source, str) else list(source)
        names = name_sources([*listed, *data.names])
        limits = {
            name: PromptLimits(source=name, **section.model_dump(exclude={"weight"}))
            for name, section in data.sources.items()
        }
        is_shuffled = split == "train" and not in_order
        loaded = load_rows(
            source,
            split,
            prompt_key=data.prompt_key,
            label_key=data.label_key,
            deduplicate=data.deduplicate,
            limits=limits if split == "train" else None,
            names=names,
        )
        if self._tokenizer is None or self._context_length is None:
            return None
        rows = loaded.rows
        limit = config.eval.max_prompts
        if split == "eval" and limit is not None and limit < len(rows):
            # A fixed seed: every run evaluates on the same sample.
            rows = random.Random(0).sample(rows, limit)
        has_eval_length = split == "eval" and config.eval.max_new_tokens is not None
        prompts = PromptDataset(
            rows,
            self._tokenizer,
            max_prompt_tokens=data.max_prompt_tokens,
            max_new_tokens=config.eval_max_new_tokens if split == "eval" else config.rollout.max_new_tokens,
            max_new_tokens_key="eval.max_new_tokens" if has_eval_length else "rollout.max_new_tokens",
            context_length=self._context_length,
            seed=config.run.seed if is_shuffled else None,
            chat=ChatOptions(data.apply_chat_template, data.system_prompt, data.chat_template_kwargs, self._now),
            overlong=data.overlong_prompts,
            are_tasks=config.agent.is_set,
            weights=data.weights if is_shuffled else None,
        )
        numbers = _describe_numbers(loaded, len(rows), prompts)
        self.summary.append(f"data     {name}: {numbers}; from {', '.join(listed)} ({loaded.num_read} rows)")
        if prompts.mix is not None:
            shares = zip(prompts.sizes, prompts.mix.shares, strict=True)
            mixed = ", ".join(f"{share / prompts.mix.period:.3g} from {name}" for name, share in shares)
            self.summary.append(f"data     shares of the prompts: {mixed}")
        if split == "train":
            self.summary += self._limit_lines(names[each] for each in listed)
        return prompts

    def _limit_lines(self, names: Iterable[str]) -> list[str]:
        """Return one line for each source that has limits of its own."""
        lines = []
        for name in names:
            limits = self._config.data.sources.get(name)
            if limits is not None:
                keys = [key for key in limits.changed_keys() if key != "weight"]
                settings = ", ".join(f"{key} = {getattr(limits, key)}" for key in keys)
                lines.append(f"data     limits of {name}: {settings or 'those of the run'}")
        return lines


def _describe_numbers(loaded: LoadedRows, num_used: int, prompts: PromptDataset) -> str:
    """Return the numbers of prompts, and of rows that were left out or cut."""
    parts = [f"{len(prompts)} prompts"]
    if repeated := loaded.num_read - len(loaded.rows):
        parts.append(f"{repeated} repeated rows dropped")
    if num_used < len(loaded.rows):
        parts.append(f"a sample of {len(loaded.rows)}")
    if prompts.num_dropped:
        parts.append(f"{prompts.num_dropped} too long dropped")
    if prompts.num_truncated:
        parts.append(f"{prompts.num_truncated} too long cut at the left")
    return ", ".join(parts)


def _template_time(run: RunConfig) -> datetime:
    # Imported here: the module reads checkpoints, and so loads Megatron.
    from megatron_dppo.setup.run_folder import template_time

    return template_time(run)


def _check_reference(path: str, expected: ModelShape) -> None:
    """Check that the reference policy is a complete folder and has the shape of the policy."""
    hf_config = read_hf_config(path, "model.reference_path")
    shape = model_shape(hf_config)
    if shape != expected:
        raise ConfigError(
            f"model.reference_path = {path!r} has another shape ({shape}) than model.path ({expected}); the reference "
            "policy needs the same shape as the policy"
        )
    check_weights_fit(path, hf_config, "model.reference_path")
