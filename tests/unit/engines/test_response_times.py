"""A slow server is named, with a factor that does not depend on the length of the responses."""

from __future__ import annotations

import pytest

from megatron_dppo.run.collector import request_metrics
from megatron_dppo_engines.servers.pool import PoolCounts
from megatron_dppo_engines.servers.response_times import ResponseTimes, find_slowest


def times(seconds: float, tokens: float = 32.0, responses: float = 8.0) -> ResponseTimes:
    return ResponseTimes(responses=responses, tokens=tokens * responses, seconds=seconds * responses)


def test_one_of_two_servers_that_answers_12_seconds_late_is_named() -> None:
    slowest = find_slowest({"http://a": times(0.5), "http://b": times(12.5)})
    assert slowest is not None and slowest.url == "http://b" and slowest.factor == pytest.approx(25)
    assert slowest.text.startswith("http://b is slow: 12.5 s a response (8 responses of 32 tokens)")


@pytest.mark.parametrize(
    "servers",
    [
        {"http://a": times(0.5), "http://b": times(1.4)},
        # Long responses take long.
        {"http://a": times(0.5), "http://b": times(12.0, tokens=800.0)},
        # Three slow servers of four: the median is theirs.
        {"http://a": times(0.1), "http://b": times(5.0), "http://c": times(5.0), "http://d": times(6.0)},
        {"http://a": times(12.0)},
        {"http://a": times(0.5), "http://b": times(12.0, responses=1.0)},
    ],
    ids=["usual", "long", "median", "alone", "one response"],
)
def test_no_other_server_is_called_slow(servers: dict[str, ResponseTimes]) -> None:
    slowest = find_slowest(servers)
    assert slowest is not None and not slowest.text


@pytest.mark.parametrize(("seconds", "is_slow"), [(2.99, False), (3.01, True)])
def test_a_slow_server_takes_three_times_as_long(seconds: float, is_slow: bool) -> None:
    # The median of two servers is their mean.
    slowest = find_slowest({"http://a": times(1.5), "http://b": times(seconds), "http://c": times(0.5)})
    assert slowest is not None and slowest.factor == pytest.approx(seconds) and bool(slowest.text) == is_slow


def test_every_rank_has_the_metric() -> None:
    assert find_slowest(PoolCounts().times) is None
    assert request_metrics(PoolCounts(), dp=1)["slowest_server"].numerator == 1.0
