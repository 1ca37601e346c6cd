"""The part of a server's client that SGLang and vLLM have in common."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_dppo_engines.errors import ServerError
from megatron_dppo_engines.servers.fields import read_tokenize_response, require_success
from megatron_dppo_engines.servers.http import Deadlines, HttpClient
from megatron_dppo_engines.servers.updates import ADAPTER, ServerUpdates

_ADMIN_CONNECTIONS = 8


class ServerClient(ServerUpdates):
    """HTTP connections to one server, and the calls that both engines have."""

    _keeps_admin_alive = True
    """True if connections for control calls are used again."""
    _liveness_path: str
    """Path of a GET that is cheap for the server."""
    _no_tokenizer_statuses: tuple[int, ...]
    """HTTP statuses of ``/tokenize`` on a server without a tokenizer, or without this call."""
    _missing_call_fix = ""
    """Advice for a server on which a control call is missing."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        deadlines: Deadlines | None = None,
        adapter: bool = False,
    ) -> None:
        self._adapter = ADAPTER if adapter else None
        self._deadlines = deadlines or Deadlines()
        connect_timeout = self._deadlines.connect
        self._http = HttpClient(url, api_key=api_key, connect_timeout=connect_timeout)
        # Control calls have separate connections: they must not wait behind hundreds of responses.
        self._admin = HttpClient(
            url,
            api_key=admin_api_key or api_key,
            connections=_ADMIN_CONNECTIONS,
            connect_timeout=connect_timeout,
            keep_alive=self._keeps_admin_alive,
        )
        self.url = self._http.url

    async def health(self) -> bool:
        """Return True if the server responds and, unless this client paused it, can generate."""
        try:
            await self._admin.get(self._health_path(), timeout=self._deadlines.health)
        except ServerError:
            return False
        return True

    def _health_path(self) -> str:
        return "/health"

    async def alive(self) -> bool:
        """Return True if the HTTP process responds, however busy the engine is."""
        try:
            await self._admin.check(self._liveness_path, self._deadlines)
        except ServerError:
            return False
        return True

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        """Return the server's tokens of a text; None if it has no tokenizer, or lacks this call."""
        body = {"prompt": text, "add_special_tokens": False}
        try:
            response = await self._http.post("/tokenize", body, timeout=self._deadlines.control, repeat=True)
        except ServerError as error:
            if error.status in self._no_tokenizer_statuses:
                return None
            raise
        return read_tokenize_response(response, self.url + "/tokenize")

    @contextmanager
    def _missing_call_explained(self) -> Iterator[None]:
        try:
            yield
        except ServerError as error:
            if error.status != 404 or not self._missing_call_fix:
                raise
            raise ServerError(error.url, f"{error.detail}: {self._missing_call_fix}", error.status) from error

    async def _post(self, path: str, body: Mapping[str, object], timeout: float, repeat: bool) -> Mapping[str, Any]:
        with self._missing_call_explained():
            response = await self._admin.post(path, body, timeout=timeout, repeat=repeat)
        return require_success(response, self.url + path)

    async def _control(self, path: str, body: Mapping[str, object], *, repeat: bool = False) -> Mapping[str, Any]:
        return await self._post(path, body, self._deadlines.control, repeat)

    async def _update(self, path: str, body: Mapping[str, object]) -> None:
        await self._post(path, body, self._deadlines.update, False)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()
        await self._admin.close()


def bucket_to_json(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> dict[str, list[str] | list[list[int]]]:
    """Return the fields that describe the tensors of a flattened bucket; both engines use the same ones."""
    return {"names": list(names), "dtypes": list(dtypes), "shapes": [list(shape) for shape in shapes]}
