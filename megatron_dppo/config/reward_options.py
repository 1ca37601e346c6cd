"""The options of the built-in reward functions: ``[reward.options]``, or ``[reward.functions.NAME.options]``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from megatron_dppo.config.section import Section


class NoOptions(Section):
    """None."""


class ReasoningGymOptions(Section):
    """Of ``reasoning_gym``."""

    partial_credit: bool = False
    """Keep the task's scores below 1 (instead of 0 for them)."""


class ServerOptions(Section):
    """Of functions that ask a server."""

    url: str | list[str]
    """Where it is, ``http://host:port``, or several that take turns; one that cannot be reached is left out."""
    api_key_env: str = ""
    """Environment variable with the key, sent as ``Authorization: Bearer``; it is in no message."""
    retries: int = Field(3, ge=0)
    """Further attempts, within the time limit, where no server is reached or all are busy (429, 502, 503, 504)."""
    after_thinking: bool = False
    """Send only what follows the last ``</think>`` of a response."""

    @field_validator("url")
    @classmethod
    def _are_urls(cls, value: str | list[str]) -> str | list[str]:
        urls = [value] if isinstance(value, str) else value
        if not urls or any(not re.match(r"https?://[^/\s]+", url) for url in urls):
            raise ValueError("expected 'http://host:port', or a list of them")
        return value

    @property
    def urls(self) -> list[str]:
        """All of them, without a slash at the end."""
        return [url.rstrip("/") for url in ([self.url] if isinstance(self.url, str) else self.url)]


class RewardModelOptions(ServerOptions):
    """Of ``reward_model``."""

    endpoint: Literal["sglang_classify", "vllm_classify", "vllm_pooling", "vllm_score", "openai_embeddings"]
    """What the server answers: SGLang's ``/classify``, vLLM's ``/classify``, ``/pooling`` or ``/score``, or
    ``/v1/embeddings``."""
    model: str = ""
    """Name of the model in requests; ``""`` = left out."""
    index: int | None = Field(None, ge=0)
    """Which of an answer's numbers is the score; None = it has one."""
    output: Literal["raw", "sigmoid", "softmax"] = "raw"
    """The number as the model computes it (a logit), its sigmoid, or the probability of ``index`` among all."""
    tokenizer: str | None = None
    """Folder of the reward model's tokenizer: prompt and response go through its chat template and are sent as token
    ids; None = their text as it stands, one after the other."""
    batch_size: int = Field(16, ge=1)
    """Samples in one request, of those that are under way together."""

    @model_validator(mode="after")
    def _they_go_together(self) -> RewardModelOptions:
        if self.endpoint == "vllm_score" and (self.tokenizer is not None or self.output == "softmax" or self.index):
            raise ValueError(
                "options.endpoint = 'vllm_score' scores two texts by one number: remove options.tokenizer, "
                "options.index and output = 'softmax', or use 'vllm_classify'"
            )
        if self.output == "softmax" and self.index is None:
            raise ValueError("options.output = 'softmax' is the probability of one class; set options.index")
        return self


class JudgeOptions(ServerOptions):
    """Of ``judge``."""

    model: str
    """Name of the model in requests."""
    prompt: str | None = None
    """The question: ``{prompt}``, ``{completion}`` and ``{label}`` stand for the sample's, other braces for
    themselves."""
    prompt_file: str | None = None
    """A file with it instead."""
    system: str | None = None
    """System message."""
    markers: bool = True
    """Put the response between markers that it cannot contain, with a line that says that it is data."""
    pattern: str | None = None
    """Regular expression with one group; the last match in the answer, after its thinking, has the score."""
    choices: dict[str, float] = Field(default_factory=dict)
    """Score of each word: of the last of them in the answer or, with ``pattern``, of what its group has."""
    limits: list[float] = Field(default_factory=list)
    """``[lowest, highest]``: a score outside fails its sample."""
    rescale: bool = False
    """Map ``limits`` to 0 ... 1."""
    samples: int = Field(1, ge=1)
    """Answers that are asked for; the score is their mean."""
    temperature: float = Field(0.0, ge=0)
    """Of the judge's answers."""
    max_tokens: int = Field(1024, ge=1)
    """Of one answer."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the request, such as ``chat_template_kwargs``."""

    @model_validator(mode="after")
    def _they_go_together(self) -> JudgeOptions:
        if (self.prompt is None) == (self.prompt_file is None):
            raise ValueError("set one of options.prompt and options.prompt_file")
        if self.prompt is not None and "{completion}" not in self.prompt:
            raise ValueError("options.prompt has no {completion}, so that every response would get the same score")
        if self.pattern is None and not self.choices:
            raise ValueError("set options.pattern or options.choices, so that the score can be read from the answer")
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern).groups
            except re.error as error:
                raise ValueError(f"options.pattern = {self.pattern!r} is no regular expression: {error}") from error
            if groups != 1:
                raise ValueError(f"options.pattern = {self.pattern!r} has {groups} groups; it needs one")
        if self.limits and (len(self.limits) != 2 or self.limits[0] >= self.limits[1]):
            raise ValueError(f"options.limits = {self.limits}: expected [lowest, highest]")
        if self.rescale and not self.limits:
            raise ValueError("options.rescale = true needs options.limits")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("options.samples above 1 at temperature 0 asks for the same answer; set a temperature")
        return self


