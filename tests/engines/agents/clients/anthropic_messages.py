"""anthropic, Messages, a tool loop: `stream`, `bearer` (the key as a bearer token)."""

from __future__ import annotations

import sys
from typing import Any

import common
from anthropic import Anthropic


def main() -> None:
    stream, bearer = "stream" in sys.argv[1:], "bearer" in sys.argv[1:]
    key: dict[str, Any] = {"auth_token": common.anthropic_key()} if bearer else {"api_key": common.anthropic_key()}
    client = Anthropic(base_url=common.anthropic_base(), max_retries=0, **key)
    messages: list[Any] = [{"role": m["role"], "content": m["content"]} for m in common.task()["messages"]]
    for _ in range(4):
        request: dict[str, Any] = dict(
            model="policy",
            max_tokens=256,
            system=[{"type": "text", "text": "Use the tool.", "cache_control": {"type": "ephemeral"}}],
            messages=messages,
            tools=[common.ANTHROPIC_TOOL],
        )
        if stream:
            with client.messages.stream(**request) as events:
                for _ in events.text_stream:
                    pass
                response = events.get_final_message()
        else:
            response = client.messages.create(**request)
        messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in response.content]}
        )
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": common.add(block.input)}
            for block in response.content
            if block.type == "tool_use"
        ]
        if not results:
            break
        assert response.stop_reason == "tool_use", response.stop_reason
        messages.append({"role": "user", "content": results})
    assert response.stop_reason == "end_turn" and response.usage.output_tokens > 0, response
    counted = client.messages.count_tokens(model="policy", messages=messages[:1], tools=[common.ANTHROPIC_TOOL])
    assert counted.input_tokens > 0
    text = "".join(block.text for block in response.content if block.type == "text")
    common.note(last=text)
    common.reward(1)


if __name__ == "__main__":
    main()
