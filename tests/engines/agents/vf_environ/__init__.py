"""A harness whose program fails with the names of its environment variables."""

from __future__ import annotations

import sys
from typing import Any

import verifiers.v1 as vf

__all__ = ["EnvironHarness"]


class EnvironHarness(vf.Harness[vf.HarnessConfig]):
    """Runs one line of Python."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None) -> Any:  # type: ignore[no-untyped-def]
        """Run it."""
        code = "import os, sys; sys.exit(' '.join(sorted(os.environ)))"
        return await runtime.run([sys.executable, "-c", code], {"OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": secret})
