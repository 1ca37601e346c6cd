"""openai: three responses, each with a reward by its id, then the reward of the episode."""

from __future__ import annotations

import common
from openai import APIError, OpenAI


def main() -> None:
    client, messages, rewarded = OpenAI(max_retries=0), list(common.task()["messages"]), []
    for turn in range(3):
        response = client.chat.completions.create(model="policy", messages=messages, max_tokens=256)
        messages += [
            {"role": "assistant", "content": response.choices[0].message.content},
            {"role": "user", "content": "Go on."},
        ]
        try:
            client.post("/reward", body={"reward": 0.1 * turn, "id": response.id}, cast_to=object)
            rewarded.append(response.id)
        except APIError as error:
            common.note(error=str(error)[:300])
    common.note(rewarded=len(rewarded))
    common.reward(1)


if __name__ == "__main__":
    main()
