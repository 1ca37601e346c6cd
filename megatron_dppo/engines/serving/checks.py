"""Whether running servers can serve a run, by what they say of themselves; nothing is generated."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_dppo.config.servers import WeightSyncMethod
from megatron_dppo.errors import ServerError

# Servers are on this machine or on the cluster: a proxy for the outside world cannot reach them.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


_NAMES = {"sglang": "SGLang", "vllm": "vLLM"}


IDLE = "generates nothing now (paused by a trainer that ended in a weight sync, still loading, or stuck)"


_START = "start it with megatron-dppo serve, and check rollout.servers.urls"


def is_healthy(url: str, key: str | None = None, *, timeout: float = 10.0) -> bool:
    """Whether the server's /health answers 200 within ``timeout`` seconds."""
    try:
        _get(url, "/health", key, timeout)
    except ServerError:
        return False
    return True


def describe_server(url: str, engine: str, key: str | None = None, *, timeout: float = 30.0) -> str:
    """One line about a server: program, version, model, and whether it generates.

    One that answers and does not generate may be paused by a trainer that ended in a weight sync; the next sync lets
    it go on.

    Raises:
        ServerError: see ``identify_server``.
    """
    version, model = identify_server(url, engine, key, timeout=timeout)
    state = "healthy" if is_healthy(url, key, timeout=timeout) else f"answers, but {IDLE}"
    return f"{url}: {state}, {_NAMES[engine]} {version}, model {model}"


def identify_server(url: str, engine: str, key: str | None = None, *, timeout: float = 30.0) -> tuple[Any, Any]:
    """Version and model of a server.

    Raises:
        ServerError: it does not answer, or is another program than ``engine``.
    """
    try:
        if engine == "sglang":
            version = _field(url, "/server_info", key, timeout, "version")
            return version, _field(url, "/model_info", key, timeout, "model_path")
        version = _field(url, "/version", key, timeout, "version")
        return version, _field(url, "/v1/models", key, timeout, "data", 0, "id")
    except ServerError as error:
        if error.status in (401, 403):
            raise
        if error.status is None and not is_healthy(url, key, timeout=timeout):
            raise ServerError(url, f"not healthy ({error.detail}); {_START}", error.status) from error
        raise ServerError(
            url, f"does not answer like {_NAMES[engine]} ({error.detail}); rollout.engine = {engine!r}", error.status
        ) from error


def fetch_json(url: str, path: str, key: str | None, timeout: float) -> dict[str, Any]:
    """What a server answers to a GET.

    Raises:
        ServerError: no answer, a refusal, or no JSON object.
    """
    text = _get(url, path, key, timeout)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ServerError(url, f"{path} is no JSON") from error
    if not isinstance(value, dict):
        raise ServerError(url, f"{path} is no JSON object")
    return value


def _field(url: str, path: str, key: str | None, timeout: float, *names: str | int) -> Any:
    value: Any = fetch_json(url, path, key, timeout)
    try:
        for name in names:
            value = value[name]
    except (LookupError, TypeError) as error:
        raise ServerError(url, f"{path} has no {names[0]!r}") from error
    return value


