"""litellm, a tool loop by `completion`: `anthropic`, `responses`, `stream`."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look-up of prices in the net

import common
import litellm


def main() -> None:
    words, messages = sys.argv[1:], list(common.task()["messages"])
    if "anthropic" in words:
        where = {"model": "anthropic/policy", "api_base": common.anthropic_base(), "api_key": common.anthropic_key()}
    else:
        kind = "openai/responses/policy" if "responses" in words else "openai/policy"
        where = {"model": kind, "api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    for _ in range(12):
        request: dict[str, Any] = dict(
            messages=messages, tools=[common.CHAT_TOOL], max_tokens=256, num_retries=0, **where
        )
        if "stream" in words:
            response = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **request)), messages=messages)
        else:
            response = litellm.completion(**request)
        message = response.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        messages += common.tool_results(message.tool_calls or [])
        if not message.tool_calls:
            break
    common.note(last=message.content)
    common.reward(1)


if __name__ == "__main__":
    main()
