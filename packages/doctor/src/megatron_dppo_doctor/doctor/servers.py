"""Inspection of inference servers over HTTP: program, version, model, and fitness for a run."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from megatron_dppo.errors import ServerError
from megatron_dppo_engines.serving.checks import (
    IDLE,
    ServerRequirements,
    fetch_json,
    fetch_versions,
    find_server_problems,
    identify_server,
    is_healthy,
)

_TIMEOUT_SECONDS = 10.0
_PROGRAM_NAMES: dict[Literal["sglang", "vllm"], str] = {"sglang": "SGLang", "vllm": "vLLM"}


@dataclass(frozen=True)
class ServerReport:
    """Description and problems of one server."""

    url: str
    description: str | None
    """Program, version, model and context length. None if the server does not identify itself."""
    problems: tuple[str, ...]


def inspect_servers(urls: Sequence[str], needs: ServerRequirements | None, key: str | None) -> list[ServerReport]:
    """Inspect servers concurrently. ``needs`` None only describes the servers."""
    with ThreadPoolExecutor(max_workers=min(32, max(1, len(urls)))) as pool:
        return list(pool.map(lambda url: _inspect_server(url, needs, key), urls))


def _inspect_server(url: str, needs: ServerRequirements | None, key: str | None) -> ServerReport:
    try:
        engine = needs.engine if needs is not None else _detect_engine(url, key)
        versions = fetch_versions(url, engine, key, _TIMEOUT_SECONDS, needs.command if needs is not None else ())
        description = f"{_describe(url, engine, key)}, {versions}"
    except ServerError as error:
        return ServerReport(url, None, (error.detail,))
    problems = []
    try:
        if needs is not None:
            problems = find_server_problems(url, needs, key, timeout=_TIMEOUT_SECONDS, must_generate=True)
        elif not is_healthy(url, key, timeout=_TIMEOUT_SECONDS):
            problems = [IDLE]
    except ServerError as error:
        problems = [error.detail]
    return ServerReport(url, description, tuple(problems))


def _detect_engine(url: str, key: str | None) -> Literal["sglang", "vllm"]:
    """Return the program that serves the address. Else raise the ``ServerError`` of the first attempt."""
    first_error: ServerError | None = None
    for engine in _PROGRAM_NAMES:
        try:
            identify_server(url, engine, key, timeout=_TIMEOUT_SECONDS)
            return engine
        except ServerError as error:
            first_error = first_error or error
            # No connection, or a wrong key: the other program's address would fail in the same way.
            if error.status is None or error.status in (401, 403):
                break
    assert first_error is not None
    raise first_error


def _describe(url: str, engine: Literal["sglang", "vllm"], key: str | None) -> str:
    version, model = identify_server(url, engine, key, timeout=_TIMEOUT_SECONDS)
    facts = _sglang_facts(url, key) if engine == "sglang" else _vllm_facts(url, key)
    reported = [f"{name} {value}" for name, value in facts.items() if value is not None]
    # The report may become public: print the model's name without its folder.
    model_name = str(model).rstrip("/").rsplit("/", 1)[-1]
    return ", ".join([f"{_PROGRAM_NAMES[engine]} {version}", f"model {model_name}", *reported])


def _sglang_facts(url: str, key: str | None) -> dict[str, object]:
    info = fetch_json(url, "/server_info", key, _TIMEOUT_SECONDS)
    return {
        # ``context_length`` is null unless SGLang was started with it.
        "context": info.get("context_length") or info.get("max_req_input_len"),
        "tp": info.get("tp_size"),
        "dp": info.get("dp_size"),
        "dtype": info.get("dtype"),
        "attention": info.get("attention_backend"),
        "returns routed experts:": info.get("enable_return_routed_experts"),
    }


def _vllm_facts(url: str, key: str | None) -> dict[str, object]:
    models: Any = fetch_json(url, "/v1/models", key, _TIMEOUT_SECONDS).get("data") or [{}]
    return {"context": models[0].get("max_model_len")}
