"""Types of a checkpoint's ``state.json``. Whoever can write the folder of a run can write any JSON there."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_Count = Annotated[int, Field(ge=0, le=10**9)]
_Counter = Annotated[int, Field(ge=0, le=2**62)]
"""Position in the prompt stream, or a version."""
_MAX_SCORE = 3.5e38
"""Rewards are finite in float32."""
_Slot = Annotated[list[_Counter], Field(min_length=2, max_length=2)]


class _Table(BaseModel):
    # A newer version may write more keys.
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Submission(_Table):
    step: _Count
    sampled_at: _Counter
    places: list[_Slot]


class _Stream(_Table):
    cursor: _Counter
    next: _Count
    ages: dict[str, _Counter]
    waiting: Annotated[list[list[_Slot]], Field(min_length=1)]
    draws: list[list[_Submission]]


class _Identity(_Table):
    model: dict[str, object]
    seed: int
    prompts: object


class _Layout(_Table):
    layout: str
    world_size: Annotated[int, Field(ge=1, le=10**6)]
    has_expert_parallelism: bool
    virtual_pipeline_size: int | None
    use_distributed_optimizer: bool


class _Response(_Table):
    prompt: str
    label: str
    response: str
    reward: float


class _Data(_Table):
    train: object


class _Run(_Table):
    num_steps: _Count


class _Config(_Table):
    """Sections that a resume reads. The values are compared with those of this start, not used."""

    run: _Run
    data: _Data
    rollout: dict[str, object]
    reward: dict[str, object]
    train: dict[str, object]
    agent: dict[str, object] = {}
    optimizer: dict[str, object] = {}


class _Guard(_Table):
    """State of the guard of first updates and of the sampling test."""

    prob_diffs: list[float]
    stale_prob_diffs: list[float]
    evidence: dict[str, dict[str, list[float]]]


class RunRecord(_Table):
    """State of a run between two steps."""

    step: _Count
    policy_version: _Counter
    skipped_in_a_row: _Count
    answers_before: list[_Response]
    best: Annotated[list[Any], Field(min_length=2, max_length=2)] | None
    evaluation_due: bool
    stream: _Stream
    identity: _Identity
    layout: _Layout
    config: _Config
    cwd: Annotated[str, Field(pattern=r"^[^\x00]*$")] | None = None
    digests: dict[str, str] = {}
    contents: dict[str, dict[str, str]] = {}
    served: dict[str, dict[str, list[str]]] = {}
    guard: _Guard | None = None
    finite: bool = True


def find_schema_problem(state: dict[str, object]) -> str:
    """Return the first value of a run's state that has another type or size than a run writes; empty if none has."""
    try:
        record = RunRecord.model_validate(state)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = ".".join(map(str, detail["loc"]))
        return f"has no {where!r}" if detail["type"] == "missing" else f"has {where} = {_short(detail['input'])}"
    if record.best is not None:
        accuracy, step = record.best
        # The mean score of the held-out prompts: of any size that a reward may have.
        if type(accuracy) not in (int, float) or not abs(accuracy) <= _MAX_SCORE or type(step) is not int or step < 0:
            return f"has best = {_short(record.best)}"
    return ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
