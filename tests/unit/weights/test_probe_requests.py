"""The probe's requests: as many as it needs, and answers that the contract or the trainer cannot take are refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from columns import ids, logs
from megatron_dppo.errors import ContractViolation
from megatron_dppo.types import VersionSpan
from megatron_dppo.weights.probe_requests import ProbeError, send_probe
from megatron_dppo.weights.verdict import verify_response
from megatron_dppo_engines.server import Echo, GenerateRequest, Generation, InferenceServer, ServerInfo
from tests.unit.policies import EXPECTED, Policy, ask


class Short:
    """A server whose responses have five tokens."""

    url = "http://s"

    def __init__(self, **changes: Any) -> None:
        self.changes, self.requests = changes, list[GenerateRequest]()

    async def info(self) -> ServerInfo:
        return ServerInfo(
            engine="sglang", engine_version="1", model="/m", policy_version=3, max_context=9, world_size=1
        )

    async def tokenize(self, text: str) -> None:
        return None

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        given = Generation(
            token_ids=ids([1, 2, 3, 4, 5]),
            logprobs=logs([-2.0137] * 5),
            finish_reason="stop",
            versions=(VersionSpan(3, 0, 5),),
            topk_token_ids=torch.tensor([[7, 8, 9, 10, sampled] for sampled in range(1, 6)]),
            topk_logprobs=torch.full((5, 5), -2.0137),
        )
        return replace(given, **self.changes)


def answer_of(server: Short, **expected: Any) -> Any:
    return asyncio.run(send_probe(cast(InferenceServer, server), replace(EXPECTED, **expected)))


def test_requests_repeat_until_there_are_enough_tokens() -> None:
    server = Short()
    answer = answer_of(server, enough_tokens=32)
    assert len(answer.generations) == len(server.requests) == 7
    assert len({(r.request_id, r.params.seed) for r in server.requests}) == 7
    assert len(answer_of(server, enough_tokens=5).generations) == 1
    assert len(answer_of(server, enough_tokens=10_000).generations) == 16


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"token_ids": ids([1, 2, 3, 4, 50])}, "token 50, and the"),
        ({"token_ids": ids([1, -1, 3, 4, 5])}, "gives token -1"),
        ({"topk_token_ids": torch.tensor([[7, 8, 9, 50, 1]] * 5)}, "gives token 50"),
        ({"topk_token_ids": torch.tensor([[7, 8, 9, -3, 1]] * 5)}, "gives token -3"),
        (
            {"topk_token_ids": torch.tensor([[7, 8, 9, 7, 1]] * 5)},
            r"0 are not distinct: \[7, 8, 9, 7, 1\]",
        ),
        ({"token_ids": ids([])}, "generated nothing"),
        ({"versions": (VersionSpan(2, 0, 5),)}, r"version \[2\], expected 3"),
    ],
)
def test_responses_that_the_trainer_cannot_compute_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ProbeError, match=match):
        answer_of(Short(**changes), policy_version=3)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"echo": Echo(request_id="other")}, "id is 'other', expected 'probe-0'"),
        ({"echo": Echo(response_length=6)}, "number of response"),
        ({"logprobs": logs([-2.0] * 4)}, "number of log-probabilities is 4"),
        ({"finish_reason": "length"}, "finish reason is 'length'"),
        ({"token_ids": ids([1, 5, 3, 4, 5])}, "1 is the end"),
        ({"token_ids": ids([1, 2, 3, 4, 6])}, "last token is 6"),
        ({"topk_token_ids": None}, "Top-K is missing"),
        ({"topk_logprobs": torch.full((5, 3), -2.0)}, r"shape \[5, 5\] and \[5, 3\]"),
    ],
)
def test_a_contract_violation_names_server_and_field(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ContractViolation, match=f"response to request probe-0 .*{match}"):
        answer_of(Short(**changes))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"logprobs": logs([-2.0137, -2.0137, 0.5137, -2.0137, -2.0137])},
            "log-probability 2 is 0.5137, expected a finite",
        ),
        ({"topk_logprobs": torch.full((5, 5), -1.0137)}, "Top-K: mass, at token 0"),
        (
            {"echo": Echo(best_token_ids=np.full(5, 9, np.int32), best_logprobs=np.full(5, -3.0, np.float32))},
            "log-probability of the sampled",
        ),
    ],
)
def test_invalid_probabilities_are_named_if_no_other_cause_shows(changes: dict[str, Any], match: str) -> None:
    answer = answer_of(Short(**changes), enough_tokens=12)
    _, expected, (reading,) = ask(Policy(2.0, parts=1))
    # A verdict whose own numbers leave nothing to name: the trainer computes what was reported.
    readings = []
    for given in answer.generations:
        logprobs, topk = given.logprobs.double().numpy(), given.topk_logprobs[:, :4].double().numpy()
        same = {"logprobs": logprobs, "raw_logprobs": logprobs, "topk_logprobs": topk, "raw_topk_logprobs": topk}
        readings.append(replace(reading, **same, best_logprobs=topk))
    assert len(answer.generations) == 3
    with pytest.raises(ProbeError, match=f"response to request probe-0 .*{match}"):
        verify_response(answer, expected, readings)
    verify_response(replace(answer, breach=None), expected, readings)
