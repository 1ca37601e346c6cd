"""Results of the probe for servers' answers on a layout, against transformers in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.hf.folder import routing_shape
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.types import VersionSpan
from megatron_dppo.weights.probe_requests import ProbeExpectation, ProbeResponse
from megatron_dppo_engines.route_checks import is_missing
from megatron_dppo_engines.server import Generation, ServerInfo
from megatron_dppo_engines.servers.wire import append_sampled_token
from tests.distributed.objective import in_float64
from tests.distributed.parity import Case, build_trainer
from tests.distributed.replay import ForcedRouters, foreign_routes, model_of

K, TEMPERATURE, TOLERANCE = 5, 0.7, 2e-5
PROMPT = (5, 6, 7, 90, 12)
LENGTHS = ((9, 2), (1, 6, 11))
"""tokens of the responses of each server"""


def make_answers(case: Case) -> tuple[ProbeExpectation, list[ProbeResponse]]:
    """Random responses with random Top-K ids and experts: nothing fits, so that nothing is right by chance."""
    model, generator = model_of(case), np.random.default_rng(3)
    shape = routing_shape(model.config)
    answers = []
    for server, lengths in enumerate(LENGTHS):
        generations = []
        for i, length in enumerate(lengths):
            tokens = generator.integers(0, 117, length).astype(np.int32)
            ids = np.stack([generator.permutation(117)[:K] for _ in range(length)]).astype(np.int32)
            ids[0, 0] = tokens[0] if tokens[0] not in ids[0] else ids[0, 0]
            values = generator.normal(-3, 1, ids.shape).astype(np.float32)
            topk = append_sampled_token(ids, values, tokens, np.full(length, -1.0, np.float32))
            generations.append(
                Generation(
                    token_ids=torch.from_numpy(tokens),
                    logprobs=torch.full((length,), -1.0),
                    finish_reason="length",
                    versions=(VersionSpan(1, 0, length),),
                    topk_token_ids=topk[0],
                    topk_logprobs=topk[1],
                    routed_experts=None if shape is None else _routes(length, model, 10 * server + i),
                )
            )
        info = ServerInfo(engine="vllm", engine_version="1", model="m", policy_version=1, max_context=99, world_size=1)
        answers.append(ProbeResponse(info=info, url=f"http://{server}", generations=tuple(generations)))
    expected = ProbeExpectation(
        prompt="p",
        prompt_token_ids=PROMPT,
        vocab_size=117,
        end_tokens=(),
        temperature=TEMPERATURE,
        dtype="fp32",
        topk_logprobs=K,
        routing=shape,
    )
    return expected, answers


def _routes(length: int, model: Any, seed: int) -> Tensor:
    from megatron_dppo.data.training_samples import to_training_sample

    return foreign_routes(to_training_sample(PROMPT, [1] * length, None, 0.0), model, seed)


@torch.no_grad()
def reference(case: Case) -> list[list[dict[str, Any]]]:
    """The same from transformers, one sequence at a time."""
    model = in_float64(model_of(case))
    forced = ForcedRouters(model) if routing_shape(model.config) is not None else None
    _, answers = make_answers(case)
    result = []
    for answer in answers:
        result.append([])
        for generation in answer.generations:
            tokens = torch.tensor([*PROMPT, *generation.token_ids.tolist()])
            own = generation.token_ids[:, None].long()
            ids = generation.topk_token_ids[:, :-1].long()
            logits = model(tokens[None]).logits[0][len(PROMPT) - 1 : -1]
            at_t, raw = (logits / TEMPERATURE).log_softmax(-1), logits.log_softmax(-1)
            values = {
                "logprobs": at_t.gather(1, own)[:, 0],
                "raw_logprobs": raw.gather(1, own)[:, 0],
                "topk_logprobs": at_t.gather(1, ids),
                "raw_topk_logprobs": raw.gather(1, ids),
                "best_logprobs": at_t.topk(K).values,
            }
            if forced is not None:
                routes = generation.routed_experts
                values["routes"] = _shares(forced, routes)
                with forced.using(torch.cat([routes, routes[-1:]])):
                    second = model(tokens[None]).logits[0][len(PROMPT) - 1 : -1] / TEMPERATURE
                values["replayed_logprobs"] = second.log_softmax(-1).gather(1, own)[:, 0]
            result[-1].append(values)
    return result


def _shares(forced: ForcedRouters, routes: Tensor) -> tuple[int, float, float]:
    """Rows, the share that differs, and the smaller share if each row is a neighbour's; sets compared one by one."""
    known = ~is_missing(routes)
    places = [(token, layer) for layer in sorted(forced.live) for token in range(len(routes))]
    live = {(token, layer): set(forced.live[layer][token].tolist()) for token, layer in places}
    given = {place: set(routes[place].tolist()) for place in places if known[place]}

    def share(by: int) -> tuple[int, int]:
        pairs = [(experts, live[t + by, layer]) for (t, layer), experts in given.items() if (t + by, layer) in live]
        return sum(a != b for a, b in pairs), len(pairs)

    here, before, after = share(0), share(-1), share(1)
    return here[1], here[0] / here[1], min(before[0] / before[1], after[0] / after[1])


def check(case: Case, platform: Platform) -> None:
    """One layout."""
    from megatron_dppo.weights.probe import compute_readings

    expected, answers = make_answers(case)
    train = {"router_replay": "off" if expected.routing is None else "rollout"}
    trainer = build_trainer(case, model_of(case), platform, "fp32", train=train, rollout={"temperature": TEMPERATURE})
    result = compute_readings(trainer, answers, expected, case.micro_batch_tokens)
    if dist.get_rank(trainer.groups.replica) != 0:
        assert result == []
        return
    for answer, wanted in zip(result, reference(case), strict=True):
        for reading, values in zip(answer, wanted, strict=True):
            if (routes := values.pop("routes", None)) is not None:
                assert (reading.routes.rows, reading.routes.share, reading.routes.shifted_share) == routes
            for name, value in values.items():
                np.testing.assert_allclose(getattr(reading, name), value.numpy(), atol=TOLERANCE, rtol=0, err_msg=name)


def run(rank: int, world_size: int, cases: list[Case]) -> None:
    """Every layout in one set of processes."""
    from megatron_dppo.mcore.shims import apply_shims

    platform = Platform.detect(force_cpu=True)
    apply_shims(platform)
    from megatron.core import parallel_state

    for case in cases:
        check(case, platform)
        dist.barrier()
        parallel_state.destroy_model_parallel()
