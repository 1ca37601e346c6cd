"""The guard of the first update: what it lets pass, what it stops, and that nothing was changed by then."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from columns import ids, logs, mask
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.errors import ConfigError, TrainingStopped
from megatron_dppo.losses import BatchTotals
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.policy.packed import PackedBatch
from megatron_dppo.policy.server_sums import LayerCounts, ServerSums, TokenSource
from megatron_dppo.policy.update import Updater
from megatron_dppo.report.clock import Clock
from megatron_dppo.run.guard import FirstUpdateGuard, GuardHistory, count_nonfinite_tokens
from megatron_dppo.run.sampling_test import SamplingTest
from megatron_dppo.types import Completion, Prompt, Rollout, RolloutGroup, TrainingSample, VersionSpan
from tests.unit.configs import config


def guard(dropped: float = 0.0, *, on_policy: bool = True, **sections: dict[str, Any]) -> FirstUpdateGuard:
    made = config(**sections)
    return FirstUpdateGuard.from_config(
        made.train, made.rollout, made.model, nonfinite_fraction=dropped, is_on_policy=on_policy
    )


FP32 = {"model": {"dtype": "fp32"}, "rollout": {"dtype": "fp32"}}


@pytest.mark.parametrize(
    ("sections", "limit"),
    [
        (FP32, 1e-3),
        ({"model": {"dtype": "fp32"}}, 0.06),
        ({"rollout": {"dtype": "fp32"}}, 0.06),
        (FP32 | {"train": {"max_first_prob_diff": 0.2}}, 0.2),
    ],
)
def test_the_limit_follows_the_coarser_dtype_or_the_configuration(sections: dict[str, Any], limit: float) -> None:
    guard(**sections)({"abs_prob_diff": limit})
    for value in (limit * 1.01, math.nan, math.inf):
        with pytest.raises(TrainingStopped, match=r"nothing was learned") as caught:
            guard(**sections)({"abs_prob_diff": value})
        assert f"allows {limit:g}" in str(caught.value) and "another position" in str(caught.value)
        assert caught.value.exit_code == 3


def test_the_message_mentions_layer_noise_only_if_it_is_on() -> None:
    for std, told in ((0.25, True), (0.0, False)):
        with pytest.raises(TrainingStopped) as caught:
            guard(train={"layer_noise": {"std": std}})({"abs_prob_diff": 0.5})
        assert ("train.layer_noise.std = 0.25" in str(caught.value)) == told


def test_a_mean_of_older_tokens_has_no_limit_and_off_disables_the_guard() -> None:
    guard(on_policy=False)({"abs_prob_diff": 0.9})
    guard()({"loss": 0.0})  # no token of the first mini-batch has a loss
    guard(train={"max_first_prob_diff": "off"})({"abs_prob_diff": math.nan})
    guard(1.0, train={"max_nonfinite_fraction": "off"})({"abs_prob_diff": 0.0})


@pytest.mark.parametrize("on_policy", [True, False])
def test_dropped_tokens_stop_the_run_even_without_another_limit(on_policy: bool) -> None:
    guard(0.01, on_policy=on_policy)({"abs_prob_diff": 0.0})
    with pytest.raises(TrainingStopped, match=r"100\.00% of .*max_nonfinite_fraction = 0\.01"):
        guard(1.0, on_policy=on_policy)({"abs_prob_diff": 0.0})
    with pytest.raises(TrainingStopped, match=r"0\.20% of the sampled"):
        guard(0.002, train={"max_nonfinite_fraction": 0.001})({"abs_prob_diff": 0.0})


def test_both_problems_are_reported_at_once() -> None:
    with pytest.raises(TrainingStopped, match=r"(?s)50\.00% of .*by 0\.5 on"):
        guard(0.5)({"abs_prob_diff": 0.5})


@pytest.mark.parametrize(
    "train", [{"max_first_prob_diff": "none"}, {"max_first_prob_diff": 0.0}, {"max_nonfinite_fraction": 1.0}]
)
def test_other_values_of_the_keys_are_rejected(train: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="max_"):
        guard(train=train)


class Recorder:
    """A trainer that only counts."""

    routing_shape = None
    row_shape = None
    policy_version = 0
    is_last_stage = True
    groups = ParallelGroups()

    def __init__(self) -> None:
        self.calls: list[str] = []

    def accumulate(
        self, batches: Sequence[Any], objective: Any, teacher_targets: Sequence[Any], seen: Any
    ) -> dict[str, float]:
        self.calls.append(f"accumulate {batches}")
        return {"abs_prob_diff": 0.25 * len(self.calls)}

    def route_differences(self, batches: Sequence[Any]) -> list[Any]:
        return []

    def apply(self, metrics: Mapping[str, float]) -> str:
        self.calls.append("apply")
        return "applied"

    def skip(self, metrics: Mapping[str, float]) -> str:
        self.calls.append("skip")
        return "skipped"


class Planned(Updater):
    def _pack(self, samples: list[Any]) -> Any:
        trained = [sample for sample in samples if sample.loss_mask.any()]
        totals = BatchTotals(num_tokens=len(trained), num_sequences=len(trained))
        names = sorted(sample.number for sample in trained)
        return samples, PackedBatch(bins=[], batches=cast(Any, names), totals=totals)

    def _add_token_weights(self, packed: Any) -> Any:
        return packed.batches


def one_token(number: int, server: str) -> TrainingSample:
    return TrainingSample(
        tokens=ids([1]).long(),
        labels=ids([1]).long(),
        loss_mask=mask([True]),
        advantages=logs([1.0]),
        number=number,
        sources=(VersionSpan(0, 0, 1, server),),
    )


def updates(check: Any, mini_batches: int = 2) -> tuple[Recorder, Any]:
    recorder, train = Recorder(), TrainConfig(mini_batches=mini_batches, epochs=2)
    updater = Planned(cast(Any, recorder), train, config().loss)
    samples = [one_token(number, "ab"[number % 2]) for number in range(4)]
    return recorder, updater.run(samples, 0, Clock(), check)


def test_only_the_first_update_is_checked_before_it_is_applied() -> None:
    seen: list[Mapping[str, float]] = []

    def accept(metrics: Mapping[str, float], sums: Any) -> dict[str, str]:
        seen.append(metrics)
        return {}

    recorder, results = updates(accept)
    assert list(results) == ["applied"] * 4
    assert seen == [{"abs_prob_diff": 0.25}]

    def refuse(metrics: Mapping[str, float], sums: Any) -> dict[str, str]:
        raise TrainingStopped("no")

    recorder, results = updates(refuse)
    with pytest.raises(TrainingStopped):
        list(results)
    assert [call.split()[0] for call in recorder.calls] == ["accumulate"]


def test_samples_of_a_rejected_server_are_in_no_update_of_the_step() -> None:
    answers = [{"a": "it lies"}, {}]
    recorder, results = updates(lambda metrics, sums: answers.pop(0), mini_batches=1)
    assert list(results) == ["applied"] * 2
    assert recorder.calls == [
        "accumulate [0, 1, 2, 3]",
        "accumulate [1, 3]",
        "apply",
        "accumulate [1, 3]",
        "apply",
    ]


def test_a_mini_batch_without_a_token_is_no_update() -> None:
    answers = [{"a": "it lies", "b": "it lies too"}, {}]
    recorder, results = updates(lambda metrics, sums: answers.pop(0), mini_batches=1)
    assert list(results) == ["skipped"] * 2
    assert "apply" not in recorder.calls


def test_dropped_tokens_are_sampled_tokens_without_a_finite_logprob() -> None:
    prompt = Prompt(prompt_id="p", text="p", token_ids=(1,), label="")

    def group(logprobs: tuple[float, ...], sampled: tuple[bool, ...] | None = None) -> RolloutGroup:
        completion = Completion(
            token_ids=ids([1] * len(logprobs)),
            logprobs=logs(logprobs),
            finish_reason="length",
            policy_version=0,
            text="",
            loss_mask=None if sampled is None else mask(sampled),
        )
        return RolloutGroup(prompt=prompt, rollouts=(Rollout(prompt=prompt, completion=completion, reward=0.0),))

    groups = [
        group((-1.0, math.nan, -math.inf, math.inf)),
        group((-1.0, math.nan, -1.0), (True, False, True)),
    ]
    assert tuple(count_nonfinite_tokens(groups)) == (3, 6, "mean")


def sums_of(log_mu: Sequence[float], log_pi: Sequence[float], divergence: float = 0.0) -> ServerSums:
    """The sums of tokens, each by its definition."""
    pairs = list(zip(log_mu, log_pi, strict=True))
    q = [abs(math.exp(pi) - math.exp(mu)) for mu, pi in pairs]
    d = [pi - mu for mu, pi in pairs]
    return ServerSums(
        tokens=float(len(pairs)),
        responses=1.0,
        prob_diff=sum(q),
        prob_diff_square=sum(x * x for x in q),
        log_diff=sum(d),
        abs_log_diff=sum(map(abs, d)),
        log_diff_square=sum(x * x for x in d),
        divergence=divergence * len(pairs),
        surprise=0.0,
        surprise_square=1.0,
        entropy=0.0,
    )


RANDOM = random.Random(0)
LOG_MU = [math.log(RANDOM.uniform(0.05, 0.95)) for _ in range(2000)]


def noisy(size: float) -> list[float]:
    """Log-probabilities after rounding: the noise is on the logit, so it has no sign."""
    return [value + RANDOM.gauss(0.0, size) * (1 - math.exp(value)) for value in LOG_MU]


HONEST = sums_of(LOG_MU, noisy(0.004))
METRICS = {"abs_prob_diff": 0.001}
LIES = {
    "0.1 nats lower": (sums_of([x - 0.1 for x in LOG_MU], noisy(0.004)), "Rounding goes both ways"),
    "times 0.9": (sums_of([0.9 * x for x in LOG_MU], noisy(0.004)), "Rounding goes both ways"),
    "another position": (sums_of(LOG_MU[1:] + LOG_MU[:1], noisy(0.004)), "bf16 allows 0.06"),
    "one response in twenty is 0.0": (
        sums_of([0.0] * 100 + LOG_MU[100:], noisy(0.004)),
        "5 times the median of this run's last steps",
    ),
    "Top-K of another request": (sums_of(LOG_MU, noisy(0.004), divergence=0.6), "Top-K of the policy"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_is_left_out_and_the_only_one_stops_the_run(lie: str) -> None:
    sums, words = LIES[lie]

    def judge(others: dict[TokenSource, ServerSums]) -> dict[str, str]:
        history = GuardHistory([0.0008] * 3)
        check = replace(guard(), history=history, is_topk=True)
        return check(METRICS, {TokenSource("http://b", False): sums, **others})

    found = judge({TokenSource("http://a", False): HONEST, TokenSource("http://c", False): HONEST})
    assert list(found) == ["http://b"] and words in found["http://b"]
    with pytest.raises(TrainingStopped, match="http://b: ") as caught:
        judge({})
    assert words in str(caught.value)


def test_in_the_first_step_the_best_server_is_the_measure() -> None:
    """A repetition penalty, honestly reported: no bias, but far above the noise of the other server."""
    penalised = sums_of(LOG_MU, noisy(0.15))
    history = GuardHistory()
    sums = {TokenSource("http://a", False): HONEST, TokenSource("http://b", False): penalised}
    assert list(replace(guard(), history=history)(METRICS, sums)) == ["http://b"]
    # By itself it is below the limit of bf16: then the probe's measure of this server counts, and the dtype's.
    noisier = sums_of(LOG_MU, noisy(0.25))
    alone = {TokenSource("http://b", False): noisier}
    with pytest.raises(TrainingStopped, match=r"allows 0\.02 \(5 times what"):
        replace(guard(), history=GuardHistory(probed={"http://b": 0.002}))(METRICS, alone)
    assert replace(guard(), history=GuardHistory(probed={"http://b": 0.02}))(METRICS, alone) == {}
    # The engine in this process cannot lie.
    assert replace(guard(), history=GuardHistory())(METRICS, {TokenSource("", False): noisier}) == {}


@pytest.mark.parametrize("noise", [0.0, 0.004, 0.05, 0.2])
def test_noise_of_any_size_below_the_limit_is_honest(noise: float) -> None:
    history = GuardHistory()
    for _ in range(40):
        sums = sums_of(LOG_MU, noisy(noise))
        check = replace(guard(), history=history)
        assert check({"abs_prob_diff": sums.mean("prob_diff")}, {TokenSource("", False): sums}) == {}
    assert history.usual == pytest.approx(sums.mean("prob_diff"), rel=0.1, abs=1e-9)


def test_a_single_token_with_another_expert_is_no_lie() -> None:
    log_pi = noisy(0.002)[:200]
    log_pi[7] = math.log(0.999) if LOG_MU[7] < -0.7 else math.log(0.001)
    sums = sums_of(LOG_MU[:200], log_pi)
    assert replace(guard(), history=GuardHistory([0.0002]))(METRICS, {TokenSource("", False): sums}) == {}


def test_tokens_of_older_weights_are_compared_with_the_steps_before() -> None:
    source = TokenSource("http://a", True)
    moved = sums_of(LOG_MU, [x * 0.97 for x in LOG_MU])
    zeros = sums_of([0.0] * len(LOG_MU), LOG_MU)
    history = GuardHistory()
    check = replace(guard(on_policy=False), history=history)
    for _ in range(3):
        assert check(METRICS, {source: moved}) == {}
    for other in (zeros, sums_of(LOG_MU, [x * 0.4 for x in LOG_MU])):
        with pytest.raises(TrainingStopped, match="older weights differ"):
            check(METRICS, {source: other})
    # Before there is a history only an absurd value is one.
    check = replace(guard(on_policy=False), history=GuardHistory())
    with pytest.raises(TrainingStopped, match=r"at most 0\.3"):
        check(METRICS, {source: zeros})


def test_routes_of_one_wrong_layer_stop_the_run() -> None:
    guard()(METRICS | {"router_live_disagreement_max": 0.3})
    with pytest.raises(TrainingStopped, match=r"choose other experts .* 98%"):
        guard()(METRICS | {"router_live_disagreement_max": 0.98})
    guard(on_policy=False)(METRICS | {"router_live_disagreement_max": 0.98})


def routed(share: float, layers: int = 3) -> ServerSums:
    """An honest server whose routes of the last layer differ in a share of the rows."""
    rows = int(HONEST.tokens)
    return replace(HONEST, routes=LayerCounts((rows,) * layers, (*(0,) * (layers - 1), int(share * rows))))


@pytest.mark.parametrize("sections", [FP32, {}], ids=["fp32", "bf16"])
def test_routes_are_judged_by_server(sections: dict[str, Any]) -> None:
    """One liar of nine: the mean of all servers is below the limit of a step, or above it."""
    quiet = {"abs_prob_diff": 1e-7}
    tiny: dict[str, Any] = {
        field: 0.0 for field in ("prob_diff", "prob_diff_square", "log_diff", "abs_log_diff", "log_diff_square")
    }
    for overall in (0.09, 0.6):
        metrics = quiet | {"router_live_disagreement_max": overall}
        servers = {f"http://{name}": replace(routed(0.02), **tiny) for name in "abcdefgh"}
        servers["http://x"] = replace(routed(0.8), **tiny)
        sums = {TokenSource(server, False): each for server, each in servers.items()}
        found = replace(guard(**sections), history=GuardHistory())(metrics, sums)
        assert list(found) == ["http://x"] and "80% of the tokens" in found["http://x"]
    # All servers alike: the step is at fault, and the stop names all of them.
    everyone = {TokenSource(f"http://{name}", False): replace(routed(0.8), **tiny) for name in "ab"}
    with pytest.raises(TrainingStopped, match=r"(?s)http://a: .*layer.*http://b: .*layer"):
        replace(guard(**sections), history=GuardHistory())(quiet, everyone)


def few_rows(shares: Sequence[float], rows: int) -> ServerSums:
    """An honest server of few tokens whose routes differ in a share of each layer's rows."""
    exact = sums_of([math.log(0.5)] * rows, [math.log(0.5)] * rows)
    return replace(exact, routes=LayerCounts((rows,) * len(shares), tuple(int(share * rows) for share in shares)))


