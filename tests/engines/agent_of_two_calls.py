"""An agent for a run on a real server: two calls, each continued by text of its own. Plain functions, no client."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def run(task: Any) -> float:
    """Return a reward that differs between siblings."""
    text = task.prompt
    for given in (" and then", ""):
        request = urllib.request.Request(
            f"{task.base_url}/completions",
            json.dumps({"prompt": text, "max_tokens": 24}).encode(),
            {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.loads(response.read())["choices"][0]["text"]
        text += answer + given
    return float(sum(map(ord, answer)) % 7)
