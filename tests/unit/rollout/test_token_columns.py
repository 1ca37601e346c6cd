"""A column that no code knows travels from an answer to a packed row and a recorded step by its declaration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.data.training_samples import RowShape, pack, to_samples
from megatron_dppo.report.steps.files import StepMeta, read_rows, write_step
from megatron_dppo.report.steps.rows import RankSamples, TrainedTokens, groups_from_rows
from megatron_dppo.rollout.batch import RankColumns
from megatron_dppo.rollout.response import GrowingResponse, PartialResponse
from megatron_dppo.rollout.store import StoredRollouts, load_groups, save_groups
from megatron_dppo.types import (
    Completion,
    FinishReason,
    MicroBatch,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    TokenTargets,
    TrainingSample,
    VersionSpan,
)
from megatron_dppo.types.token_columns import (
    TOKEN_COLUMNS,
    Alignment,
    TokenColumn,
    requested_columns,
    response_from_tensors,
    response_to_tensors,
)
from megatron_dppo_engines.server import Generation
from megatron_dppo_engines.servers.frames import Frames

PROMPT = Prompt(prompt_id="p", text="", token_ids=(1, 2), label="")
PARAMS = SamplingParams(max_new_tokens=9)
FILL = [-9.0, -9.0]
ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], FILL, FILL, [7.0, 8.0], [11.0, 12.0]]
"""Rows of the response that ``grown`` makes: three tokens were sampled, two given, and two more sampled."""

MARGINS = TokenColumn(
    response="margins",
    name="rollout_margins",
    record="margin",
    dtype=torch.float32,
    row=("2",),
    alignment=Alignment.RESPONSE,
    fill=-9.0,
    requested_row_shape=lambda params: (2,) if params.max_new_tokens == 9 else None,
    is_loss_only=True,
)


class Tokenizer:
    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return ""


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The declaration, and what one line in each class of records would do."""
    for name, classes in (
        ("margins", (Generation, PartialResponse, Completion)),
        ("rollout_margins", (TrainingSample, TokenTargets, MicroBatch)),
    ):
        for cls in classes:
            wider = make_dataclass(
                cls.__name__, [(name, Any, field(default=None))], bases=(cls,), frozen=True, kw_only=True
            )
            monkeypatch.setattr(cls, name, None, raising=False)  # creates: a column that no class has yet
            monkeypatch.setattr(cls, "__init__", wider.__init__)
            monkeypatch.setattr(cls, "__dataclass_fields__", wider.__dataclass_fields__)  # type: ignore[attr-defined]
    TOKEN_COLUMNS.append(MARGINS)
    yield
    TOKEN_COLUMNS.remove(MARGINS)


def generation(tokens: list[int], margins: list[list[float]] | None, version: int = 1) -> Generation:
    options: dict[str, Any] = {} if margins is None else {"margins": torch.tensor(margins)}
    return Generation(
        token_ids=torch.tensor(tokens, dtype=torch.int32),
        logprobs=torch.full((len(tokens),), -0.5),
        finish_reason=FinishReason.ABORT,
        versions=(VersionSpan(version, 0, len(tokens)),),
        **options,
    )


def growing() -> GrowingResponse:
    return GrowingResponse((1, 2), columns=requested_columns(PARAMS))


def grown(tmp_path: Path) -> Completion:
    response = growing()
    response.append_sampled(generation([4, 5, 6], ROWS[:3]))
    response.append_unsampled([7, 7])
    response.append_sampled(generation([8, 9], [ROWS[5], [0.0, 0.0]], version=2))
    response.truncate(6)
    save_groups(tmp_path / "f.safetensors", [StoredRollouts(0, PROMPT, (response.state(),))])
    content = load_groups(tmp_path / "f.safetensors", lambda _: PROMPT)[0].content
    assert isinstance(content, tuple) and isinstance(content[0], PartialResponse)
    other = growing()
    other.restore(content[0])
    other.append_sampled(generation([3], ROWS[6:], version=2))
    return other.completion(FinishReason.LENGTH, Tokenizer())


def group(*completions: Completion) -> RolloutGroup:
    rollouts = tuple(Rollout(prompt=PROMPT, completion=completion, reward=1.0) for completion in completions)
    return RolloutGroup(prompt=PROMPT, rollouts=rollouts)


def column(record: Any, name: str) -> Any:
    rows = getattr(record, name)
    assert isinstance(rows, Tensor) and rows.dtype == torch.float32
    return rows.tolist()


def test_spans_tell_servers_and_versions_apart() -> None:
    response = growing()
    for server, version in (("a", 1), ("a", 1), ("b", 1), ("b", 2)):
        part = generation([4, 5], ROWS[:2], version=version)
        response.append_sampled(replace(part, versions=(VersionSpan(version, 0, 2, server),)))
    spans = response.completion(FinishReason.LENGTH, Tokenizer()).policy_versions
    assert spans == (VersionSpan(1, 0, 4, "a"), VersionSpan(1, 4, 6, "b"), VersionSpan(2, 6, 8, "b"))


def test_a_response_appends_truncates_and_stores_a_column(tmp_path: Path) -> None:
    done = grown(tmp_path)
    assert done.token_ids.tolist() == [4, 5, 6, 7, 7, 8, 3]
    assert column(done, "margins") == ROWS
    assert done.logprobs is not None and done.logprobs.tolist() == [-0.5] * 3 + [0.0] * 2 + [-0.5] * 2
    assert done.policy_versions == (VersionSpan(1, 0, 3), VersionSpan(2, 5, 7))
    with pytest.raises(ValueError, match="without the rollout_margins"):
        growing().append_sampled(generation([4], None))
    with pytest.raises(ValueError, match="Expected rollout_margins of form"):
        growing().append_sampled(generation([4], [[1.0, 2.0, 3.0]]))
    plain = GrowingResponse((1, 2))
    plain.append_sampled(generation([4], None))
    with pytest.raises(ValueError, match="it lacks rollout_margins"):
        growing().restore(plain.state())
    assert "margins" not in requested_columns(SamplingParams(max_new_tokens=8))