@pytest.mark.parametrize("liars", [1, 2])
@pytest.mark.parametrize("rows", [6, 20, 48])
def test_a_step_with_too_many_wrong_routes_names_their_server_however_few_tokens_there_are(
    rows: int, liars: int
) -> None:
    """The evidence of one small step is not enough, but the step cannot train: the others can."""
    sums = {TokenSource(f"http://{i}", False): few_rows([0.0, 1.0 * (i < liars)], rows) for i in range(5)}
    metrics = {"abs_prob_diff": 0.0, "router_live_disagreement_max": liars / 5}
    found = replace(guard(**FP32), history=GuardHistory())(metrics, sums)
    assert list(found) == [f"http://{i}" for i in range(liars)] and "100% of the tokens" in found["http://0"]
    # Without a server that is right the step stops as a whole.
    everyone = {TokenSource(f"http://{i}", False): few_rows([0.0, 0.15], rows) for i in range(5)}
    assert rows == 6 or everyone[TokenSource("http://0", False)].routes.excess(0.1) > 0
    with pytest.raises(TrainingStopped, match=r"layer the routers .* 15%"):
        replace(guard(**FP32), history=GuardHistory())(metrics | {"router_live_disagreement_max": 0.15}, everyone)


def test_routes_of_every_layer_add_up_over_the_steps() -> None:
    """A server of many, with 40 layers and few tokens in each step: a step must not pay for the choice of a layer."""
    history = GuardHistory()
    for step in range(12):
        sums = {TokenSource(f"http://{i}", False): few_rows([1.0 if i == 3 else 0.02] * 40, 32) for i in range(17)}
        found = replace(guard(), history=history)({"abs_prob_diff": 0.0, "router_live_disagreement_max": 0.08}, sums)
        if found:
            assert list(found) == ["http://3"] and step < 8
            return
    pytest.fail("384 tokens with routes of another request train")


