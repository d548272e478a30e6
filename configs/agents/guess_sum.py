"""A taskset of verifiers: add two numbers, with a second guess after "higher" or "lower".

An ordinary environment of the library, which knows nothing of the training: data, a harness that
makes one call for each turn, an env that answers the guesses, and two weighted rewards.
"""

import random
from functools import cached_property

import httpx
import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["GuessEnv", "GuessHarness", "GuessTaskset"]

MAX_NUMBER = 2
SUMS = range(2 * MAX_NUMBER + 1)
MAX_GUESSES = 2
HIGHER, LOWER = "higher", "lower"


def hint(guess: str, total: int) -> str | None:
    """Return the answer to a guess; None if the game is over."""
    if guess not in map(str, SUMS) or int(guess) == total:
        return None
    return HIGHER if int(guess) < total else LOWER


class GuessData(vf.TaskData):
    """One sum, and a game by a player who guesses at random, for a warm-up."""

    total: int
    turns: list[str]
    replies: list[dict[str, str]]


class GuessTask(vf.Task[GuessData]):
    """Find one sum."""

    @vf.reward(weight=0.9)
    async def found(self, trace: vf.Trace) -> float:
        """Return 1 if the last guess is the sum."""
        said = trace.assistant_messages
        return float(bool(said) and (said[-1].content or "").strip() == str(self.data.total))

    @vf.reward(weight=0.1)
    async def well_formed(self, trace: vf.Trace) -> float:
        """Return the share of the turns that are a possible sum."""
        said = [(one.content or "").strip() for one in trace.assistant_messages]
        return sum(one in map(str, SUMS) for one in said) / max(1, len(said))


class GuessConfig(vf.TasksetConfig):
    """How many games there are."""

    num_tasks: int = 180
    seed: int = 0


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    """The games."""

    def load(self):
        """Yield the games; the same ones for a seed."""
        generator = random.Random(self.config.seed)  # noqa: S311
        for _ in range(self.config.num_tasks):
            numbers = [generator.randint(0, MAX_NUMBER) for _ in range(2)]
            total, turns, replies = sum(numbers), [], []
            while len(turns) < MAX_GUESSES and (not turns or int(turns[-1]) != total):
                turns.append(str(generator.choice(SUMS)))
                if (text := hint(turns[-1], total)) and len(turns) < MAX_GUESSES:
                    replies.append({"role": "user", "content": text})
            prompt = "+".join(map(str, numbers))
            data = GuessData(prompt=prompt, total=total, turns=turns, replies=replies)
            yield GuessTask(data, self.config.task)


class GuessHarness(vf.Harness[vf.HarnessConfig]):
    """One call of the model for each turn, in this process: nothing is installed or started."""

    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    @cached_property
    def _client(self) -> openai.AsyncOpenAI:
        # The endpoint of each episode is a server of its own, and a later one may get the port of
        # an earlier one: a connection that was kept would reach that one, which never answers.
        limits = httpx.Limits(max_keepalive_connections=0)
        client = httpx.AsyncClient(limits=limits, timeout=openai.DEFAULT_TIMEOUT)
        return openai.AsyncOpenAI(api_key="of-each-call", max_retries=5, http_client=client)

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Ask the model once."""
        prompt = data.prompt
        messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
        await self._client.with_options(base_url=endpoint, api_key=secret).chat.completions.create(
            model=ctx.model, messages=[message_to_wire(one) for one in messages]
        )
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class GuessEnvConfig(vf.EnvConfig):
    """The one player."""

    player: vf.AgentConfig = vf.AgentConfig(max_turns=MAX_GUESSES, runtime=vf.SubprocessConfig())


class GuessEnv(vf.Env[GuessEnvConfig]):
    """Answers the player's guesses."""

    async def run(self, task, agents):
        """Play one game."""
        async with agents.player.interaction(task) as game:
            segment = await game.turn()
            while not segment.terminated:
                text = hint(segment.last_reply, task.data.total)
                if text is None or game.trace.num_turns == MAX_GUESSES:
                    break
                segment = await game.turn(text)
