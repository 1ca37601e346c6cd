"""openai, Chat Completions, a tool loop: `stream`."""

from __future__ import annotations

import sys
from typing import Any

import common
from openai import OpenAI


def ask(client: OpenAI, messages: list[Any], stream: bool) -> Any:
    request: dict[str, Any] = dict(model="policy", messages=messages, tools=[common.CHAT_TOOL], max_tokens=256)
    if not stream:
        return client.chat.completions.create(**request).choices[0]
    with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as events:
        for _ in events:
            pass
        return events.get_final_completion().choices[0]


def main() -> None:
    stream = "stream" in sys.argv[1:]
    client, messages = OpenAI(max_retries=0), list(common.task()["messages"])
    for turn in range(4):
        choice = ask(client, messages, stream)
        message = choice.message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        messages += common.tool_results(message.tool_calls or [])
        if not message.tool_calls:
            if turn > 1:
                break
            messages.append({"role": "user", "content": "Sure?"})
    common.note(turns=turn + 1, last=message.content)
    common.reward(1)


if __name__ == "__main__":
    main()
