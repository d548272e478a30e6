"""The evaluator role: evaluates policy versions during training, on an engine of its own.

    control.policy-versions ──▶ choose the next due version ──▶ load its weights
                                ──▶ evaluate every dataset ──▶ PolicyEvaluated
    control.evaluations     ──▶ finished evaluations, read back after a restart

No other role waits for the evaluator during the run. It keeps the weights of one version until all
datasets are evaluated, even if new versions are published meanwhile. Due versions are evaluated
oldest first; a version whose weights are already deleted is skipped. A restarted evaluator resumes
with the first unfinished dataset; no metric mixes versions.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import structlog

from relax_events.config import EvaluationDatasetConfig, RewardConfig, RunConfig
from relax_events.config.reward import JUDGED
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import PromptSource
from relax_events.data.sources import named_evaluation_datasets, open_source
from relax_events.engines.protocol import Engine
from relax_events.errors import WeightsError
from relax_events.events.types import Event, PolicyEvaluated, PolicyVersionPublished
from relax_events.media.library import MediaLibrary
from relax_events.rewards.pool import RewardPool
from relax_events.roles.engine_factory import open_rollout_engine
from relax_events.roles.evaluation_judge import EvaluationJudge
from relax_events.roles.evaluation_pass import EvaluationPass
from relax_events.roles.judging import open_judge
from relax_events.roles.worker_factory import open_store, open_worker
from relax_events.runtime.control_follower import RECENT_VERSIONS
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.worker import Worker
from relax_events.topics.names import EVALUATIONS
from relax_events.weights.manifest import Weights
from relax_events.weights.transport import StoreReader, WeightsReader

log = structlog.get_logger()
IDLE_SECONDS = 0.5
RELOAD_SECONDS = 2.0


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    store = open_store(config)
    sources = {
        part.name: open_source(part, seed=config.run.seed, section=section)
        for section, part in named_evaluation_datasets(config.evaluation)
    }
    with ExitStack() as stack:
        computed = {
            part.name: _computed_reward(config, part) for part in config.evaluation.datasets
        }
        rewards = {
            name: stack.enter_context(RewardPool(reward))
            for name, reward in computed.items()
            if reward is not None
        }
        num_versions = max(
            RECENT_VERSIONS, config.run.retain_versions + config.weights.full_snapshot_interval
        )  # the weights of older versions are deleted
        follow = (EVALUATIONS,)
        opened = open_worker(
            "evaluator",
            config,
            index=index,
            store=store,
            follow=follow,
            num_versions=num_versions,
        )
        worker = stack.enter_context(opened)
        engine_config = config.model_copy(update={"model": config.model.routing_freely})
        engine = open_rollout_engine(engine_config, name=config.engine.name, metrics=worker.metrics)
        stack.callback(engine.close)
        judge = None
        if config.judged_datasets:
            judging = open_judge(config, metrics=worker.metrics.routing)
            stack.callback(judging.close)
            judge = EvaluationJudge(config, judging)
        EvaluatorLoop(
            worker,
            engine,
            StoreReader(store, full_snapshot_interval=config.weights.full_snapshot_interval),
            sources=sources,
            rewards=rewards,
            judge=judge,
        ).run()


def _computed_reward(config: RunConfig, dataset: EvaluationDatasetConfig) -> RewardConfig | None:
    """Return the reward of a dataset without what the judge scores; None where nothing is left."""
    reward = dataset.reward or config.reward
    return reward.without(JUDGED) if dataset.name in config.judged_datasets else reward


class EvaluatorLoop:
    """See the module's docstring."""

    def __init__(
        self,
        worker: Worker,
        engine: Engine,
        transport: WeightsReader,
        *,
        sources: dict[str, PromptSource],
        rewards: Mapping[str, RewardPool],
        judge: EvaluationJudge | None = None,
    ) -> None:
        self._worker, self._engine, self._transport, self._config = (
            worker,
            engine,
            transport,
            worker.config,
        )
        self._sources, self._rewards, self._judge = sources, rewards, judge
        self._renderer = PromptRenderer.from_folder(
            self._config.model.path,
            self._config.data,
            media=self._config.model.media,
            tool_format=self._config.environment.tool_call_format,
        )
        self._library = MediaLibrary(self._config)
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._published: dict[int, PolicyVersionPublished] = {}
        self._done: set[tuple[int, str]] = set()

    def run(self) -> None:
        """Evaluate until the drain starts."""
        worker = self._worker
        worker.drain.on_start(self._wake)
        worker.control.follow(self._inbox.put)
        while not worker.drain.requested:
            self._take()
            due = min(self._published, default=None)
            if due is not None and not worker.control.is_paused:
                self._evaluate(self._published[due])
            worker.lifecycle.tick(working=due is not None and not worker.control.is_paused)

    def _wake(self) -> None:
        self._inbox.put(None)
        self._engine.interrupt()

    def _take(self) -> None:
        """Apply the received control events; wait for one when no version is due."""
        try:
            event = (
                self._inbox.get_nowait()
                if self._published
                else self._inbox.get(timeout=IDLE_SECONDS)
            )
            while True:
                self._apply(event)
                event = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _apply(self, event: Event | None) -> None:
        config = self._config
        if isinstance(event, PolicyEvaluated):
            self._done.add((event.policy_version, event.dataset))
            if not list(self._is_expired(event.policy_version)):
                self._published.pop(event.policy_version, None)
        elif isinstance(event, PolicyVersionPublished):
            version = event.policy_version
            is_due = config.evaluation.is_due(
                version, first=config.first_version, last=config.last_version
            )
            if is_due and list(self._is_expired(version)):
                self._published[version] = event

    def _send_heartbeat_between_scores(self) -> None:
        self._worker.heartbeat.advance()
        self._worker.lifecycle.tick(working=True)

    def _is_expired(self, version: int) -> Iterator[EvaluationDatasetConfig]:
        """Yield the datasets on which a version is not evaluated yet."""
        return (
            dataset
            for dataset in self._config.evaluation.datasets
            if (version, dataset.name) not in self._done
        )

    def _evaluate(self, published: PolicyVersionPublished) -> None:
        """Evaluate a version on every unfinished dataset, or until the drain starts."""
        version = published.policy_version
        weights = self._load(published)
        if weights is None:
            return
        self._worker.heartbeat.set_policy_version(version)
        for dataset in list(self._is_expired(version)):
            started = time.monotonic()
            done = self._pass(dataset, weights)
            if done is None:
                return
            self._worker.records.producer.write(
                [self._worker.records.build(EVALUATIONS, done, key=f"{version}/{dataset.name}")]
            )
            failpoint("evaluator.after_write")
            self._done.add((version, dataset.name))
            self._worker.lifecycle.record_processed(1, started)
        del self._published[version]

    def _load(self, published: PolicyVersionPublished) -> Weights | None:
        """Load a version into the engine; return None if its weights are already deleted."""
        version = published.policy_version
        try:
            with self._worker.lifecycle.transfer("load weights"):
                weights = self._transport.fetch(published)
                failpoint("evaluator.before_load")
                self._engine.load_weights(weights)
        except WeightsError as error:
            is_newest = version == self._worker.control.policy_version
            log.error(
                "evaluation.delayed" if is_newest else "evaluation.skipped",
                policy_version=version,
                error=str(error),
            )
            if is_newest:
                self._worker.drain.wait(RELOAD_SECONDS)
            else:
                del self._published[version]
            return None
        return weights

    def _pass(self, dataset: EvaluationDatasetConfig, weights: Weights) -> PolicyEvaluated | None:
        """Evaluate the loaded version on a dataset; return None if the drain starts first."""
        started = time.monotonic()
        one = EvaluationPass(
            dataset,
            self._sources[dataset.name],
            engine=self._engine,
            renderer=self._renderer,
            library=self._library,
            rewards=self._rewards.get(dataset.name),
            judge=self._judge,
            config=self._config,
            send_heartbeat=self._send_heartbeat_between_scores,
        )
        while not one.is_finished:
            if self._worker.drain.requested:
                one.abort()
                return None
            one.step()
            failpoint("evaluator.generating")
            self._worker.heartbeat.set_in_flight(self._engine.num_running)
            self._worker.heartbeat.advance_to(one.num_tokens)
            self._worker.lifecycle.tick(working=True)
        self._worker.metrics.count_tokens(one.tally.num_tokens)
        done = one.result(
            policy_version=weights.policy_version,
            weights_digest=weights.digest,
            seconds=time.monotonic() - started,
        )
        log.info(
            "policy_version.evaluated",
            policy_version=done.policy_version,
            dataset=done.dataset,
            reward_mean=done.reward_mean,
            pass_at_k=done.pass_at_k,
            num_unscored=done.num_unscored,
            num_failed_prompts=done.num_failed_prompts,
            seconds=round(done.seconds, 3),
        )
        return done
