"""Plays prompts of a run file without a run: in one process, without a broker.

The prompts are those of the run's first step, with the run's seeds. They are rendered, generated
and scored by what rollout and reward workers use; reward functions and environments run in the
same child processes. Nothing is written to the run's folder or its object store.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from relax_events.config import RunConfig
from relax_events.data.prompt_filter import build_filters
from relax_events.data.prompt_sampler import PromptSampler, SelectedRow
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import build_storing_reader
from relax_events.data.sources import open_stream
from relax_events.deadline import Deadline
from relax_events.engines.protocol import Engine
from relax_events.episodes.chat_engine import ChatEngine, ChatServer
from relax_events.errors import ConfigError, PoisonSample, RewardError
from relax_events.events.tensors import dense
from relax_events.events.types import PromptGroupIssued, SampleRolledOut, SampleScored
from relax_events.launcher.checked_run import CheckedRun
from relax_events.launcher.checks import Level
from relax_events.launcher.preparation import prepare_run
from relax_events.media.library import MediaLibrary
from relax_events.rewards.pool import RewardPool
from relax_events.rewards.scoring import build_reward_item, read_source, score_samples
from relax_events.roles.engine_factory import bound_engine_rows, open_rollout_engine
from relax_events.roles.inflight_group import (
    InflightGroup,
    build_generation_request,
    build_sample_event,
)
from relax_events.roles.prompt_records import build_prompt_group
from relax_events.staleness import BatchSlot, IssuedGroup
from relax_events.telemetry.metrics import WorkerMetrics

STEP_SECONDS = 0.25
WORKER_ID = "try"


@dataclass(frozen=True, slots=True)
class TriedSample:
    """A generated sample with its score.

    Attributes:
        sample: As the rollout role would write it.
        score: None where the judge role scores it.
        why: The reward function's explanation; empty if it gives none.
        prompt: The tokens before its completion as text, with special tokens.
        seconds: From its submission to its end.
    """

    sample: SampleRolledOut
    score: SampleScored | None
    why: str
    prompt: str
    seconds: float

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(segment.num_tokens for segment in self.sample.version_segments)


@dataclass(frozen=True, slots=True)
class TriedGroup:
    """A prompt with its samples.

    Attributes:
        issued: The prompt.
        samples: Those that ended and are usable; all of the prompt group unless it was ended early.
        failure: Why it has fewer samples than a run needs; empty if it has enough.
        cause: Of the failure: no engine got the prompt, its samples were lost, or the time limit or
            Ctrl-C stopped it.
    """

    issued: PromptGroupIssued
    samples: list[TriedSample] = field(default_factory=list)
    failure: str = ""
    cause: Literal["", "refused", "lost", "stopped"] = ""


class Workbench:
    """See the module's docstring. Open it by `open_workbench`; used by one thread."""

    def __init__(
        self,
        run: CheckedRun,
        engine: Engine,
        renderer: PromptRenderer,
        rewards: RewardPool,
        *,
        chat: ChatEngine | None = None,
    ) -> None:
        """Open the run's data.

        Args:
            run: The run file, with the number of samples for each prompt.
            engine: Generates the samples.
            renderer: Of the policy.
            rewards: Score the samples, but those of the judge role.
            chat: The engine of the turns, where a server has the model.
        """
        self._chat = chat
        self.config, _ = run.resolution
        config = self.config
        self._engine, self._renderer, self._rewards = engine, renderer, rewards
        self._library = MediaLibrary(config)
        self._read_messages = build_storing_reader(self._library)
        self._stream = open_stream(config.data, seed=config.run.seed)
        filters = build_filters(config.data, renderer=renderer, read_messages=self._read_messages)
        rows = config.data.filter_window_rows if config.data.prompt_filter else 1
        self._sampler = PromptSampler(self._stream, filters, block_rows=rows)
        self._running: dict[str, InflightGroup] = {}
        self._done: dict[str, TriedGroup] = {}
        self._submitted: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self.num_asked = 0
        """Prompts that `play` was asked for, and the data has."""

    @property
    def billed(self) -> tuple[int, int] | None:
        """Prompt and completion tokens that the server counted; None without one, or a count."""
        return self._chat.billed if self._chat is not None and any(self._chat.billed) else None

    def play(self, num_prompts: int, deadline: Deadline) -> Iterator[TriedGroup]:
        """Yield prompts in the order of the run, with their samples, as soon as these are generated
        and scored; the others are left for `end` at the deadline.
        """
        self.num_asked = min(num_prompts, self._stream.num_rows)
        waiting = deque(enumerate(self._sampler.next_rows(self.num_asked, train_step=0)))
        due = deque(_choose_slot(index, choice).prompt_group_id for index, choice in waiting)
        while due and not deadline.passed:
            while waiting and self._has_room():
                self._submit(*waiting.popleft())
            while due and due[0] in self._done:
                yield self._done.pop(due.popleft())
            if due:
                self._collect()

    def end(self) -> Iterator[TriedGroup]:
        """Abort what runs, and yield incomplete prompts with those of their samples that have
        ended.
        """
        self._engine.abort()
        self._collect(timeout_seconds=0.0)
        yield from self._done.values()
        for group in self._running.values():
            ended = self._finish(group)
            count = f"{len(group.samples)} of {group.issued.samples_per_prompt}"
            failure = f"{count} samples had ended when it was stopped"
            if lost := group.lost:
                failure += f"; {len(lost)} lost, first: {lost[0].error}"
            yield replace(
                ended, failure=failure, cause="lost" if lost and not ended.samples else "stopped"
            )
        self._done, self._running = {}, {}

    def _has_room(self) -> bool:
        running = self._engine.num_running
        most = self.config.engine.max_running_samples
        return not running or running + self.config.run.samples_per_prompt <= most

    def _submit(self, index: int, choice: SelectedRow) -> None:
        """Submit a prompt; one that can't be generated is done, with the reason."""
        config = self.config
        issued = build_prompt_group(
            config.run,
            _choose_slot(index, choice),
            choice,
            stream=self._stream,
            read_messages=self._read_messages,
        )
        try:
            tokens = self._renderer.row_tokens(issued.messages, tools=issued.tools)
            group = InflightGroup([], issued, tokens)
            self._engine.submit(
                build_generation_request(
                    group,
                    config=config,
                    policy_version=self._engine.policy_version,
                    stop_token_ids=self._renderer.stop_token_ids,
                    library=self._library,
                )
            )
        except (PoisonSample, ValueError) as error:
            refused = TriedGroup(issued, failure=f"the prompt is refused: {error}", cause="refused")
            self._done[issued.prompt_group_id] = refused
            return
        self._running[issued.prompt_group_id] = group
        self._submitted[issued.prompt_group_id] = time.monotonic()

    def _collect(self, *, timeout_seconds: float = STEP_SECONDS) -> None:
        """Take the samples that have ended, and score the prompts that are complete."""
        for sample in self._engine.poll(timeout_seconds=timeout_seconds):
            if (group := self._running.get(sample.prompt_group_id)) is None:
                continue
            group.samples.append(sample)
            self._ended[sample.sample_id] = time.monotonic()
            if group.is_complete:
                self._done[sample.prompt_group_id] = self._finish(group)
                del self._running[sample.prompt_group_id]

    def _finish(self, group: InflightGroup) -> TriedGroup:
        """Score the samples of a prompt group that have ended."""
        config, failure = self.config, self._find_failure(group)
        cause: Literal["", "lost"] = "lost" if failure else ""
        if len(group.lost) == len(group.samples):
            return TriedGroup(group.issued, failure=failure, cause=cause)
        samples = [
            build_sample_event(
                group,
                sample,
                owner=self._engine.policy_version,
                config=config,
                renderer=self._renderer,
                worker_id=WORKER_ID,
            )
            for sample in sorted(group.samples, key=lambda one: one.sample_id)
        ]
        scores = self._score(samples)
        started = self._submitted[group.issued.prompt_group_id]
        tried = [
            TriedSample(
                sample,
                scores.get(sample.sample_id),
                self._explain(sample, scores.get(sample.sample_id)),
                self._render_prompt(sample),
                self._ended[sample.sample_id] - started,
            )
            for sample in samples
        ]
        return TriedGroup(group.issued, tried, failure, cause)

    def _find_failure(self, group: InflightGroup) -> str:
        """Return why a run would not train a prompt group that lost samples; fewer samples than a
        run needs may be tried.
        """
        return group.find_failure(self.config.algorithm) if group.lost else ""

    def _render_prompt(self, sample: SampleRolledOut) -> str:
        tokens = dense(sample.tokens, what=f"sample {sample.sample_id}: tokens")
        prompt = tokens[: sample.num_prompt_tokens].astype(np.int32)
        return self._renderer.completion_text(prompt, skip_special_tokens=False)

    def _score(self, samples: Collection[SampleRolledOut]) -> dict[str, SampleScored]:
        config = self.config
        ours = [
            sample
            for sample in samples
            if read_source(sample, config.reward) not in config.judged_sources
        ]
        scores = score_samples(ours, self._rewards, config.reward) if ours else []
        return {score.sample_id: score for score in scores}

    def _explain(self, sample: SampleRolledOut, score: SampleScored | None) -> str:
        """Return what the function says about its reward, if it explains any."""
        if score is None or score.reward is None or not sample.finish_reason.is_scored:
            return ""
        try:
            one = self._rewards.explain(build_reward_item(sample))
        except RewardError as error:
            return str(error)
        if one is None:
            return ""
        read = "" if one.answer is None else f"read {one.answer!r}"
        return ": ".join(part for part in (read, one.location, one.why) if part)