class Wire:
    """A transport that hands over what is written."""

    def __init__(self, other: Frames) -> None:
        self._other = other

    def writelines(self, parts: list[bytes]) -> None:
        content = b"".join(parts)
        while content:
            buffer = self._other.get_buffer(-1)
            size = min(len(buffer), len(content))
            buffer[:size] = content[:size]
            content = content[size:]
            self._other.buffer_updated(size)


def test_a_column_is_sent_only_to_the_stage_that_needs_it(tmp_path: Path) -> None:
    received: list[dict[str, Tensor]] = []
    reader, sender = (Frames(lambda _, columns: received.append(columns), lambda: None) for _ in range(2))
    sender.connection_made(Wire(reader))  # type: ignore[arg-type]
    sender.send({"id": 0}, response_to_tensors(generation([4, 5], ROWS[:2])))
    arrived = response_from_tensors(received[0])
    assert list(arrived) == ["token_ids", "logprobs", "margins"] and arrived["margins"].tolist() == ROWS[:2]
    done = grown(tmp_path)
    (sent,) = RankColumns(topk=False).select([group(done)])
    assert sent is not None and sent.rollouts[0].completion.margins is None  # type: ignore[attr-defined]
    (sent,) = RankColumns(topk=True).select([group(done)])
    assert sent is not None and column(sent.rollouts[0].completion, "margins") == ROWS


def test_a_packed_row_has_a_column_at_the_labels_and_fill_elsewhere(tmp_path: Path) -> None:
    short = growing()
    short.append_sampled(generation([4], [[20.0, 21.0]]))
    samples = to_samples([group(grown(tmp_path), short.completion(FinishReason.STOP, Tokenizer()))], [[1.0, -1.0]])
    assert column(samples[0], "rollout_margins") == ROWS
    # 8 labels, of which the first is the prompt's second token; then 2 labels, padded to 4; then 4 of padding.
    batch = pack(samples, RowShape(row_multiple=16, sequence_multiple=4))
    expected = [FILL, *ROWS, FILL, [20.0, 21.0], FILL, FILL, *[FILL] * 4]
    assert column(batch, "rollout_margins") == expected
    assert batch.labels.tolist() == [2, 4, 5, 6, 7, 7, 8, 3, 2, 4, 0, 0, 0, 0, 0, 0]
    assert batch.rollout_logprobs is not None
    assert batch.rollout_logprobs.tolist() == [0.0, *[-0.5] * 3, 0.0, 0.0, -0.5, -0.5, 0.0, -0.5, *[0.0] * 6]
    chosen = batch.to(torch.device("cpu")).select(batch.loss_mask)
    assert column(chosen, "rollout_margins") == [*ROWS[:3], *ROWS[5:], [20.0, 21.0]]
    assert column(pack([], RowShape(row_multiple=4), like=samples[0]), "rollout_margins") == [FILL] * 4
    plain = GrowingResponse((1, 2))
    plain.append_sampled(generation([4], None))
    mixed = [samples[0], *to_samples([group(plain.completion(FinishReason.STOP, Tokenizer()))], [[1.0]])]
    with pytest.raises(ValueError, match="without rollout_margins cannot share"):
        pack(mixed)


def test_a_recorded_step_has_a_column_that_older_files_lack(tmp_path: Path) -> None:
    done = grown(tmp_path)
    trained = TrainedTokens(
        update=0,
        policy_version=1,
        loss_mask=torch.ones(7).bool(),
        advantages=torch.ones(7),
        logprobs=None,
        keep=None,
    )
    meta = StepMeta(step=1, policy_version=1, dp=1, world_size=1, layout="", loss="")
    rows = read_rows(
        write_step(tmp_path, meta, [RankSamples(dp_rank=0, groups=[group(done)], ages=[0], trained=[trained])])
    )
    assert rows[0]["margin"] == [value for row in ROWS for value in row]
    assert column(groups_from_rows(rows)[0][0].rollouts[0].completion, "margins") == ROWS
    del rows[0]["margin"]
    older = groups_from_rows(rows)[0][0].rollouts[0].completion
    assert older.margins is None and torch.equal(older.token_ids, done.token_ids)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("cls", "attribute", "others"),
    [
        (Generation, "response", set()),
        (PartialResponse, "response", {"sampled"}),
        (Completion, "response", set()),
        (TrainingSample, "name", set()),
        # Made by packing and by the loss's aggregation.
        (
            MicroBatch,
            "name",
            {"position_ids", "sequence_ids", "cu_seqlens", "token_weights", "is_padding"}
            | {"sequence_loss_tokens", "segment_factors"},
        ),
    ],
)
def test_each_field_of_tensors_is_declared(cls: Any, attribute: str, others: set[str]) -> None:
    tensors: list[Field[Any]] = [f for f in fields(cls) if "Tensor" in str(f.type) or "SamplingMask" in str(f.type)]
    declared_names = {getattr(column, attribute) for column in TOKEN_COLUMNS}
    assert {f.name for f in tensors} - others <= declared_names
    optional = {c.name for c in TOKEN_COLUMNS if c.is_optional}
    if attribute == "name":
        assert {f.name for f in tensors if f.default is not MISSING} - others <= optional
