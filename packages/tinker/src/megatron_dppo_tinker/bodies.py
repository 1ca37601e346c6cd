"""Bodies of the API's JSON requests. An unknown field, or a value that asks for what is not served, is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from megatron_dppo_tinker.errors import RequestError

Name = Annotated[str, Field(max_length=256)]
CheckpointName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
SequenceNumber = Annotated[int, Field(ge=0, lt=2**63)]
"""Number of a request or session, which the client counts."""
Ignored = Annotated[Any, Field(default=None)]
"""A field of the service's bookkeeping, without a meaning on one's own machine."""


class Body(BaseModel):
    """A request body."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    type: Name = ""


T = TypeVar("T", bound=Body)


class CreateSession(Body):
    """Body of ``create_session``."""

    tags: Ignored
    user_metadata: Ignored
    sdk_version: Name
    project_id: Ignored
    display_name: Ignored


class SessionRequest(Body):
    """Body of ``session_heartbeat``."""

    session_id: Name


class ModelRequest(Body):
    """Body of ``get_info``."""

    model_id: Name


class LoraRequest(Body):
    """Adapters of a new model."""

    rank: int = Field(ge=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerRequest(Body):
    """Optimizer of a new model."""

    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    """Body of ``create_model``."""

    session_id: Name
    model_seq_id: SequenceNumber
    base_model: Name
    user_metadata: dict[str, str] | None = None
    lora_config: LoraRequest
    optimizer_config: OptimizerRequest = OptimizerRequest()


class LoadWeights(Body):
    """Body of ``load_weights``: into a new model, or into one that exists."""

    model_id: Name | None = None
    seq_id: SequenceNumber | None = None
    session_id: Name | None = None
    model_seq_id: SequenceNumber | None = None
    base_model: Name | None = None
    user_metadata: dict[str, str] | None = None
    path: Name
    optimizer: bool
    optimizer_config: OptimizerRequest | None = None
    weights_access_token: None = None

    @model_validator(mode="after")
    def _has_one_address(self) -> LoadWeights:
        is_new = self.session_id is not None and self.model_seq_id is not None
        is_old = self.model_id is not None and self.seq_id is not None
        if is_new == is_old:
            raise ValueError("expected session_id and model_seq_id, or model_id and seq_id")
        return self


class AdamParams(Body):
    """Adam's constants of one update."""

    learning_rate: float = Field(ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)


class OptimStep(Body):
    """Body of ``optim_step``."""

    model_id: Name
    seq_id: SequenceNumber
    adam_params: AdamParams


class SaveWeights(Body):
    """Body of ``save_weights``."""

    model_id: Name
    seq_id: SequenceNumber
    path: CheckpointName
    ttl_seconds: Ignored
    overwrite: bool = False
    user_metadata: Ignored


class SaveForSampler(Body):
    """Body of ``save_weights_for_sampler``: under a name, or for one sampling session."""

    model_id: Name
    seq_id: SequenceNumber
    path: CheckpointName | None = None
    sampling_session_seq_id: SequenceNumber | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ignored
    user_metadata: Ignored


class CreateSampler(Body):
    """Body of ``create_sampling_session``."""

    session_id: Name
    sampling_session_seq_id: SequenceNumber
    base_model: Name | None = None
    model_path: Name | None = None


class TextChunk(Body):
    """Tokens of a prompt."""

    type: Literal["encoded_text"]
    tokens: list[int]


class PromptInput(Body):
    """Prompt of a sample."""

    chunks: list[TextChunk]


class SamplingOptions(Body):
    """Sampling parameters of a request."""

    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**62)
    stop: str | Annotated[list[str], Field(max_length=128)] | Annotated[list[int], Field(max_length=128)] | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    top_p: float = Field(1.0, gt=0, le=1)

    @field_validator("top_k")
    @classmethod
    def _keeps_a_token(cls, top_k: int) -> int:
        if not top_k:
            raise ValueError("top_k = 0 leaves no token; -1 is without a limit")
        return top_k

    @field_validator("stop")
    @classmethod
    def _is_no_empty_stop(cls, stop: Any) -> Any:
        if stop is not None and (not stop or "" in (stop if isinstance(stop, list) else [stop])):
            raise ValueError("an empty stop is not served: a response always ends at the model's end token")
        return stop


def _refuse(value: Any) -> None:
    if value:
        raise ValueError(f"{value!r:.40} is not served")


NotServed = Annotated[None, BeforeValidator(_refuse)]


class Sample(Body):
    """Body of ``asample``."""

    num_samples: int = Field(1, ge=1, le=1024)
    prompt: PromptInput
    sampling_params: SamplingOptions
    base_model: NotServed = None
    model_path: NotServed = None
    sampling_session_id: Name
    seq_id: SequenceNumber
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: NotServed = None
    topk_sample_logprobs: NotServed = None
    target_prompt_logprobs: NotServed = None
    prompt_alt_tokens_k: NotServed = None
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    record_stability_info: NotServed = None


class RetrieveFuture(Body):
    """Body of ``retrieve_future``."""

    request_id: Name
    allow_metadata_only: bool = False


class WeightsInfo(Body):
    """Body of ``weights_info``."""

    tinker_path: Name


def read_body(kind: type[T], value: object) -> T:
    """Return a parsed body; ``RequestError`` names the first field that is wrong."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or kind.__name__
        raise RequestError(f"{where}: {first['msg']}", 422) from error