def _choose_slot(index: int, choice: SelectedRow) -> IssuedGroup:
    """Return the place of a prompt in the run's first step."""
    return IssuedGroup(BatchSlot(0, index), 0, choice.row)


@contextmanager
def open_workbench(
    run: CheckedRun, *, samples_per_prompt: int = 0, server: ChatServer | None = None
) -> Iterator[Workbench]:
    """Open engine, environment and reward of a run file; everything is closed afterwards.

    Args:
        run: The run file as it was read.
        samples_per_prompt: Samples for each prompt; 0 takes the run's.
        server: Generates the turns instead of the run's engine.
    Raises:
        ConfigError: The run generates nothing, its judge gives all rewards, or something that the
            run file names is missing or invalid.
        EnvironmentProblem: A package is not installed, or a port is taken.
    """
    _refuse(run)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="relax-try-"))
        tried = _leave_the_run_alone(run, Path(folder), samples_per_prompt)
        if server is not None:
            tried = _need_text_alone(tried)
        prepare_run(tried.config, levels=(Level.FILE,))
        config, _ = tried.resolution
        assert config.computed_reward is not None, "refused before"
        rewards = stack.enter_context(RewardPool(config.computed_reward))
        renderer = _load_renderer(config)
        chat = None if server is None else ChatEngine(server, _load_renderer(config))
        engine = open_rollout_engine(
            bound_engine_rows(config),
            name=config.engine.name,
            metrics=WorkerMetrics("rollout"),
            opens=None if chat is None else lambda _: chat,
        )
        stack.callback(engine.close)
        yield Workbench(tried, engine, renderer, rewards, chat=chat)