class CodeOptions(Section):
    """Of ``code``."""

    tests_key: str | None = None
    """Column with the tests (``a.b`` = field ``b`` of column ``a``); None = the label."""
    score: Literal["all", "share"] = "all"
    """1 for a response that passes all tests, else 0; or the share of the tests that it passes."""
    network: Literal["none", "allowed"] = "none"
    """``none``: a machine that has no user namespaces is refused; ``allowed``: programs reach the network, and where
    there are no namespaces they run with limits alone."""
    seconds: float = Field(5.0, gt=0)
    """Limit of one test; the CPU time's is a second more."""
    total_seconds: float = Field(8.0, gt=0)
    """Limit of all tests of a response, below ``timeout_seconds``; those that it leaves count as not passed."""
    memory_mb: int = Field(1024, ge=64)
    """Address space of each process."""
    disk_mb: int = Field(64, ge=1)
    """What a program may write; its folder is in memory."""
    processes: int = Field(16, ge=1)
    """With threads."""
    open_files: int = Field(64, ge=16)
    """Of each process."""
    output_kb: int = Field(1024, ge=1)
    """Of a program's output; one that writes more is ended."""
    python: str = ""
    """Interpreter, whose packages the programs have; ``""`` = that of the trainer without its environment's."""
    preamble: str = "from typing import *"
    """Code before a solution whose functions are called."""


BUILT_IN_REWARDS: dict[str, type[Section]] = {
    "math": NoOptions,
    "reasoning_gym": ReasoningGymOptions,
    "words": NoOptions,
    "none": NoOptions,
    "reward_model": RewardModelOptions,
    "judge": JudgeOptions,
    "code": CodeOptions,
}
"""The built-in functions and their options."""
FILE_OPTIONS = ("tokenizer", "prompt_file")
"""Those that name a file or a folder."""


def read_options(function: str, options: Mapping[str, Any]) -> Section:
    """The checked options of a built-in function.

    Raises:
        ValueError: unknown, missing or wrong ones, each named.
    """
    model = BUILT_IN_REWARDS[function]
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        problems = [_explain(function, model, detail) for detail in error.errors()]
    raise ValueError("; ".join(problems))


def _explain(function: str, model: type[Section], detail: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in detail["loc"] if isinstance(part, int) or not part.endswith("]"))
    if detail["type"] == "extra_forbidden":
        known = ", ".join(model.model_fields) or "no options"
        return f"options.{place}: unknown; function = {function!r} takes {known}"
    if detail["type"] == "missing":
        return f"options.{place} is missing; function = {function!r} needs it"
    message = detail["msg"].removeprefix("Value error, ")
    return f"options.{place} = {detail['input']!r}: {message}" if place else message


def needs_label(function: str, options: Mapping[str, Any]) -> bool:
    """Whether a function is a built-in one that cannot score a sample without a label."""
    if function == "judge":
        prompt = options.get("prompt")
        with suppress(OSError, UnicodeDecodeError):  # told where the function is loaded
            prompt = prompt or Path(str(options.get("prompt_file"))).read_text(encoding="utf-8")
        return "{label}" in str(prompt)
    if function == "code":
        return options.get("tests_key") is None
    return function in ("math", "reasoning_gym", "words")
