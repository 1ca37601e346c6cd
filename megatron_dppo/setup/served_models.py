"""Models behind URLs (teacher, judge, reward model), as their servers describe them. A resume compares them."""

import asyncio
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_dppo.config.distillation import DistillationConfig
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.reward_options import BUILT_IN_REWARDS, ServerOptions, read_options
from megatron_dppo.errors import ServerError, UserError
from megatron_dppo.setup.changes import SERVED_WEIGHTS, ServedModels
from megatron_dppo_engines.servers.http import Deadlines, HttpClient
from megatron_dppo_engines.sglang import SGLangServer
from megatron_dppo_engines.vllm import VLLMServer

_SECONDS = 10.0
"""Deadline of one question to a server."""
_DIGEST_SECONDS = 120.0
"""Deadline for the digests of all weights of a server."""
_MAX_TEXT = 500
_FIELDS = {
    # OpenAI's API; ``root`` is the folder or repository in vLLM and SGLang.
    "/v1/models": {"id": "name", "root": "path"},
    # SGLang.
    "/model_info": {"model_path": "path", "weight_version": "version"},
    "/server_info": {"revision": "revision"},
    # vLLM: its own version alone.
    "/version": {},
    # Text Embeddings Inference and Text Generation Inference.
    "/info": {"model_id": "name", "model_sha": "revision"},
}
"""Fields of responses that describe a model, with their names here."""


class _Servers(NamedTuple):
    """Servers that one key of the configuration names."""

    key: str
    urls: Sequence[str]
    model: str
    """Name of the model in requests. Empty if they have none."""
    api_key: str | None


class ReadServedModels(NamedTuple):
    """Descriptions of the models behind URLs."""

    models: ServedModels
    notes: tuple[str, ...]
    """One message for each key whose servers do not say which model they serve."""


def read_served_models(distillation: DistillationConfig, reward: RewardConfig) -> ReadServedModels:
    """Ask every teacher, judge and reward model that the configuration names for its model. Nothing is sampled."""
    models = {}
    notes = []
    for servers in _find_servers(distillation, reward):
        fields = asyncio.run(_describe_all(servers))
        if fields:
            models[servers.key] = fields
        if not any(field.startswith(SERVED_WEIGHTS) for field in fields):
            covered = f"only its {', '.join(fields)}" if fields else "nothing"
            notes.append(
                f"note     {servers.key}: of the model behind it a resume compares {covered}, as the server has no "
                "digest of its weights"
            )
    return ReadServedModels(models, tuple(notes))


def _find_servers(distillation: DistillationConfig, reward: RewardConfig) -> Iterator[_Servers]:
    if distillation.teacher_urls:
        key = _read_key(distillation.teacher_api_key_env)
        yield _Servers("distillation.teacher_urls", distillation.teacher_urls, "", key)
    rewards: dict[str, Any] = {"reward": reward}
    rewards |= {f"reward.functions.{name}": each for name, each in reward.functions.items()}
    for table, settings in rewards.items():
        if settings.function in BUILT_IN_REWARDS and settings.options:
            options = read_options(settings.function, settings.options)
            if isinstance(options, ServerOptions):
                model = str(getattr(options, "model", ""))
                yield _Servers(f"{table}.options.url", options.urls, model, _read_key(options.api_key_env))


def _read_key(name: str | None) -> str | None:
    """Return the API key; a missing one is reported where the servers are used."""
    return os.environ.get(name) or None if name else None


async def _describe_all(servers: _Servers) -> dict[str, list[str]]:
    """Return the different values of each field over all servers that respond."""
    descriptions = await asyncio.gather(*(_describe(url.rstrip("/"), servers) for url in servers.urls))
    fields = sorted({field for each in descriptions for field in each})
    return {field: sorted({each[field] for each in descriptions if field in each}) for field in fields}


async def _describe(url: str, servers: _Servers) -> dict[str, str]:
    responses = {}
    client = HttpClient(url, api_key=servers.api_key)
    try:
        for path in _FIELDS:
            try:
                responses[path] = await client.get(path, timeout=_SECONDS)
            except ServerError as error:
                if error.status is None:  # nobody is there
                    return {}
    finally:
        await client.close()
    fields: dict[str, str] = {}
    for path, names in _FIELDS.items():
        response = responses.get(path)
        if path == "/v1/models":
            response = _choose_model(response, servers.model)
        if isinstance(response, Mapping):
            for name, field in names.items():
                value = response.get(name)
                if isinstance(value, str) and value:
                    fields.setdefault(field, value[:_MAX_TEXT])
    return fields | await _read_digest(url, servers.api_key, responses)


def _choose_model(response: object, name: str) -> object:
    """Return the entry of a list of models that requests are for; None if that is not clear."""
    entries = response.get("data") if isinstance(response, Mapping) else None
    if not isinstance(entries, list):
        return None
    named = [entry for entry in entries if isinstance(entry, Mapping) and name in ("", entry.get("id"))]
    return named[0] if len(named) == 1 else None


async def _read_digest(url: str, api_key: str | None, responses: Mapping[str, object]) -> dict[str, str]:
    """Return the digest of a server's weights. Its name says what it depends on besides the weights.

    Empty if the server has no digests: it is no SGLang, and no vLLM in development mode.
    """
    is_sglang = "/model_info" in responses
    info = responses.get("/server_info" if is_sglang else "/version")
    version = info.get("version") if isinstance(info, Mapping) else ""
    engine = f"{'SGLang' if is_sglang else 'vLLM'} {version}"
    server = (SGLangServer if is_sglang else VLLMServer)(
        url, api_key=api_key, deadlines=Deadlines(control=_DIGEST_SECONDS)
    )
    try:
        ranks = await server.weight_digests()
    except UserError:
        return {}
    finally:
        await server.close()
    if not any(rank.digests for rank in ranks):
        return {}
    content = json.dumps([[rank.tp_rank, dict(rank.digests)] for rank in ranks], sort_keys=True)
    name = f"{SERVED_WEIGHTS} ({engine:.40}, {len(ranks)} rank{'s' if len(ranks) > 1 else ''})"
    return {name: hashlib.sha256(content.encode()).hexdigest()}
