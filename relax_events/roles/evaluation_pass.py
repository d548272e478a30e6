"""Evaluates one policy version on one dataset: generate samples, score them, compute metrics."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import numpy as np
import structlog

from relax_events.config import EvaluationDatasetConfig, RunConfig
from relax_events.config.reward import JUDGED
from relax_events.data.conversations import insert_media
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import PromptRow, PromptSource
from relax_events.engines.protocol import (
    Engine,
    EnvironmentContext,
    GeneratedSample,
    GenerationRequest,
    SampleRequest,
)
from relax_events.errors import PoisonSample, RewardError, RunFailed
from relax_events.events.parts import FinishReason
from relax_events.events.types import PolicyEvaluated
from relax_events.media.items import MediaItem
from relax_events.media.library import MediaLibrary
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.rewards.pool import RewardItem, RewardPool
from relax_events.rewards.run_judge import JudgeReward
from relax_events.rewards.scores import Score
from relax_events.rewards.scoring import get_fixed_score, role_text_pairs
from relax_events.roles.evaluation_judge import EvaluationJudge, choose_judge_reward
from relax_events.roles.evaluation_metrics import EvaluationResults

log = structlog.get_logger()
STEP_SECONDS = 0.25
SCORED_AT_ONCE = 4
"""Samples per reward process in one call: if all of them hang, the heartbeat is late by this many
reward deadlines."""


class EvaluationPass:
    """Call `step` until every sample of the dataset is scored.

    The engine keeps one version throughout. Only the prompts in flight are held in memory. Seeds
    are derived from run, dataset and row, so all versions sample with the same random numbers and
    differ only by their weights.
    """

    def __init__(
        self,
        dataset: EvaluationDatasetConfig,
        source: PromptSource,
        *,
        engine: Engine,
        renderer: PromptRenderer,
        library: MediaLibrary,
        rewards: RewardPool | None,
        config: RunConfig,
        judge: EvaluationJudge | None = None,
        send_heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        """Start at the first row.

        Args:
            dataset: Settings of the dataset.
            source: Rows of the dataset.
            engine: Holds the version's weights; idle.
            renderer: The policy's prompt renderer.
            library: Loads the media of the rows.
            rewards: Score the completions; None where the judge scores all of them.
            config: The run.
            judge: Scores completions of the sources that a judge of the run scores.
            send_heartbeat: Called while samples are scored, because a reward function may hang.
        """
        self._send_heartbeat, self._num_at_once = (
            send_heartbeat,
            SCORED_AT_ONCE * (dataset.reward or config.reward).num_processes,
        )
        self._dataset, self._source = dataset, source
        self._engine, self._renderer, self._rewards, self._library = (
            engine,
            renderer,
            rewards,
            library,
        )
        self._judge, self._reward = judge, dataset.reward or config.reward
        self._judged = {} if judge is None else judge.get_rewards(dataset.name)
        self._sampling = dataset.sampling or config.engine.sampling
        self._max_running = config.engine.max_running_samples
        self._seed = config.run.seed
        self._has_environment = bool(config.environment.name)
        self._policy_version = engine.policy_version
        self._next_row = 0
        self._at_work: dict[str, tuple[int, PromptRow, int]] = {}
        """Row, prompt and number of missing samples of each prompt in flight, by its request id."""
        self.tally = EvaluationResults(dataset.pass_reward)

    @property
    def is_finished(self) -> bool:
        """Whether every sample is scored."""
        return self._next_row == self._source.num_rows and not self._at_work

    def step(self) -> None:
        """Fill the engine, wait a moment for samples, and score them; a judge scores while the
        engine generates.
        """
        while self._next_row < self._source.num_rows and self._has_room():
            self._submit(self._next_row)
            self._next_row += 1
        samples = self._engine.poll(timeout_seconds=STEP_SECONDS)
        for start in range(0, len(samples), self._num_at_once):
            self._score(samples[start : start + self._num_at_once])
            self._send_heartbeat()
        if self._judge is not None:
            for sample, result in self._judge.poll(timeout_seconds=STEP_SECONDS):
                self._record(sample, result)

    def abort(self) -> None:
        """Abort the running requests."""
        self._engine.abort()
        if self._judge is not None:
            self._judge.abort()

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy and the judge have generated so far."""
        return self._engine.num_tokens + (0 if self._judge is None else self._judge.num_tokens)

    def result(
        self, *, policy_version: int, weights_digest: bytes, seconds: float
    ) -> PolicyEvaluated:
        """Return the metrics.

        Args:
            policy_version: The evaluated version.
            weights_digest: Digest of its weights.
            seconds: Duration of the pass.
        """
        tally = self.tally
        return PolicyEvaluated(
            policy_version=policy_version,
            dataset=self._dataset.name,
            num_prompts=self._source.num_rows,
            samples_per_prompt=self._dataset.samples_per_prompt,
            reward_mean=tally.reward_mean,
            reward_stderr=tally.reward_stderr,
            pass_at_k=dict(tally.pass_at(self._dataset.pass_at)),
            completion_tokens_mean=tally.completion_tokens_mean,
            num_truncated=tally.num_truncated,
            num_unscored=tally.num_unscored,
            num_failed_prompts=tally.num_failed_prompts,
            reward_name=describe_scorers(self._rewards, self._judged),
            reward_digest=digest_scorers(self._rewards, self._judged),
            weights_digest=weights_digest,
            seconds=seconds,
        )

    def _has_room(self) -> bool:
        running = self._engine.num_running
        return not running or running + self._dataset.samples_per_prompt <= self._max_running

    def _submit(self, index: int) -> None:
        row = self._source.row(index)
        name = f"{self._dataset.name}/{index}"
        try:
            media = tuple(self._shown(item) for item in row.media)
            messages = insert_media(row.messages, [piece.reference for piece in media])
            prompt_tokens = self._renderer.row_tokens(messages, tools=row.tools)
            self._engine.submit(
                GenerationRequest(
                    prompt_group_id=name,
                    prompt_tokens=prompt_tokens,
                    samples=tuple(
                        self._sample(name, number)
                        for number in range(self._dataset.samples_per_prompt)
                    ),
                    sampling=self._sampling,
                    stop_token_ids=self._renderer.stop_token_ids,
                    media=media,
                    environment_context=EnvironmentContext(
                        messages=messages, answer=row.answer, metadata=row.metadata, tools=row.tools
                    ),
                )
            )
        except PoisonSample as error:
            self.tally.num_failed_prompts += 1
            log.warning("prompt.rejected", dataset=self._dataset.name, row=index, error=str(error))
            return
        self._at_work[name] = (index, row, self._dataset.samples_per_prompt)

    def _shown(self, item: MediaItem) -> ProcessedMedia:
        """Check a media item; with an environment, store it so that the environment's child process
        can read it.
        """
        return (
            self._library.load(self._library.add(item))
            if self._has_environment
            else self._library.preprocess(item)
        )

    def _sample(self, name: str, number: int) -> SampleRequest:
        digest = hashlib.blake2b(f"{self._seed}/{name}/{number}".encode(), digest_size=7).digest()
        tokens, logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
        return SampleRequest(
            sample_id=f"{name}/{number}",
            seed=int.from_bytes(digest),
            tokens=tokens,
            logprobs=logprobs,
            segments=(),
        )

    def _score(self, samples: list[GeneratedSample]) -> None:
        computed: list[tuple[GeneratedSample, RewardItem]] = []
        for sample in samples:
            item, row = self._item(sample), self._at_work[sample.prompt_group_id][1]
            reward = choose_judge_reward(self._judged, self._reward, row.metadata)
            if sample.finish_reason is FinishReason.ERROR or not sample.finish_reason.is_scored:
                score = get_fixed_score(sample.finish_reason, self._reward)
                self._record(sample, score or RewardError(sample.error))
            elif reward is not None and self._judge is not None:
                self._judge.submit(sample, item, reward, row=row)
            else:
                computed.append((sample, item))
        if not computed:
            return
        assert self._rewards is not None, "the judge scores every source"
        results = self._rewards.score_batch(
            [item for _, item in computed], on_answer=self._send_heartbeat
        )
        for (sample, _), result in zip(computed, results, strict=True):
            self._record(sample, result)

    def _record(self, sample: GeneratedSample, result: Score | RewardError) -> None:
        """Count a scored sample."""
        index, row, missing = self._at_work[sample.prompt_group_id]
        if isinstance(result, RewardError):
            log.warning(
                "sample.unscored",
                policy_version=self._policy_version,
                sample_id=sample.sample_id,
                error=str(result),
            )
        self.tally.add_sample(
            index,
            reward=None if isinstance(result, RewardError) else result.reward,
            num_tokens=sample.num_sampled_tokens,
            is_truncated=sample.finish_reason is FinishReason.LENGTH,
        )
        if missing > 1:
            self._at_work[sample.prompt_group_id] = (index, row, missing - 1)
        else:
            del self._at_work[sample.prompt_group_id]

    def _item(self, sample: GeneratedSample) -> RewardItem:
        versions = {segment.policy_version for segment in sample.segments} | {self._policy_version}
        if len(versions) > 1:
            raise RunFailed(
                f"sample {sample.sample_id} must be of policy version {self._policy_version} "
                f"alone, got {sorted(versions)}"
            )
        row = self._at_work[sample.prompt_group_id][1]
        prompt = "\n".join(message.text for message in (*row.messages, *sample.turns[:-1]))
        completion = (
            sample.turns[-1].text if sample.turns else self._renderer.completion_text(sample.tokens)
        )
        chosen = (
            sample.tokens
            if sample.loss_mask is None
            else sample.tokens[sample.loss_mask.astype(bool)]
        )
        return RewardItem(
            sample.sample_id,
            completion,
            answer=row.answer,
            metadata=row.metadata,
            prompt=prompt,
            turns=role_text_pairs(sample.turns),
            token_ids=chosen,
            environment_rewards=sample.environment_rewards,
        )


def describe_scorers(rewards: RewardPool | None, judged: Mapping[str | None, JudgeReward]) -> str:
    """Return the names of the functions that score a dataset, with the sources of a judge's."""
    names = [JUDGED if source is None else f"{source}: {JUDGED}" for source in judged]
    return "; ".join([*([] if rewards is None else [rewards.name]), *sorted(names)])


def digest_scorers(rewards: RewardPool | None, judged: Mapping[str | None, JudgeReward]) -> str:
    """Return the version of everything that scores a dataset."""
    digests = [] if rewards is None else [rewards.digest]
    digests += [judged[source].digest for source in sorted(judged, key=str)]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("/".join(digests).encode()).hexdigest()
