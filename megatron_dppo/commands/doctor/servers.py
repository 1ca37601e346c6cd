"""Inference servers, asked over HTTP: what they are, and whether they can serve a run."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from megatron_dppo.engines.serving.checks import IDLE, Needs, fetch_json, identify_server, is_healthy, server_problems
from megatron_dppo.errors import ServerError

_SECONDS = 10.0
_NAMES: dict[Literal["sglang", "vllm"], str] = {"sglang": "SGLang", "vllm": "vLLM"}


@dataclass(frozen=True)
class Server:
    """What one server said."""

    url: str
    description: str | None
    """program, version, model, context; None = it could not be told"""
    problems: tuple[str, ...]


def ask_servers(urls: Sequence[str], needs: Needs | None, key: str | None) -> list[Server]:
    """All at the same time.

    Args:
        urls: of the servers.
        needs: of a run; None = they are only described.
        key: of their API.
    """
    with ThreadPoolExecutor(max_workers=min(32, max(1, len(urls)))) as pool:
        return list(pool.map(lambda url: _ask(url, needs, key), urls))


def _ask(url: str, needs: Needs | None, key: str | None) -> Server:
    try:
        engine = needs.engine if needs is not None else _engine(url, key)
        description = _describe(url, engine, key)
    except ServerError as error:
        return Server(url, None, (error.detail,))
    problems = []
    try:
        if needs is not None:
            problems = server_problems(url, needs, key, timeout=_SECONDS, generating=True)
        elif not is_healthy(url, key, timeout=_SECONDS):
            problems = [IDLE]
    except ServerError as error:
        problems = [error.detail]
    return Server(url, description, tuple(problems))


def _engine(url: str, key: str | None) -> Literal["sglang", "vllm"]:
    """Which of the two it is.

    Raises:
        ServerError: neither; with what the first one's call gave.
    """
    refused: ServerError | None = None
    for engine in _NAMES:
        try:
            identify_server(url, engine, key, timeout=_SECONDS)
            return engine
        except ServerError as error:
            refused = refused or error
            if error.status is None or error.status in (401, 403):
                break
    assert refused is not None
    raise refused


def _describe(url: str, engine: Literal["sglang", "vllm"], key: str | None) -> str:
    version, model = identify_server(url, engine, key, timeout=_SECONDS)
    facts = _sglang(url, key) if engine == "sglang" else _vllm(url, key)
    told = [f"{name} {value}" for name, value in facts.items() if value is not None]
    # The folder of a model is nobody's business who reads a report.
    return ", ".join([f"{_NAMES[engine]} {version}", f"model {str(model).rstrip('/').rsplit('/', 1)[-1]}", *told])


def _sglang(url: str, key: str | None) -> dict[str, Any]:
    info = fetch_json(url, "/server_info", key, _SECONDS)
    return {
        "context": info.get("context_length") or info.get("max_req_input_len"),
        "tp": info.get("tp_size"),
        "dp": info.get("dp_size"),
        "dtype": info.get("dtype"),
        "attention": info.get("attention_backend"),
        "returns routed experts:": info.get("enable_return_routed_experts"),
    }


def _vllm(url: str, key: str | None) -> dict[str, Any]:
    models = fetch_json(url, "/v1/models", key, _SECONDS).get("data") or [{}]
    return {"context": models[0].get("max_model_len")}
