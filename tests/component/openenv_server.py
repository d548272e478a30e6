"""An environment on a real server of OpenEnv: `python openenv_server.py PORT`, in the environment of
`make openenv`.
"""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import (
    Action,
    Environment,
    Observation,
    State,
    create_fastapi_app,
)


class Say(Action):
    """What the policy says."""

    message: str


class Heard(Observation):
    """What it hears."""

    text: str = ""


class Counting(Environment):
    """Repeats what is said, with a count."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.count, self.seed = 0, None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Heard:
        """Begin to count."""
        self.count, self.seed = 0, seed
        return Heard(text=f"seed {seed}, {episode_id}, {more.get('level')}")

    def step(self, action: Say, **more: Any) -> Heard:
        """Repeat, and end at the second."""
        if action.message == "crash":
            raise RuntimeError("it broke")
        self.count += 1
        done = self.count == 2
        return Heard(text=f"{action.message} {self.count}", reward=self.count / 2, done=done)

    @property
    def state(self) -> State:
        """The count."""
        return State(step_count=self.count)


if __name__ == "__main__":
    app = create_fastapi_app(Counting, Say, Heard, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
