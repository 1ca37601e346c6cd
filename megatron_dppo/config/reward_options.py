"""Options of the built-in reward functions: ``[reward.options]`` or ``[reward.functions.NAME.options]``."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from megatron_dppo.config.section import Section


class NoOptions(Section):
    """Options of a function that has none."""


class ReasoningGymOptions(Section):
    """Options of ``reasoning_gym``."""

    partial_credit: bool = False
    """Keep the task's scores below 1. false sets them to 0."""


class ServerOptions(Section):
    """Options of the functions that call a server."""

    url: str | list[str]
    """Address of the server, ``http://host:port``, or several that take turns. Unreachable servers are skipped."""
    api_key_env: str = ""
    """Environment variable with the API key, sent as ``Authorization: Bearer``. The key never appears in messages.
    ``""`` sends no key."""
    retries: int = Field(3, ge=0)
    """Further attempts within the time limit if no server is reachable or all are busy (429, 502, 503, 504)."""
    after_thinking: bool = False
    """Send only the text after the last ``</think>`` of a response."""

    @field_validator("url")
    @classmethod
    def _are_urls(cls, value: str | list[str]) -> str | list[str]:
        urls = [value] if isinstance(value, str) else value
        if not urls or any(not re.match(r"https?://[^/\s]+", url) for url in urls):
            raise ValueError("expected 'http://host:port', or a list of such addresses")
        return value

    @property
    def urls(self) -> list[str]:
        """All addresses, without a trailing slash."""
        return [url.rstrip("/") for url in ([self.url] if isinstance(self.url, str) else self.url)]


class RewardModelOptions(ServerOptions):
    """Options of ``reward_model``."""

    endpoint: Literal["sglang_classify", "vllm_classify", "vllm_pooling", "vllm_score", "openai_embeddings"]
    """API of the server: SGLang's ``/classify``, vLLM's ``/classify``, ``/pooling`` or ``/score``, or
    ``/v1/embeddings``."""
    model: str = ""
    """Name of the model in requests. ``""`` sends none."""
    index: int | None = Field(None, ge=0)
    """Index of the score among the returned numbers. null expects exactly one number."""
    output: Literal["raw", "sigmoid", "softmax"] = "raw"
    """Score: the model's number (``raw``, a logit), its sigmoid, or the softmax probability of ``index``."""
    tokenizer: str | None = None
    """Folder of the reward model's tokenizer. Prompt and response go through its chat template and are sent as token
    ids. null sends their concatenated text."""
    batch_size: int = Field(16, ge=1)
    """Maximum number of samples in one request."""

    @model_validator(mode="after")
    def _options_are_compatible(self) -> Self:
        if self.endpoint == "vllm_score" and (self.tokenizer is not None or self.output == "softmax" or self.index):
            raise ValueError(
                "options.endpoint = 'vllm_score' returns one number for two texts: remove options.tokenizer, "
                "options.index and output = 'softmax', or use 'vllm_classify'"
            )
        if self.output == "softmax" and self.index is None:
            raise ValueError("options.output = 'softmax' is the probability of one class; set options.index")
        return self


