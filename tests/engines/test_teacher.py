"""A teacher behind real servers: the log-probabilities of given tokens are those of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import pytest
import torch

from megatron_dppo.engines.teacher import TeacherServers
from megatron_dppo.setup.served_models import read_served_models
from megatron_dppo.types import TrainingSample
from tests.engines.calls import call
from tests.engines.servers import Engine
from tests.engines.tiny import VOCAB, Reference, difference
from tests.unit.configs import config


def sample(ids: list[int], first: int) -> TrainingSample:
    tokens, labels = torch.tensor(ids[:-1]), torch.tensor(ids[1:])
    mask = torch.arange(len(labels)) >= first
    return TrainingSample(tokens=tokens, labels=labels, loss_mask=mask, advantages=torch.zeros(len(labels)))


def check(engine: Engine, kind: Literal["sglang", "vllm"], model: Reference) -> None:
    """Ragged sequences, two with the same beginning: prefix caches must not cut the answer short."""
    generator = torch.Generator().manual_seed(4)
    drawn = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (2, 9, 40, 133)]
    samples = [sample(ids, (3 * i) % (len(ids) - 1)) for i, ids in enumerate(drawn)]
    samples += [sample([*drawn[3][:100], *drawn[2]], 99), samples[3]]
    servers = TeacherServers([engine.url], kind)
    assert servers.problems() == []
    for _ in range(2):  # the second time all of it is in the cache
        for one, actual in zip(samples, servers.logprobs(samples), strict=True):
            ids, first = [*one.tokens.tolist(), int(one.labels[-1])], int(one.loss_mask.nonzero()[0])
            expected = model.logprobs(ids[: first + 1], ids[first + 1 :], 1.0)
            assert difference(actual[first:], expected) < 1e-4
            assert not actual[:first].any()


def describe(engine: Engine) -> Mapping[str, Sequence[str]]:
    """Return what a resume compares of the teacher."""
    teacher = {"coef": 0.1, "divergence": "sampled", "teacher_urls": [engine.url], "teacher_engine": engine.kind}
    settings = config(distillation=teacher)
    return read_served_models(settings.distillation, settings.reward).models["distillation.teacher_urls"]


def digests(engine: Engine) -> list[str]:
    return [value for field, (value,) in describe(engine).items() if field.startswith("weights")]


def check_other_weights(engine: Engine, old: Reference, new: Reference) -> None:
    """The digest is that of the weights in use, and not that of a version or a folder."""
    (before,) = digests(engine)
    call(engine, lambda server: server.update_from_disk(str(new.folder), 1))
    (other,) = digests(engine)
    call(engine, lambda server: server.update_from_disk(str(old.folder), 2))
    assert digests(engine) == [before] != [other]


def test_sglang(sglang: Engine, old_model: Reference, new_model: Reference) -> None:
    check(sglang, "sglang", old_model)
    check_other_weights(sglang, old_model, new_model)


def test_vllm(vllm: Engine, old_model: Reference, new_model: Reference) -> None:
    check(vllm, "vllm", old_model)
    check_other_weights(vllm, old_model, new_model)


def test_vllm_without_our_extension(plain_vllm: Engine, old_model: Reference) -> None:
    check(plain_vllm, "vllm", old_model)
    assert describe(plain_vllm).keys() == {"name", "path", "weights (vLLM 0.32.0, 1 rank)"}


def test_a_missing_server_is_reported() -> None:
    (problem,) = TeacherServers(["http://127.0.0.1:9"], "sglang").problems()
    assert "127.0.0.1:9" in str(problem)
    with pytest.raises(Exception, match=r"127\.0\.0\.1:9"):
        TeacherServers(["http://127.0.0.1:9"], "sglang").logprobs([sample([5, 6, 7], 0)])
