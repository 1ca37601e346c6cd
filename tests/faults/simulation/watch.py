"""Judge of the calls between one life of the trainer and its servers: names, seeds, proofs and probes.

It sees what is sent and what comes back, and shares no code with the package: whatever a change to the package makes
of a verdict, the numbers on the wire stay what they are.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.faults.simulation import model
from tests.faults.simulation.faults import Plan
from tests.faults.simulation.invariants import check_pool

_USES = ("/generate", "/begin_weight_update", "/update_weights_from_tensor", "/update_weights_from_disk")
_USES += ("/init_weights_update_group", "/update_weights_from_distributed")
"""Calls that a server gets which the run uses."""
PROMPT_TOKENS = 5
"""Tokens of each prompt of the stream; the requests of a probe have other prompts."""
_EXACT = 1e-3
"""Nats up to which two log-probabilities of one distribution count as equal."""


@dataclass
class _Server:
    """One server as this life of the trainer knows it."""

    proof: str = ""
    """``sent``: weights of this publish have arrived; ``read``: and its checksums were read afterwards."""
    has_old_caches: bool = False
    """Weights have arrived since its caches were dropped."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    probe: str = ""
    """Name of the last probe of this publish that it answered."""
    probe_errors: list[str] = field(default_factory=list)
    """Differences between the answers to that probe and the trainer's weights."""
    is_final: bool = False
    """An answer to it was wrong in the last attempt of the publish, under the names of its request and version."""


class Watch:
    """Calls of one life of the trainer.

    Args:
        plan: of the run.
        trainer: whose weights the servers should have.
        names: of all requests of the run so far; no two are alike, whichever life sent them.
        violations: gets what is wrong.
        now: virtual time.
    """

    def __init__(
        self, plan: Plan, trainer: Any, names: set[str], violations: list[str], now: Callable[[], float]
    ) -> None:
        self._now = now
        self._plan, self._trainer, self._names, self._violations = plan, trainer, names, violations
        self._servers: dict[str, _Server] = {}
        self._seeds: dict[int, dict[str, tuple[int, ...]]] = {}
        """Prompt of each request by seed and name."""
        self._clashes = 0
        self._excluded: dict[str, str] = {}
        """Mismatches of servers that must not be used again in this life of the trainer, by host."""
        self._reported: set[str] = set()
        self.pool: Any = None
        """Pool of the trainer's engine."""
        self.is_last_attempt = False
        self._num_published = 0

    def sent(self, host: str, path: str, body: Any) -> None:
        """Look at a call when the trainer makes it."""
        if host in self._excluded and path in _USES:
            self._report_once(f"server {host} gets {path} after the probe saw: {self._excluded[host]}")
        if self.pool is not None:
            for text in check_pool(self.pool, self._now()):
                self._report_once(text)
        if path == "/continue_generation" and self._server(host).proof != "read":
            self._report(f"server {host} is to generate before the checksums of its weights were read")

    def arrived(self, host: str, path: str, body: Any) -> None:
        """Look at a request when it is at the server's machine."""
        if path != "/generate":
            return
        name = body["rid"]
        # One probe asks several servers under one name; any other request may go to another server after this one.
        unique_name = f"{host}/{name}" if _is_probe(name) else name
        if unique_name in self._names:
            self._report(f"two requests are called {name}")
        self._names.add(unique_name)
        if not _is_probe(name):
            for text in self._check_request(body):
                self._report(f"request {name}: {text}")
            self._check_seed(_base_name(name), body)

    def answered(self, host: str, path: str, body: Any, status: int, content: bytes) -> None:
        """Look at an answer when the trainer has it."""
        if status != 200:
            return
        server = self._server(host)
        if path.startswith("/update_weights_from_"):
            server.proof = "sent"
            server.has_old_caches = True
        elif path == "/flush_cache":
            server.has_old_caches = False
        elif path == "/weights_checker" and server.proof:
            server.proof, server.checksums = "read", _checksums(content)
        elif path == "/generate" and _is_probe(body["rid"]):
            name = body["rid"].rpartition("-")[0]
            if server.probe != name:
                server.probe, server.probe_errors = name, []
                server.is_final = False
            errors = list(check_answer(content, body, self._trainer.digest, self._plan.topk))
            server.probe_errors += errors
            if errors and self.is_last_attempt and _has_names(content, name, self._trainer.policy_version):
                server.is_final = True

    def begin_publish(self) -> None:
        """Start a publish: nothing of an earlier one counts."""
        self._servers = {}

    def end_publish(self, hosts: Collection[str]) -> None:
        """Check the servers that get requests after a publish.

        Args:
            hosts: these servers, ``host:port``.
        """
        every = self._plan.probe_every
        is_due = not self._num_published or bool(every and self._num_published % every == 0)
        self._num_published += 1
        right = {n: hashlib.sha256(data).hexdigest()[:32] for n, data in self._trainer.weights.items()}
        for host in hosts:
            server = self._server(host)
            if server.proof != "read":
                self._report(f"server {host} is used, and the checksums of its weights were not read after the sync")
            elif server.checksums != right:
                self._report(f"server {host} is used, and its checksums are not those of the trainer's weights")
            if server.has_old_caches:
                self._report(f"server {host} is used, and has the caches of its old weights")
            if is_due and not server.probe:
                self._report(f"server {host} is used, and the probe that was due did not run")
            elif is_due and server.probe_errors:
                self._report(f"server {host} is used, and the probe saw: {server.probe_errors[0]}")

        for host, server in self._servers.items():
            if host not in hosts and server.is_final:
                self._excluded.setdefault(host, server.probe_errors[0])

    def _server(self, host: str) -> _Server:
        return self._servers.setdefault(host, _Server())

    def _report_once(self, text: str) -> None:
        if text.partition(" for ")[0] not in self._reported:
            self._reported.add(text.partition(" for ")[0])
            self._report(text)

    def _report(self, text: str) -> None:
        self._violations.append(text)

    def _check_request(self, body: Any) -> Iterator[str]:
        """Check that a request asks for what the run's settings say."""
        tokens, params = body["input_ids"], body["sampling_params"]
        left = self._plan.new_tokens - (len(tokens) - PROMPT_TOKENS)
        expected = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": left}
        for key, value in expected.items():
            if params.get(key, value) != value:
                yield f"{key} {params[key]}, expected {value}"
        if model.END not in params["stop_token_ids"]:
            yield "without the end token"
        if model.END in tokens[PROMPT_TOKENS:]:
            yield "of a response that has ended"
        start = body.get("routed_experts_start_len", 0)
        if self._plan.routing and (not body.get("return_routed_experts") or start >= len(tokens)):
            yield f"routes from {start} of {len(tokens)}"

    def _check_seed(self, name: str, body: Any) -> None:
        """Check that no two requests have one seed, except for attempts of one request."""
        prompt = tuple(body["input_ids"][:PROMPT_TOKENS])
        others = self._seeds.setdefault(body["sampling_params"]["sampling_seed"], {})
        if name not in others:
            if prompt in others.values():
                self._report(f"siblings have one seed: {name} and {sorted(others)}")
            # Two of 2^31 seeds may be equal by accident, which happens once in a million runs.
            self._clashes += bool(others)
            if self._clashes == 2:
                self._report(f"requests have one seed: {name} and {sorted(others)}")
        others[name] = prompt


