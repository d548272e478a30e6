"""Stateful environments of tests, in the forms of other projects. Child processes load this file,
so it imports nothing of the tests.
"""

import asyncio
import fcntl
import json
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image


def image_of(width: int, height: int, *, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3)).astype(np.uint8)
    return Image.fromarray(pixels)


class BaseInteractionEnv:
    """The contract of Relax's environments."""

    def reset(self) -> Any:
        raise NotImplementedError

    def step(self, response_text: str) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        return

    def format_observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        images = (observation.get("multi_modal_data") or {}).get("image", [])
        parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
        return {
            "role": observation.get("role", "user"),
            "content": [*parts, {"type": "text", "text": observation.get("obs_str", "")}],
        }


class Counting(BaseInteractionEnv):
    """Shows an image after each turn, and counts the turns in its own state."""

    def __init__(self, sample: SimpleNamespace, args: Any) -> None:
        self.sample, self.end = sample, args.num_turns
        self.count = -1

    def reset(self) -> Any:
        self.count = 0
        return {}, {}

    def step(self, response_text: str) -> Any:
        self.count += 1
        observation = {
            "obs_str": f"{self.count} of {self.sample.label}, {len(response_text)}",
            "role": "user",
            "multi_modal_data": {"image": [image_of(48, 32, seed=self.count)]},
        }
        return observation, self.count == self.end, {"reward": 0.25 * self.count}


def build_env(sample: SimpleNamespace, args: Any) -> Counting:
    return Counting(sample, args)


class AsyncCounting(Counting):
    """The same, asynchronous; the first turns of three sessions wait for one another."""

    arrived = 0
    have_met: asyncio.Event | None = None

    async def step(self, response_text: str) -> Any:
        kind = type(self)
        kind.have_met = kind.have_met or asyncio.Event()
        kind.arrived += 1
        if kind.arrived >= 3:
            kind.have_met.set()
        await kind.have_met.wait()
        return Counting.step(self, response_text)


class Guess:
    """Guess a number, in the form of Gymnasium."""

    def __init__(self, low: int = 0) -> None:
        self.low = low

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.number, self.tries = (seed or 0) % 10 + self.low, 0
        return f"guess, seed {seed}", {}

    def step(self, action: str) -> Any:
        self.tries += 1
        image = np.full((32, 48, 3), 20 * self.tries, np.uint8)
        observation = {"text": f"no, {self.tries}", "image": image}
        return observation, self.tries / 2, self.tries == 2, False, {}


class Recital:
    """Shows the prompt that it was given, in the form of skyrl-gym."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        pass

    def init(self, prompt: Any) -> Any:
        return [{"role": "user", "content": json.dumps(prompt)}], {}

    def close(self) -> None:
        return


class Lines:
    """Asks for lines, in the form of skyrl-gym."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        self.extras, self.turns = extras or {}, 0

    def init(self, prompt: Any) -> Any:
        return [*prompt, {"role": "user", "content": "in lines"}], {}

    def step(self, action: str) -> Any:
        self.turns += 1
        is_over = self.turns == self.extras["max_turns"]
        said = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
        return {
            "observations": [] if is_over else said,
            "reward": float(self.extras["reward_spec"]["ground_truth"] == "red"),
            "done": is_over,
            "metadata": {},
        }

    def close(self) -> None:
        return


def close_requests() -> None:
    """Close what this process gets requests from, a pipe or a socket by the version of Python."""
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):
            mode = os.fstat(descriptor).st_mode
            reads = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if stat.S_ISSOCK(mode) or (stat.S_ISFIFO(mode) and reads):
                os.close(descriptor)


class Failing(Guess):
    """Does what its option names, the first times that any process asks it to."""

    def __init__(self, folder: str, how: str, times: int = 1) -> None:
        super().__init__()
        self.folder, self.how, self.times = Path(folder), how, times

    def _is_due(self) -> bool:
        made = len(list(self.folder.glob("failed-*")))
        if made >= self.times:
            return False
        (self.folder / f"failed-{time.time_ns()}").touch()
        return True

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.how == "hangs at first" and self._is_due():
            time.sleep(60)
        return super().reset(seed=seed)

    def step(self, action: str) -> Any:
        if self.how != "hangs at first" and self._is_due():
            if self.how == "raises":
                raise ConnectionError("the simulator is gone")
            if self.how == "dies slowly":
                close_requests()
                time.sleep(0.5)
            if self.how.startswith("dies"):
                os._exit(9)
            time.sleep(60)
        observation, *rest = super().step(action)
        return observation["text"], *rest

    def close(self) -> None:
        (self.folder / f"closed-{time.time_ns()}").touch()


class Misbehaving(Guess):
    """Ends at its third turn, and does in its second one what an option of the row names."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.how = (options or {}).get("how", "")
        return super().reset(seed=seed)

    def step(self, action: str) -> Any:
        self.tries += 1
        if self.tries == 2 and self.how:
            self.misbehave()
        text = "x" * self.num_characters if self.tries == 2 else f"no, {self.tries}"
        return text, self.tries / 2, self.tries == 3, False, {}

    @property
    def num_characters(self) -> int:
        return 8 * 1024**2 if self.how == "floods" else 10

    def misbehave(self) -> None:
        if self.how == "hangs":
            time.sleep(600)
        if self.how == "dies":
            os._exit(9)
        if self.how == "raises":
            raise ConnectionError("the simulator is gone")
        if self.how == "slows":
            time.sleep(0.5)


class AsyncMisbehaving(Misbehaving):
    """The same, asynchronous: it also waits instead of blocking its process."""

    async def step(self, action: str) -> Any:
        if self.tries == 1 and self.how == "waits":
            await asyncio.sleep(600)
        if self.tries == 1 and self.how == "gathers":
            await asyncio.gather(self.block())
        await asyncio.sleep(0)
        return super().step(action)

    async def block(self) -> None:
        time.sleep(600)
