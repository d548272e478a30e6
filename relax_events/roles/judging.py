"""What a judge model is asked about a completion, and what is read from its answer: shared by the
judge role and the evaluator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relax_events.config import RunConfig
from relax_events.data.rendering import load_judge_renderer
from relax_events.engines.protocol import Engine, GeneratedSample, GenerationRequest, SampleRequest
from relax_events.errors import ConfigError, RewardError
from relax_events.events.json_text import parse_json
from relax_events.events.parts import (
    ChatMessage,
    ContentPart,
    FinishReason,
    MediaRef,
    Modality,
)
from relax_events.media.library import MediaLibrary
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.media.token_layout import read_modality
from relax_events.rewards.pool import RewardItem
from relax_events.rewards.run_judge import JudgeReward
from relax_events.rewards.scores import Score, parse_score
from relax_events.roles.engine_factory import open_engine
from relax_events.telemetry.component_metrics import ReplicaMetrics


def open_judge(config: RunConfig, *, metrics: ReplicaMetrics) -> Engine:
    """Load the judge model on its engine.

    Raises:
        ConfigError: The run has no judge, its engine is not installed, or its model can't be
            loaded.
    """
    return open_engine(as_judge_run(config), name=config.judge.engine.name, metrics=metrics)


def as_judge_run(config: RunConfig) -> RunConfig:
    """Return a run whose model and engine are those of the judge.

    Raises:
        ConfigError: The run has no judge.
    """
    judge = config.judge
    if judge.model_path is None:
        raise ConfigError(
            "the judge role has no model; set judge.model_path to the folder of its checkpoint"
        )
    return config.model_copy(
        update={"model": judge.as_model(judge.model_path), "engine": judge.engine}
    )


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge said of a completion.

    Attributes:
        result: The score, or why there is none.
        text: The judge's response.
        outcome: `scored`, `unreadable` or `failed`.
    """

    result: Score | RewardError
    text: str
    outcome: str


class JudgeQuestions:
    """Builds the requests of a judge, and reads its answers. Used by one thread."""

    def __init__(self, config: RunConfig) -> None:
        """Load the judge's tokenizer, and with `judge.media` its preprocessing settings.

        Raises:
            ConfigError: The judge has no model, its tokenizer can't be used, or it reads no media
                and `judge.media` is set.
        """
        self._judge, self._seed = config.judge, config.run.seed
        self._renderer = load_judge_renderer(config.judge, config.data)
        self._library = None if config.judge.media is None else MediaLibrary(as_judge_run(config))

    def request(
        self, name: str, item: RewardItem, reward: JudgeReward, *, media: Sequence[ProcessedMedia]
    ) -> GenerationRequest:
        """Build the request for a judgement. Its seed is that of the completion: a retry after a
        crash gives the same judgement.

        Args:
            name: Of the request.
            item: The completion; its `sample_id` gives the seed.
            reward: Template and rubric.
            media: The media that the completion is about, preprocessed for the judge.
        Raises:
            PoisonSample: The judge's chat template rejects the question, or can't show media.
            RewardError: The item's metadata are no JSON.
        """
        question = reward.grading.build_prompt(
            item.completion,
            answer=item.answer,
            metadata=_metadata(item.metadata),
            prompt=item.prompt,
        )
        named = f"{self._seed}/{item.sample_id}"
        seed = int.from_bytes(hashlib.blake2b(named.encode(), digest_size=7).digest())
        tokens, logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
        return GenerationRequest(
            prompt_group_id=name,
            prompt_tokens=self._renderer.prompt_tokens([_message(question, media)]),
            samples=(
                SampleRequest(
                    sample_id=name, seed=seed, tokens=tokens, logprobs=logprobs, segments=()
                ),
            ),
            sampling=self._judge.engine.sampling,
            stop_token_ids=self._renderer.stop_token_ids,
            media=tuple(media),
        )

    def load_media(self, references: Sequence[MediaRef]) -> list[ProcessedMedia]:
        """Preprocess a completion's media for the judge; none without `judge.media`.

        Raises:
            MediaError: A file can't be used by the judge's model.
            ObjectError: The store failed.
        """
        library = self._library
        return [] if library is None else [library.load(reference) for reference in references]

    @property
    def library(self) -> MediaLibrary | None:
        """The library that preprocesses media for the judge; None without `judge.media`."""
        return self._library

    def read(self, written: GeneratedSample, reward: JudgeReward, *, seconds: float) -> Judgement:
        """Read the score from a judge's answer.

        Without a score in range it is a failure, or 0 with `judge.on_parse_error = "zero"`.

        Args:
            written: The answer.
            reward: Parses the score.
            seconds: What the judgement took.
        """
        if written.finish_reason is FinishReason.ERROR:
            failure = RewardError(f"the judge's engine failed: {written.error}")
            return Judgement(failure, "", "failed")
        text = self._renderer.completion_text(written.tokens)
        try:
            score = parse_score(reward.grading.score(text), weights=reward.weights, seconds=seconds)
        except RewardError as error:
            return self._unreadable(written, text, error, seconds=seconds)
        return Judgement(score, text, "scored")

    def _unreadable(
        self, written: GeneratedSample, text: str, error: RewardError, *, seconds: float
    ) -> Judgement:
        if self._judge.on_parse_error == "zero":
            return Judgement(Score(0.0, {}, seconds), text, "unreadable")
        cut = (
            f"; it was cut off after {written.num_sampled_tokens} tokens, see "
            "judge.engine.sampling.max_new_tokens"
        )
        is_cut = written.finish_reason is FinishReason.LENGTH
        return Judgement(RewardError(f"{error}{cut if is_cut else ''}"), text, "unreadable")


def _message(question: str, media: Sequence[ProcessedMedia]) -> ChatMessage:
    """Return the question with the media before it, in their order."""
    shown = [ContentPart(read_modality(one.reference), media=one.reference) for one in media]
    if not shown:
        return ChatMessage.of_text("user", question)
    return ChatMessage("user", [*shown, ContentPart(Modality.TEXT, question)])


def _metadata(text: str) -> dict[str, object]:
    try:
        metadata = parse_json(text)
    except ValueError as error:
        raise RewardError(f"the sample's metadata is no JSON: {error}") from None
    return metadata if isinstance(metadata, dict) else {}
