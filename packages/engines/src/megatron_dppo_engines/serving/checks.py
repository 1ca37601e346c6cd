"""Checks that running servers can serve a run, from the information that they return; nothing is generated."""

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_dppo_engines.errors import ServerError
from megatron_dppo_engines.serving import WeightSyncMethod
from megatron_dppo_engines.serving.collectives import (
    CollectiveVersions,
    assumed_versions,
    find_mismatches,
    interpreter_versions,
    parse_versions,
)

# Without proxies: servers are on this machine or on the cluster, where a proxy for the internet cannot reach them.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

_NAMES = {"sglang": "SGLang", "vllm": "vLLM"}
IDLE = "generates nothing now (paused by a trainer that ended in a weight sync, still loading, or stuck)"
"""Problem of a server that responds but is not healthy."""
_START_HINT = "start it with megatron-dppo serve, and check rollout.servers.urls"
_OLDEST = {"sglang": (0, 5, 19), "vllm": (0, 32)}
_OLDEST_WITH_SAMPLING_MASK = (0, 5, 21)
"""First version of SGLang with sampling masks and the log-probabilities after the filters."""
UNUSED_CONTEXT_TOKENS = 2
"""Positions at the end of its context that SGLang never fills; a response that reaches them ends with ``length``.

In srt/managers, the longest request is one less than the context, and a response is one less than what remains.
"""
_EXTENSION = "megatron_dppo_vllm.WorkerExtension"
_VERSIONS_CALL = "megatron_dppo_collectives"


@dataclass(frozen=True, kw_only=True)
class ServerRequirements:
    """Requirements of a run for each of its servers."""

    engine: Literal["sglang", "vllm"]
    context: int
    """Longest prompt and longest response together, in tokens."""
    topk: int
    """K of the Top-K; 0 for none."""
    routed_experts: bool
    """True if the server must return the routers' choices."""
    weight_sync: WeightSyncMethod
    adapter_rank: int = 0
    """Rank of the LoRA adapter that the server must load; 0 for none."""
    colocated: bool = False
    """True if the server must release its memory."""
    quantized: bool = False
    """True if the server must accept quantized weights."""
    sampling_mask_ids: int = 0
    """Number of allowed ids that the server must return for a token; 0 for none."""
    trainer: CollectiveVersions | None = None
    """Versions of the trainer, if the server joins a communicator of it on GPUs."""
    command: tuple[str, ...] = ()
    """Command that starts the server, if the configuration names one."""


def is_healthy(url: str, key: str | None = None, *, timeout: float = 10.0) -> bool:
    """Return True if the server's /health responds with 200 within ``timeout`` seconds."""
    try:
        _request(url, "/health", key, timeout)
    except ServerError:
        return False
    return True


def describe_server(url: str, engine: str, key: str | None = None, *, timeout: float = 30.0) -> str:
    """Return one line about a server: program, version, model and state.

    A server that responds but does not generate may be paused by a trainer that ended in a weight sync. The next sync
    resumes it.
    """
    version, model = identify_server(url, engine, key, timeout=timeout)
    state = "healthy" if is_healthy(url, key, timeout=timeout) else f"responds, but {IDLE}"
    return f"{url}: {state}, {_NAMES[engine]} {version}, model {model}"


def identify_server(url: str, engine: str, key: str | None = None, *, timeout: float = 30.0) -> tuple[object, object]:
    """Return version and model of a server; ``ServerError`` if it is silent, or another program than ``engine``."""
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
            raise ServerError(url, f"not healthy ({error.detail}); {_START_HINT}", error.status) from error
        raise ServerError(
            url, f"does not respond like {_NAMES[engine]} ({error.detail}); rollout.engine = {engine!r}", error.status
        ) from error


def fetch_json(url: str, path: str, key: str | None, timeout: float) -> dict[str, object]:
    """Return the JSON object that a server returns for a GET."""
    text = _request(url, path, key, timeout)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ServerError(url, f"GET {path} did not return JSON; is this the URL of an inference server?") from error
    if not isinstance(value, dict):
        raise ServerError(url, f"GET {path} did not return a JSON object; is this the URL of an inference server?")
    return value


def _field(url: str, path: str, key: str | None, timeout: float, *names: str | int) -> Any:
    value: Any = fetch_json(url, path, key, timeout)
    try:
        for name in names:
            value = value[name]
    except (LookupError, TypeError) as error:
        raise ServerError(
            url, f"the response to GET {path} has no {names[0]!r}; is the server of another engine or version?"
        ) from error
    return value