def _load_renderer(config: RunConfig) -> PromptRenderer:
    return PromptRenderer.from_folder(
        config.model.path,
        config.data,
        media=config.model.media,
        tool_format=config.environment.tool_call_format,
    )


def _need_text_alone(run: CheckedRun) -> CheckedRun:
    """Return a run for a server as its engine, which reports neither experts nor top tokens."""
    config, algorithm = run.config, run.config.algorithm
    if algorithm.num_rollout_top_tokens:
        algorithm = algorithm.model_copy(update={"distill_tokens": "teacher_topk"})
    model = config.model.routing_freely
    return CheckedRun(config.model_copy(update={"model": model, "algorithm": algorithm}))


def _leave_the_run_alone(run: CheckedRun, folder: Path, samples_per_prompt: int) -> CheckedRun:
    """Return the run with its own files in another folder."""
    config, _ = run.resolution
    changes: dict[str, Path | int] = {"directory": folder}
    if samples_per_prompt:
        changes["samples_per_prompt"] = samples_per_prompt
    return CheckedRun(
        config.model_copy(
            update={
                "run": config.run.model_copy(update=changes),
                "objects": config.objects.model_copy(update={"uri": ""}),
            }
        )
    )


def _refuse(run: CheckedRun) -> None:
    """Refuse what can't be tried.

    Raises:
        ConfigError: The text names it with the remedy.
    """
    config = run.config
    if config.is_replay:
        raise ConfigError(
            f"the run replays the samples of run {config.parent.run} and generates none; try the "
            "run file of that run"
        )
    if not config.algorithm.has_rewards:
        raise ConfigError(
            f"algorithm.name = {config.algorithm.name!r} trains on the completions of the "
            "data, and nothing is generated; relax doctor shows how the first row is read"
        )
    if config.computed_reward is None:
        raise ConfigError(
            "the model in judge.model_path gives all rewards, and relax try opens no second model; "
            "add reward.function=NAME to try with another reward"
        )
