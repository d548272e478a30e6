"""Build supervised examples from the assistant turns of rows and the replies of the run's
environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from relax_events.api.engines import EnvironmentContext, ProcessedMedia, RunConfig
from relax_events.api.errors import ConfigError
from relax_events.api.events import ChatMessage
from relax_events.api.prompts import PromptRow
from relax_events.data.conversations import ASSISTANT, insert_media
from relax_events.data.rendering import PromptRenderer
from relax_events.environments.pool import EnvironmentPool
from relax_events.environments.reply_media import ProcessedReply
from relax_events.environments.session_pool import SessionPool
from relax_events.media.library import MediaLibrary
from relax_events.objects.store import ObjectStore
from relax_events.packages.examples.sft_warmup import SupervisedExample


class WarmupConversations:
    """Runs the environment on the rows' assistant turns; nothing is written to the run's object
    store. Not thread-safe.
    """

    def __init__(self, config: RunConfig, *, model_path: Path) -> None:
        """Load the tokenizer, and start the environment, if any.

        Args:
            config: The run.
            model_path: The model to train.
        Raises:
            ConfigError: The model folder or the environment can't be used.
        """
        self._config = config
        self._renderer = PromptRenderer.from_folder(
            model_path,
            config.data,
            media=config.model.media,
            tool_format=config.environment.tool_call_format,
        )
        library = partial(
            MediaLibrary, config, model_path=model_path, store=ObjectStore.open("memory://")
        )
        self._library = library()
        environment = config.environment
        self._pool = (
            EnvironmentPool(config, libraries=library)
            if environment.function
            and not environment.holds_sessions
            and not config.sft_warmup.replies_key
            else None
        )
        self._sessions = (
            SessionPool(config, libraries=library)
            if environment.holds_sessions and not config.sft_warmup.replies_key
            else None
        )

    def close(self) -> None:
        """Stop the environment."""
        if self._pool is not None:
            self._pool.close()
        if self._sessions is not None:
            self._sessions.close()

    def build_example(self, row: PromptRow) -> SupervisedExample:
        """Build the example of a row.

        Raises:
            ConfigError: The row has no assistant turns, or the environment ends the sample before
                the last of them.
            PoisonSample: The environment failed, or the chat template rejects the conversation.
            EpisodeFailed: A session of the environment failed.
        """
        answers = read_assistant_turns(row, key=self._config.sft_warmup.assistant_turns_key)
        references = [self._library.add(item) for item in row.media]
        media = [self._library.load(reference) for reference in references]
        task = EnvironmentContext(
            messages=insert_media(row.messages, references),
            answer=row.answer,
            metadata=row.metadata,
            tools=row.tools,
        )
        if self._sessions is not None:
            return self._build_from_session(row, task, media, answers)
        prompt = self._renderer.prompt_tokens(task.messages, tools=task.tools)
        turns = [ChatMessage.of_text(ASSISTANT, answers[0])]
        pieces = [self._renderer.answer_tokens(answers[0])]
        for number, answer in enumerate(answers[1:], 1):
            if (observation := self._request_reply(task, turns, number)) is None:
                raise ConfigError(describe_early_end(answers, number))
            reply = self._renderer.bridge_tokens(
                (*task.messages, *turns[:-1]), [observation.message], tools=task.tools
            )
            turns += [observation.message, ChatMessage.of_text(ASSISTANT, answer)]
            pieces += [reply, self._renderer.answer_tokens(answer)]
            media += observation.media
        return join_pieces(prompt, pieces, media)

    def _build_from_session(
        self,
        row: PromptRow,
        task: EnvironmentContext,
        media: Sequence[ProcessedMedia],
        answers: list[str],
    ) -> SupervisedExample:
        """Build the example of a row by a session of the environment, as `StatefulDriver` does."""
        assert self._sessions is not None
        session = self._sessions.session(f"warm-up/{row.answer}", task)
        try:
            opening = session.open().result()
            task, media = opening.add_to(task, media)
            prompt = self._renderer.prompt_tokens(task.messages, tools=task.tools)
            turns: list[ChatMessage] = []
            pieces: list[NDArray[np.int32]] = []
            for number, answer in enumerate(answers, 1):
                turns.append(ChatMessage.of_text(ASSISTANT, answer))
                pieces.append(self._renderer.answer_tokens(answer))
                if number == len(answers):
                    break
                observation = session.step(answer).result()
                if observation.is_over or not observation.replies:
                    raise ConfigError(describe_early_end(answers, number))
                replies = [reply.message for reply in observation.replies]
                before = (*task.messages, *turns[:-1])
                pieces.append(self._renderer.bridge_tokens(before, replies, tools=task.tools))
                turns += replies
                media = [*media, *(piece for one in observation.replies for piece in one.media)]
        finally:
            session.close()
        return join_pieces(prompt, pieces, media)

    def _request_reply(
        self, task: EnvironmentContext, turns: Sequence[ChatMessage], number: int
    ) -> ProcessedReply | None:
        if self._pool is None:
            replies = read_replies(task.metadata, key=self._config.sft_warmup.replies_key)
            return ProcessedReply(replies[number - 1], ()) if number <= len(replies) else None
        return self._pool.loop.run(self._pool.reply("of the SFT warm-up", task, turns)).result()


def join_pieces(
    prompt: NDArray[np.int32],
    pieces: Sequence[NDArray[np.int32]],
    media: Sequence[ProcessedMedia],
) -> SupervisedExample:
    """Join the tokens of answers and of the replies between them to one example."""
    loss_masks = [np.full(len(piece), index % 2 == 0) for index, piece in enumerate(pieces)]
    return SupervisedExample(
        prompt, np.concatenate(pieces), np.concatenate(loss_masks), tuple(media)
    )


def describe_early_end(answers: Sequence[str], number: int) -> str:
    """Return the error of a row whose environment ends too early."""
    return (
        f"the environment ends the sample at answer {number} of {len(answers)}: {list(answers)}; "
        "see sft_warmup.assistant_turns_key"
    )


def read_replies(metadata: str, *, key: str) -> list[ChatMessage]:
    """Return the messages between a row's assistant turns; none without a key.

    Args:
        metadata: The row's: the text of a JSON object.
        key: Key of the list, see `sft_warmup.replies_key`.
    Raises:
        ConfigError: The metadata has no list of messages under that key.
    """
    if not key:
        return []
    messages: Any = orjson.loads(metadata).get(key)
    is_list = isinstance(messages, list) and all(
        isinstance(one, dict)
        and isinstance(one.get("role"), str)
        and isinstance(one.get("content"), str)
        for one in messages
    )
    if not is_list:
        raise ConfigError(
            f"a row's metadata has {key} = {str(messages)[:80]!r}; it must be a list of messages "
            "with role and content: set sft_warmup.replies_key to a column that holds one"
        )
    return [ChatMessage.of_text(one["role"], one["content"]) for one in messages]


def read_assistant_turns(row: PromptRow, *, key: str) -> list[str]:
    """Return the assistant turns of a row.

    Args:
        row: A row with a reference answer, and optionally a list of assistant turns in its
            metadata.
        key: Key of that list, see `sft_warmup.assistant_turns_key`; empty for the reference answer
            alone.
    Raises:
        ConfigError: The metadata has no list of texts under that key.
    """
    if not key:
        return [row.answer]
    answers: Any = orjson.loads(row.metadata).get(key)
    if (
        not isinstance(answers, list)
        or not answers
        or not all(isinstance(answer, str) for answer in answers)
    ):
        raise ConfigError(
            f"a row's metadata has {key} = {str(answers)[:80]!r}; it must be a list of answers: "
            "set sft_warmup.assistant_turns_key to a column that holds one"
        )
    return answers
