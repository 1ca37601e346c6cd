"""Asking a server by plain HTTP whether it is ready, and what it is."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

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
