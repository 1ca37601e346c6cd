"""Errors whose message is meant for the user: what was wrong, what was expected, what to change."""


class UserError(Exception):
    """An error that the user can fix: a configuration, a file, an environment. Exit code 2."""

    exit_code = 2
    on_every_rank = True
    """True if every rank raises the same error, so that only rank 0 reports it."""


class ConfigError(UserError):
    """A configuration value, or a combination of values, that cannot work."""


class CheckpointError(UserError):
    """A checkpoint or a Hugging Face folder that cannot be used by this run."""


class ServerError(UserError):
    """A request to an inference server that failed: unreachable, too slow, refused, or an unusable response.

    Args:
        url: Address that was called. Never contains an API key.
        detail: What went wrong, including the server's message.
        status: HTTP status. None without a response.
        retry_after: Seconds to wait before a retry, as the server requests. None if it does not say.
    """

    on_every_rank = False

    def __init__(self, url: str, detail: str, status: int | None = None, *, retry_after: float | None = None) -> None:
        super().__init__(f"{url}: {detail}" if status is None else f"{url}: HTTP {status}: {detail}")
        self.url = url
        self.detail = detail
        self.status = status
        self.retry_after = retry_after

    @property
    def is_transient(self) -> bool:
        """True if the same request may succeed later: the server is busy, failed internally, or sent no JSON."""
        return self.status is not None and (self.status in (200, 408, 425, 429) or self.status >= 500)


class ContractViolation(ServerError):
    """A response of an inference server that violates the contract of its API.

    Args:
        url: As for ``ServerError``.
        request_id: Identifier of the request.
        field: Part of the response that is wrong.
        detail: Its value and what was expected.
    """

    def __init__(self, url: str, request_id: str, field: str, detail: str) -> None:
        super().__init__(url, f"the response to request {request_id} violates the contract: {field} {detail}")
        self.request_id = request_id
        self.field = field


class ResponseLost(ServerError):
    """A response that was lost because a process of the trainer ended. The server is not at fault."""

    @property
    def is_transient(self) -> bool:
        """True: the request can be sent again."""
        return True


class NoUsableServer(ServerError):
    """No usable inference server. Resume the run to reload its weights. Exit code 5."""

    exit_code = 5