def _get(url: str, path: str, key: str | None, timeout: float) -> bytes:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(url.rstrip("/") + path, headers=headers)
        with _opener.open(request, timeout=timeout) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        hint = "; set rollout.servers.api_key_env to its key" if error.code in (401, 403) else ""
        raise ServerError(url, f"GET {path} was refused{hint}", error.code) from error
    except urllib.error.URLError as error:
        raise ServerError(url, f"GET {path}: {error.reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ServerError(url, f"GET {path}: {error}") from error


_OLDEST = {"sglang": (0, 5, 19), "vllm": (0, 32)}


_OLDEST_WITH_SETS = (0, 5, 21)
"""SGLang that tells what a filter left, and the log-probability that it then gave to the sampled token."""


UNUSED = 2
"""Positions at the end of its context that SGLang never fills: a response that reaches them ends there, with ``length``
(srt/managers: the longest request is one less than the context, and a response one less than what is left of it)."""


_EXTENSION = "megatron_dppo_vllm.WorkerExtension"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run wants from each of its servers."""

    engine: Literal["sglang", "vllm"]
    context: int
    """longest prompt and longest response together, in tokens"""
    topk: int
    """0 = no Top-K"""
    routed_experts: bool
    weight_sync: WeightSyncMethod
    adapter_rank: int = 0
    """of the adapter that it has to add to its weights; 0 = none"""
    colocated: bool = False
    """whether it has to release its memory"""
    quantized: bool = False
    """whether it has to take quantised weights"""
    kept_ids: int = 0
    """how many ids it may have to tell of what its filters left of a token; 0 = none"""


def server_problems(
    url: str, needs: Needs, key: str | None, *, timeout: float = 10.0, generating: bool = False
) -> list[str]:
    """Everything that is wrong with one server, with the flag that mends it.

    Args:
        url: of the server.
        needs: of the run.
        key: of the server's API; None = it has none.
        timeout: seconds of each question.
        generating: whether it has to generate now. The start of a run does without: its first weight sync resumes a
            server that an earlier trainer left paused.

    Raises:
        ServerError: it does not answer, or is another program.
    """
    identify_server(url, needs.engine, key, timeout=timeout)
    idle = [IDLE] if generating and not is_healthy(url, key, timeout=timeout) else []
    try:
        found = _sglang(url, needs, key, timeout) if needs.engine == "sglang" else _vllm(url, needs, key, timeout)
        return [*idle, *found]
    except (TypeError, ValueError, AttributeError) as error:
        raise ServerError(url, f"does not describe itself as {needs.engine} does ({error})") from error


def _sglang(url: str, needs: Needs, key: str | None, timeout: float) -> Iterator[str]:
    info = fetch_json(url, "/server_info", key, timeout)
    oldest = _OLDEST_WITH_SETS if needs.kept_ids else _OLDEST["sglang"]
    yield from _old(needs.engine, info.get("version"), oldest, " with a sampling filter" * bool(needs.kept_ids))
    length = info.get("context_length") or info.get("max_req_input_len")
    yield from _short(length, needs.context, "--context-length", UNUSED)
    # What an older version does not tell is no reason to complain.
    if needs.routed_experts and info.get("enable_return_routed_experts") is False:
        yield "train.router_replay needs the experts of each token; start it with --enable-return-routed-experts"
    if needs.colocated and info.get("enable_memory_saver") is False and info.get("device") != "cpu":
        yield _keeps_memory("--enable-memory-saver")
    if needs.kept_ids:
        most = info.get("sampling_mask_max_tokens")
        if isinstance(most, int) and most < needs.kept_ids:
            yield (
                f"--sampling-mask-max-tokens is {most}, and rollout.top_k = {needs.kept_ids}; start it with "
                f"--sampling-mask-max-tokens {needs.kept_ids}, or lower rollout.top_k"
            )
    if needs.adapter_rank:
        takes = bool(info.get("enable_lora", True))
        yield from _small_adapter(takes, info.get("max_lora_rank"), needs.adapter_rank)
    if needs.weight_sync != "disk":
        for name, flag in (("dp_size", "--dp-size"), ("pp_size", "--pp-size")):
            if int(info.get(name) or 1) > 1:
                yield (
                    f"{flag} {info[name]}: SGLang takes weights otherwise than from disk only without it; start "
                    "one server a replica, or set rollout.weight_sync.method = 'disk'"
                )


def _vllm(url: str, needs: Needs, key: str | None, timeout: float) -> Iterator[str]:
    yield from _old(needs.engine, fetch_json(url, "/version", key, timeout).get("version"), _OLDEST["vllm"])
    try:
        info = fetch_json(url, "/server_info?config_format=json", key, timeout)
    except ServerError as error:
        if error.status != 404:
            raise
        yield "has no control calls; start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        return
    config: Mapping[str, Any] = info["vllm_config"] if isinstance(info.get("vllm_config"), Mapping) else {}
    model, parallel = config.get("model_config") or {}, config.get("parallel_config") or {}
    yield from _short(model.get("max_model_len"), needs.context, "--max-model-len")
    if (mode := model.get("logprobs_mode")) not in (None, "processed_logprobs"):
        yield f"--logprobs-mode is {mode!r}; start it with --logprobs-mode processed_logprobs"
    if needs.kept_ids and model.get("return_sampling_mask") is False:
        yield "tells no ids that its filters left, as those of [rollout] need; start it with --return-sampling-mask"
    device = (config.get("device_config") or {}).get("device")
    if needs.colocated and model.get("enable_sleep_mode") is False and device != "cpu":
        yield _keeps_memory("--enable-sleep-mode")
    most = model.get("max_logprobs")
    if needs.topk and isinstance(most, int) and 0 <= most < needs.topk + 1:
        yield f"--max-logprobs is {most}; loss.topk = {needs.topk} needs --max-logprobs {needs.topk + 1}"
    if needs.quantized and not model.get("quantization"):
        yield (
            "has no quantised weights, and would not take those of rollout.servers.model; start it with megatron-dppo "
            "serve, or with that folder as --model"
        )
    if needs.adapter_rank:
        lora = config.get("lora_config")
        most = lora.get("max_lora_rank") if isinstance(lora, Mapping) else None
        yield from _small_adapter(lora is not None or "lora_config" not in config, most, needs.adapter_rank)
    if needs.weight_sync not in ("disk", "adapter") and parallel.get("worker_extension_cls") != _EXTENSION:
        yield (
            f"runs without our worker extension, which rollout.weight_sync.method = {needs.weight_sync!r} needs; start "
            "it with megatron-dppo serve, or as docs/engines.md says"
        )


def _small_adapter(takes: bool, most: Any, rank: int) -> Iterator[str]:
    """What a version does not tell is no reason to complain."""
    if not takes:
        yield f"takes no adapters; start it with megatron-dppo serve, or with --enable-lora --max-lora-rank {rank}"
    elif isinstance(most, int) and most < rank:
        yield f"--max-lora-rank is {most}, and lora.rank = {rank}; start it with --max-lora-rank {rank} or more"


def _keeps_memory(flag: str) -> str:
    return f"cannot release its memory, as rollout.servers.colocated = true needs; start it with {flag}"


def _old(engine: str, version: Any, oldest: tuple[int, ...], what: str = "") -> Iterator[str]:
    numbers = tuple(int(part) for part in re.findall(r"\d+", str(version))[:3])
    if not numbers:
        yield f"does not say its version ({version!r})"
    elif numbers < oldest:
        yield f"{engine} {version} is older than {'.'.join(map(str, oldest))}, the first that can work{what}"


def _short(length: Any, needed: int, flag: str, unused: int = 0) -> Iterator[str]:
    if length and int(length) < needed + unused:
        spare = f", and it leaves {unused} positions unused" if unused else ""
        yield (
            f"takes sequences of {length} tokens, but the longest prompt and its answer together may have "
            f"{needed}{spare}; start it with {flag} {needed + unused}, or lower rollout.max_new_tokens "
            "(eval.max_new_tokens)"
        )
