"""Monitor a run of the stack from outside, by the logs and states of its containers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from tests.stack.container_engine import ContainerEngine, StackError

POLL_SECONDS = 0.5
ONE_SHOTS = ("topics", "model")


class RunMonitor:
    """The progress of a run; `update` reads new log lines."""

    def __init__(self, engine: ContainerEngine) -> None:
        self._engine = engine
        self._seen_to = "0"
        self.rewards: dict[int, float] = {}
        self.first_step_at = 0.0

    @property
    def num_steps(self) -> int:
        """Number of committed train steps."""
        return max(self.rewards, default=-1) + 1

    @property
    def has_ended(self) -> bool:
        """Whether the controller has ended the run: only then it exits with code 0.

        Raises:
            StackError: A service that must finish before the workers start has failed; the
                text ends with its log.
        """
        for service in ONE_SHOTS:
            for container in self._engine.containers(service):
                state = self._engine.state(container)
                if state["Status"] == "exited" and state["ExitCode"]:
                    raise StackError(
                        f"{service} ended with exit code "
                        f"{state['ExitCode']}:\n{self._engine.logs(container, '--tail', '20')}"
                    )
        states = [
            self._engine.state(container) for container in self._engine.containers("controller")
        ]
        return any(state["Status"] == "exited" and state["ExitCode"] == 0 for state in states)

    def update(self) -> None:
        """Read the train steps that the trainer has logged since the last update."""
        for container in self._engine.containers("trainer"):
            for line in self._engine.logs(
                container, "--timestamps", "--since", self._seen_to
            ).splitlines():
                reported, _, text = line.partition(" ")
                self._seen_to = max(self._seen_to, reported)
                event = json.loads(text) if text.startswith("{") else {}
                if event.get("event") == "train_step.committed":
                    self.first_step_at = self.first_step_at or time.monotonic()
                    self.rewards[event["train_step"]] = event["reward_mean"]

    def wait_until(self, condition: Callable[[], bool], *, seconds: float, what: str) -> float:
        """Update until the condition holds, and return the seconds that it took.

        Raises:
            StackError: It did not hold in time.
        """
        started = time.monotonic()
        while True:
            self.update()
            if condition():
                return time.monotonic() - started
            if time.monotonic() - started > seconds:
                raise StackError(
                    f"{what}: not within {seconds:g} s; {self.num_steps} train steps are committed"
                )
            time.sleep(POLL_SECONDS)