class JudgeOptions(ServerOptions):
    """Options of ``judge``."""

    model: str
    """Name of the model in requests."""
    prompt: str | None = None
    """Question to the judge. ``{prompt}``, ``{completion}`` and ``{label}`` are replaced with the sample's; other
    braces stay."""
    prompt_file: str | None = None
    """File with the question, instead of ``prompt``."""
    system: str | None = None
    """System message. null sends none."""
    markers: bool = True
    """Enclose the response in markers that it cannot contain, and add a line which states that it is data."""
    pattern: str | None = None
    """Regular expression with one group. The last match in the judge's reply, after its thinking, contains the
    score."""
    choices: dict[str, float] = Field(default_factory=dict)
    """Score of each word. The last of these words in the reply counts, or with ``pattern`` the word in its group."""
    limits: list[float] = Field(default_factory=list)
    """Valid range of the score, ``[lowest, highest]``. A score outside fails its sample."""
    rescale: bool = False
    """Map ``limits`` to the range 0 to 1."""
    samples: int = Field(1, ge=1)
    """Number of replies to sample; the score is their mean."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(1024, ge=1)
    """Maximum length of a reply in tokens."""
    extra_body: dict[str, object] = Field(default_factory=dict)
    """Further keys of the request, such as ``chat_template_kwargs``."""

    @model_validator(mode="after")
    def _options_are_compatible(self) -> Self:
        if (self.prompt is None) == (self.prompt_file is None):
            raise ValueError("set exactly one of options.prompt and options.prompt_file")
        if self.prompt is not None and "{completion}" not in self.prompt:
            raise ValueError(
                "options.prompt has no {completion}, so that every response would get the same score; add it"
            )
        if self.pattern is None and not self.choices:
            raise ValueError("set options.pattern or options.choices, so that the score can be read from the reply")
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern).groups
            except re.error as error:
                raise ValueError(
                    f"options.pattern = {self.pattern!r} is not a valid regular expression: {error}"
                ) from error
            if groups != 1:
                raise ValueError(f"options.pattern = {self.pattern!r} has {groups} groups; expected one")
        if self.limits and (len(self.limits) != 2 or self.limits[0] >= self.limits[1]):
            raise ValueError(f"options.limits = {self.limits}: expected [lowest, highest]")
        if self.rescale and not self.limits:
            raise ValueError("options.rescale = true has no effect without options.limits; set them")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                "options.samples above 1 at temperature 0 repeats the same reply; set options.temperature above 0"
            )
        return self


class CodeOptions(Section):
    """Options of ``code``."""

    tests_key: str | None = None
    """Column with the tests. ``a.b`` is field ``b`` of column ``a``. null uses the label."""
    score: Literal["all", "share"] = "all"
    """``all``: 1 if a response passes all tests, otherwise 0. ``share``: the fraction of tests that it passes."""
    network: Literal["none", "allowed"] = "none"
    """``none`` isolates programs from the network, and needs user namespaces on the machine. ``allowed`` gives them the
    network, without the TCP services of this machine (Linux 6.7); without namespaces, only resource limits apply."""
    seconds: float = Field(5.0, gt=0)
    """Time limit of one test in seconds. The limit of CPU time is one second more."""
    total_seconds: float = Field(8.0, gt=0)
    """Time limit in seconds for all tests of a response, below ``timeout_seconds``. Tests that do not run in time count
    as failed."""
    memory_mb: int = Field(1024, ge=64)
    """Address space of each process in megabytes."""
    disk_mb: int = Field(64, ge=1)
    """Space in megabytes that a program may write. Its folder is in memory."""
    processes: int = Field(16, ge=1)
    """Maximum number of processes and threads of a program."""
    open_files: int = Field(64, ge=16)
    """Maximum number of open files per process."""
    output_kb: int = Field(1024, ge=1)
    """Maximum output of a program in kilobytes. A program that writes more is killed."""
    python: str = ""
    """Interpreter of the programs; they can import its packages. ``""`` uses the trainer's interpreter, without the
    packages of its environment."""
    preamble: str = "from typing import *"
    """Code before a solution whose functions the tests call."""


BUILT_IN_REWARDS: dict[str, type[Section]] = {
    "math": NoOptions,
    "reasoning_gym": ReasoningGymOptions,
    "words": NoOptions,
    "none": NoOptions,
    "reward_model": RewardModelOptions,
    "judge": JudgeOptions,
    "code": CodeOptions,
}
"""Built-in reward functions and their options."""
FILE_OPTIONS = ("tokenizer", "prompt_file")
"""Options that name a file or a folder."""


def read_options(function: str, options: Mapping[str, object]) -> Section:
    """Return the validated options of a built-in function; a ValueError names each unknown, missing or wrong one."""
    model = BUILT_IN_REWARDS[function]
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        problems = [_explain(function, model, detail) for detail in error.errors()]
    raise ValueError("; ".join(problems))


def _explain(function: str, model: type[Section], detail: Mapping[str, Any]) -> str:
    path = ".".join(str(part) for part in detail["loc"] if isinstance(part, int) or not part.endswith("]"))
    if detail["type"] == "extra_forbidden":
        known = ", ".join(model.model_fields) or "no options"
        return f"options.{path}: unknown option; function = {function!r} accepts {known}"
    if detail["type"] == "missing":
        return f"options.{path} is missing; function = {function!r} needs it"
    message = detail["msg"].removeprefix("Value error, ")
    return f"options.{path} = {detail['input']!r}: {message}" if path else message


def needs_label(function: str, options: Mapping[str, object]) -> bool:
    """Return True for a built-in function that cannot score a sample without a label."""
    if function == "judge":
        prompt = options.get("prompt")
        with suppress(OSError, UnicodeDecodeError):  # reported when the function is loaded
            prompt = prompt or Path(str(options.get("prompt_file"))).read_text(encoding="utf-8")
        return "{label}" in str(prompt)
    if function == "code":
        return options.get("tests_key") is None
    return function in ("math", "reasoning_gym", "words")