def test_a_stop_reports_all_that_the_step_knew() -> None:
    sums = {TokenSource("http://a", False): LIES["0.1 nats lower"][0]}
    with pytest.raises(TrainingStopped, match=r"(?s)http://a: .*both ways.*50\.00%"):
        replace(guard(0.5), history=GuardHistory())(METRICS, sums)


def test_a_stop_names_the_servers_that_the_step_has_left_out_before() -> None:
    """The sampling test left out one, the first check another, and the second check stops: all of them are named."""
    check = replace(guard(), history=GuardHistory(), left_out={"http://copies": "one answer for all"})
    shifted = {TokenSource("http://a", False): LIES["0.1 nats lower"][0], TokenSource("http://b", False): HONEST}
    assert list(check(METRICS, shifted)) == ["http://a"]
    with pytest.raises(TrainingStopped) as stop:
        check(METRICS, {TokenSource("http://b", False): replace(HONEST, prob_diff=math.nan)})
    words = ("http://copies: one answer for all", "http://a: log pi", "http://b: the policy's")
    assert all(word in str(stop.value) for word in words), str(stop.value)


def test_small_lies_add_up_over_the_steps_and_teach_no_limit() -> None:
    """Five servers of 256 tokens a step; a difference that six standard errors of a step hide."""
    history = GuardHistory()
    servers = {f"http://{name}" for name in "abcde"}

    def liar() -> ServerSums:
        return sums_of(LOG_MU[:256], [x + RANDOM.gauss(0.0, 0.4) * (RANDOM.random() < 0.2) for x in LOG_MU[:256]])

    for step in range(10):
        sums = {TokenSource(url, False): sums_of(LOG_MU[:256], noisy(0.004)[:256]) for url in servers}
        sums[TokenSource("http://a", False)] = liar()
        found = replace(guard(), history=history)(METRICS, sums)
        if found:
            assert list(found) == ["http://a"] and step > 0
            break
    else:
        pytest.fail("not found in 2,560 tokens")
    assert max(history.prob_diffs) < 0.004, "a server under suspicion is not in the median"


def test_a_second_check_of_a_step_counts_its_tokens_once() -> None:
    surprising = replace(HONEST, surprise=100.0, surprise_square=2000.0)
    sums = {TokenSource("http://a", False): surprising}
    evidence = []
    for repeats in (1, 2):
        test = SamplingTest(num_servers=1)
        check = replace(guard(), history=GuardHistory(), sampling=test)
        for _ in range(repeats):
            check(METRICS, sums)
        evidence.append(test.evidence)
    assert evidence[0] == evidence[1] and max(evidence[0]["http://a"]["surprise_high"]) > 0
