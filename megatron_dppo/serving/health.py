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
_START = "start it with megatron-dppo serve, and check rollout.servers.urls"


def is_healthy(url: str, key: str | None = None, *, timeout: float = 10.0) -> bool:
    """Whether the server's /health answers 200 within ``timeout`` seconds."""
    try:
        _get(url, "/health", key, timeout)
    except ServerError:
        return False
    return True


def describe_server(url: str, engine: str, key: str | None = None, *, timeout: float = 30.0) -> str:
    """One line about a healthy server: program, version, model.

    Raises:
        ServerError: it does not answer, is not healthy, or is another program than ``engine``.
    """
    try:
        _get(url, "/health", key, timeout)
    except ServerError as error:
        raise ServerError(url, f"not healthy ({error.detail}); {_START}", error.status) from error
    try:
        if engine == "sglang":
            version = _field(url, "/server_info", key, timeout, "version")
            model = _field(url, "/model_info", key, timeout, "model_path")
        else:
            version = _field(url, "/version", key, timeout, "version")
            model = _field(url, "/v1/models", key, timeout, "data", 0, "id")
    except ServerError as error:
        if error.status in (401, 403):
            raise
        raise ServerError(
            url, f"is healthy, but does not answer like {_NAMES[engine]} ({error.detail}); rollout.engine = {engine!r}"
        ) from error
    return f"{url}: healthy, {_NAMES[engine]} {version}, model {model}"


def _field(url: str, path: str, key: str | None, timeout: float, *names: str | int) -> Any:
    text = _get(url, path, key, timeout)
    try:
        value = json.loads(text)
        for name in names:
            value = value[name]
    except (ValueError, LookupError, TypeError) as error:
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