def _request(url: str, path: str, key: str | None, timeout: float, body: Mapping[str, Any] | None = None) -> bytes:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    method = "GET" if body is None else "POST"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url.rstrip("/") + path, data=data, headers=headers)
        with _opener.open(request, timeout=timeout) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        hint = "; set rollout.servers.api_key_env to its key" if error.code in (401, 403) else ""
        raise ServerError(url, f"{method} {path} failed{hint}", error.code) from error
    except urllib.error.URLError as error:
        raise ServerError(url, f"{method} {path}: {error.reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ServerError(url, f"{method} {path}: {error}") from error


def find_server_problems(
    url: str, needs: ServerRequirements, key: str | None, *, timeout: float = 10.0, must_generate: bool = False
) -> list[str]:
    """Return every problem of one server, with the flag that fixes it.

    ``must_generate`` is False at the start of a run, whose first weight sync resumes a server that an earlier trainer
    left paused. A server that is silent or another program raises ``ServerError``.
    """
    identify_server(url, needs.engine, key, timeout=timeout)
    problems = [IDLE] if must_generate and not is_healthy(url, key, timeout=timeout) else []
    find_problems = _sglang_problems if needs.engine == "sglang" else _vllm_problems
    try:
        problems += find_problems(url, needs, key, timeout)
        if needs.trainer is not None:
            server = fetch_versions(url, needs.engine, key, timeout, needs.command)
            problems += find_mismatches(needs.engine, server, needs.trainer)
        return problems
    except (TypeError, ValueError, AttributeError) as error:
        raise ServerError(
            url,
            f"its description is not that of {needs.engine} ({error}); check rollout.engine and the server's version",
        ) from error


def fetch_versions(
    url: str, engine: Literal["sglang", "vllm"], key: str | None, timeout: float, command: Sequence[str] = ()
) -> CollectiveVersions:
    """Return the torch and NCCL of a server, and its variables for NCCL as far as they are known.

    A vLLM server with our worker extension reports them. SGLang does not: its versions are those of the environment of
    ``command``, or those that its version pins.
    """
    if engine == "vllm":
        try:
            answer = json.loads(_request(url, "/collective_rpc", key, timeout, {"method": _VERSIONS_CALL}))
            return parse_versions(answer["results"][0])
        except (ServerError, ValueError, LookupError, TypeError):
            # Without the extension, or with one of an older version of this package.
            return assumed_versions(engine, str(fetch_json(url, "/version", key, timeout).get("version")))
    info = fetch_json(url, "/server_info", key, timeout)
    if info.get("device") == "cpu":
        return CollectiveVersions(torch=None, nccl=None)
    versions = interpreter_versions(command) or assumed_versions(engine, str(info.get("version")))
    # By default SGLang sets them to 0; these options set them to 1, whatever its environment has.
    options = {
        "NCCL_CUMEM_ENABLE": bool(info.get("enable_symm_mem")),
        "NCCL_NVLS_ENABLE": bool(info.get("enable_symm_mem") or info.get("enable_nccl_nvls")),
    }
    return replace(versions, variables={name: "1" for name, is_on in options.items() if is_on})


# A setting that an older version of the engine does not report is not a problem: hence ``is False`` and defaults.


def _sglang_problems(url: str, needs: ServerRequirements, key: str | None, timeout: float) -> Iterator[str]:
    info: dict[str, Any] = fetch_json(url, "/server_info", key, timeout)
    oldest, feature = _OLDEST["sglang"], ""
    if needs.sampling_mask_ids:
        oldest, feature = _OLDEST_WITH_SAMPLING_MASK, " with a sampling filter"
    yield from _version_problems(needs.engine, info.get("version"), oldest, feature)
    length = info.get("context_length") or info.get("max_req_input_len")
    yield from _context_problems(length, needs.context, "--context-length", UNUSED_CONTEXT_TOKENS)
    # ``is False``: a version that does not report the flag may have it.
    if needs.routed_experts and info.get("enable_return_routed_experts") is False:
        yield "train.router_replay needs the experts of each token; start it with --enable-return-routed-experts"
    if needs.colocated and info.get("enable_memory_saver") is False and info.get("device") != "cpu":
        yield _memory_problem("--enable-memory-saver")
    if needs.sampling_mask_ids:
        limit = info.get("sampling_mask_max_tokens")
        if isinstance(limit, int) and limit < needs.sampling_mask_ids:
            yield (
                f"--sampling-mask-max-tokens is {limit}, and rollout.top_k = {needs.sampling_mask_ids}; start it with "
                f"--sampling-mask-max-tokens {needs.sampling_mask_ids}, or lower rollout.top_k"
            )
    if needs.adapter_rank:
        has_lora = bool(info.get("enable_lora", True))
        yield from _adapter_problems(has_lora, info.get("max_lora_rank"), needs.adapter_rank)
    if (mode := info.get("disaggregation_mode")) not in (None, "null"):
        yield (
            f"--disaggregation-mode is {mode}: it answers only together with others, through a router that passes on "
            "no weight updates; start it without"
        )
    yield from _node_problems(needs, info.get("nnodes"))
    if needs.weight_sync != "disk":
        for name, flag in (("dp_size", "--dp-size"), ("pp_size", "--pp-size")):
            if int(info.get(name) or 1) > 1 and not (name == "dp_size" and info.get("enable_dp_attention")):
                yield (
                    f"{flag} {info[name]}: SGLang takes weights otherwise than from disk only without it; start "
                    "one server a replica, or set rollout.weight_sync.method = 'disk'"
                )


def _vllm_problems(url: str, needs: ServerRequirements, key: str | None, timeout: float) -> Iterator[str]:
    version = fetch_json(url, "/version", key, timeout).get("version")
    yield from _version_problems(needs.engine, version, _OLDEST["vllm"])
    try:
        info: dict[str, Any] = fetch_json(url, "/server_info?config_format=json", key, timeout)
    except ServerError as error:
        if error.status != 404:
            raise
        yield "has no control calls; start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        return
    config: Mapping[str, Any] = info["vllm_config"] if isinstance(info.get("vllm_config"), Mapping) else {}
    model = config.get("model_config") or {}
    parallel = config.get("parallel_config") or {}
    yield from _context_problems(model.get("max_model_len"), needs.context, "--max-model-len")
    if (mode := model.get("logprobs_mode")) not in (None, "processed_logprobs"):
        yield f"--logprobs-mode is {mode!r}; start it with --logprobs-mode processed_logprobs"
    if needs.sampling_mask_ids and model.get("return_sampling_mask") is False:
        yield (
            "does not return the token ids allowed by its sampling filters, which the filters of [rollout] need; start "
            "it with --return-sampling-mask"
        )
    device = (config.get("device_config") or {}).get("device")
    if needs.colocated and model.get("enable_sleep_mode") is False and device != "cpu":
        yield _memory_problem("--enable-sleep-mode")
    limit = model.get("max_logprobs")
    # -1 means no limit.
    if needs.topk and isinstance(limit, int) and 0 <= limit < needs.topk + 1:
        yield f"--max-logprobs is {limit}; loss.topk = {needs.topk} needs --max-logprobs {needs.topk + 1}"
    if needs.quantized and not model.get("quantization"):
        yield (
            "has no quantized weights, and would not accept those of rollout.servers.model; start it with "
            "megatron-dppo serve, or with that folder as --model"
        )
    if needs.adapter_rank:
        lora = config.get("lora_config")
        max_rank = lora.get("max_lora_rank") if isinstance(lora, Mapping) else None
        has_lora = lora is not None or "lora_config" not in config
        yield from _adapter_problems(has_lora, max_rank, needs.adapter_rank)
    yield from _node_problems(needs, parallel.get("nnodes"))
    if needs.weight_sync not in ("disk", "adapter") and parallel.get("worker_extension_cls") != _EXTENSION:
        yield (
            f"runs without our worker extension, which rollout.weight_sync.method = {needs.weight_sync!r} needs; start "
            "it with megatron-dppo serve, or as docs/engines.md says"
        )


def _node_problems(needs: ServerRequirements, nodes: object) -> Iterator[str]:
    if needs.weight_sync == "ipc" and isinstance(nodes, int) and nodes > 1:
        yield (
            f"--nnodes {nodes}: rollout.weight_sync.method = 'ipc' shares the memory of one node; set it to "
            "'distributed' or 'disk'"
        )


def _adapter_problems(has_lora: bool, max_rank: object, rank: int) -> Iterator[str]:
    if not has_lora:
        yield f"takes no adapters; start it with megatron-dppo serve, or with --enable-lora --max-lora-rank {rank}"
    elif isinstance(max_rank, int) and max_rank < rank:
        yield f"--max-lora-rank is {max_rank}, and lora.rank = {rank}; start it with --max-lora-rank {rank} or more"


def _memory_problem(flag: str) -> str:
    return f"cannot release its memory, as rollout.servers.colocated = true needs; start it with {flag}"


def _version_problems(engine: str, version: object, oldest: tuple[int, ...], feature: str = "") -> Iterator[str]:
    numbers = tuple(int(part) for part in re.findall(r"\d+", str(version))[:3])
    if not numbers:
        yield f"does not report its version ({version!r})"
    elif numbers < oldest:
        yield f"{engine} {version} is older than {'.'.join(map(str, oldest))}, the first that can work{feature}"


def _context_problems(length: Any, needed: int, flag: str, unused: int = 0) -> Iterator[str]:
    if length and int(length) < needed + unused:
        spare = f", and it leaves {unused} positions unused" if unused else ""
        yield (
            f"accepts sequences of {length} tokens, but the longest prompt and its response together may have "
            f"{needed}{spare}; start it with {flag} {needed + unused}, or lower rollout.max_new_tokens "
            "(eval.max_new_tokens)"
        )
