"""openai, Responses, a tool loop with its whole history: `stream`, `chained` (`previous_response_id`)."""

from __future__ import annotations

import sys
from typing import Any

import common
from openai import OpenAI


def main() -> None:
    stream, chained = "stream" in sys.argv[1:], "chained" in sys.argv[1:]
    client, items = OpenAI(max_retries=0), list(common.task()["messages"])
    before: str | None = None
    options: dict[str, Any] = {} if chained else {"store": False}
    for _ in range(4):
        request: dict[str, Any] = dict(
            model="policy",
            instructions="Use the tool.",
            input=items,
            tools=[common.RESPONSES_TOOL],
            max_output_tokens=256,
        )
        if before:
            request["previous_response_id"] = before
        if stream:
            with client.responses.stream(**request, **options) as events:
                for _ in events:
                    pass
                response = events.get_final_response()
        else:
            response = client.responses.create(**request, **options)
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": common.add(item.arguments)}
            for item in response.output
            if item.type == "function_call"
        ]
        if chained:
            before, items = response.id, results
        else:
            items = [
                *items,
                *(item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output),
                *results,
            ]
        if not results:
            break
    assert response.usage and response.usage.output_tokens > 0
    common.note(last=response.output_text, status=response.status)
    common.reward(1)


if __name__ == "__main__":
    main()