def _is_probe(name: str) -> bool:
    return ":probe-" in name


def _has_names(content: bytes, name: str, version: int) -> bool:
    """Return True if an answer says that it is to this request, by the current version and no other one."""
    try:
        meta = json.loads(content)["meta_info"]
        versions = {span["version"] for span in meta["weight_versions"]} | {meta["weight_version"]}
        return bool(versions == {str(version)} and meta["id"].rpartition("-")[0] == name)
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


def _base_name(name: str) -> str:
    """Return the name of a request without the number of its attempt."""
    return name.partition(":")[2].partition("~")[0]


def _checksums(content: bytes) -> Mapping[str, str]:
    try:
        checksums: Mapping[str, str] = json.loads(content)["ranks"][0]["checksums"]
    except (ValueError, LookupError, TypeError):
        return {}
    return checksums


def check_answer(content: bytes, body: Any, digest: int, topk: int) -> Iterator[str]:
    """Compare the numbers of an answer with those of weights.

    Args:
        content: JSON of SGLang's ``/generate``.
        body: of the request.
        digest: of the weights.
        topk: entries of the Top-K that the run trains on; with 0 the answer has a witness that nothing trains on.
    """
    try:
        answer = json.loads(content)
        meta, tokens = answer["meta_info"], answer["output_ids"]
        logprobs = [np.nan if entry[0] is None else entry[0] for entry in meta["output_token_logprobs"]]
        if not tokens or any(not 0 <= token < model.VOCABULARY for token in tokens):
            raise ValueError(f"token ids {tokens}")
        rows = np.array(model.rows_of([*body["input_ids"], *tokens], digest)[:-1])
        part = rows[len(body["input_ids"]) - 1 :]
        right = model.LOGPROBS[part, tokens]
    except (ValueError, LookupError, TypeError) as error:
        yield f"no answer: {error!r}"
        return
    if len(logprobs) != len(tokens) or not np.abs(right - logprobs).max(initial=0) <= _EXACT:
        yield f"log-probs {logprobs}, those of the weights are {right.tolist()}"
    if topk:
        ids, values = _topk(meta)
        in_range = ids.shape[0] == len(part) and ids.min() >= 0 and ids.max() < model.VOCABULARY
        if not in_range or not np.abs(model.LOGPROBS[part[:, None], ids] - values).max() <= _EXACT:
            yield "Top-K of other weights or another prefix"
    if body.get("return_routed_experts"):
        start = body["routed_experts_start_len"]
        routes = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
        if not np.array_equal(routes, model.ROUTES[rows[start:]].ravel()):
            yield "routes of other weights, another prefix or another position"


def _topk(meta: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    name = "output_top_logprobs"
    if name in meta:
        entries = np.array([[entry[:2] for entry in row] for row in meta[name]], dtype=np.float64)
        return entries[..., 1].astype(np.int64), entries[..., 0]
    shape = meta[f"{name}_shape"]
    ids = np.frombuffer(base64.b64decode(meta[f"{name}_idx_flat_b64"]), "<i4")
    values = np.frombuffer(base64.b64decode(meta[f"{name}_val_flat_b64"]), "<f4")
    return ids.reshape(shape).astype(np.int64), values.reshape(shape).astype(np.float64)
