"""A server of OpenEnv with a guessing game: python openenv_game.py PORT_FILE."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """A guess."""

    number: int


class Hint(Observation):
    """The answer to a guess."""

    hint: str = ""


class Game(Environment):
    """Ends with the right guess and the reward 1; each other guess costs 0.25."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._target = 0
        self._state = State(episode_id="game", step_count=0)

    def reset(self, seed: Any = None, episode_id: Any = None, target: int = 0, **_: Any) -> Hint:
        """Begin a game."""
        self._target = target
        return Hint(hint="guess", done=False, reward=0.0)

    def step(self, action: Guess, timeout_s: Any = None, **_: Any) -> Hint:
        """Answer a guess."""
        if action.number == self._target:
            return Hint(hint="right", done=True, reward=1.0)
        return Hint(hint="higher" if action.number < self._target else "lower", done=False, reward=-0.25)

    @property
    def state(self) -> State:
        """State that OpenEnv shows."""
        return self._state


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    file = Path(sys.argv[1])
    file.with_suffix(".new").write_text(str(listener.getsockname()[1]))
    file.with_suffix(".new").rename(file)
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=8)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
