"""What pages read from the log on demand: texts and tokens of samples, lineage, dead letters, lag.

Each reads only the needed records of an open log, which shows the run as of when it was opened: a
server opens it for each answer (`open_log`), a report once.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from io import BytesIO
from typing import Any

import numpy as np
from jaxtyping import UInt8

from relax_events.api.engines import ProcessedMedia
from relax_events.api.errors import ConfigError, EnvironmentProblem, ObjectError
from relax_events.api.events import (
    ChatMessage,
    MediaRef,
    SampleReady,
    SampleRolledOut,
    SampleScored,
)
from relax_events.api.log import (
    REWARD_SCORES,
    ROLLOUT_SAMPLES,
    TRAINING_SAMPLES,
    RunLog,
    open_admin,
)
from relax_events.api.runs import (
    RunConfig,
    read_sample_events,
    sample_lineage,
    token_rows,
    version_lineage,
)
from relax_events.data.messages import describe_message
from relax_events.media.audio import encode_wav
from relax_events.media.library import MediaLibrary
from relax_events.ops.consumer_lag import read_partition_lag, sum_by_slot
from relax_events.ops.dead_letters import read_dead_letter, read_dead_letters
from relax_events.ops.topic_tail import read_record
from relax_events.packages.dashboard.recent_texts import excerpt_texts
from relax_events.packages.dashboard.sample_columns import SamplePosition, SampleTable

MAX_SIDE = 320
MAX_FRAMES = 8
MAX_SECONDS = 10
Frame = UInt8[np.ndarray, "height width 3"]

MAX_TOKENS = 4096
MAX_GAP = 32
"""Records between two wanted ones that are read over rather than sought."""


@contextmanager
def open_log(config: RunConfig) -> Iterator[RunLog]:
    """Open a run's log for one answer."""
    with RunLog(config, name="dashboard-detail") as log:
        yield log


def read_texts(log: RunLog, table: SampleTable, rows: Sequence[int]) -> dict[int, Any]:
    """Return the beginning of prompt and completion of these rows; the records that were purged are
    left out.
    """
    positions = {table.position(row): row for row in rows}
    return {
        positions[at]: excerpt_texts(sample)
        for at, sample in read_samples_at(log, positions).items()
    }


def read_samples_at(
    log: RunLog, positions: Collection[SamplePosition]
) -> dict[SamplePosition, SampleRolledOut]:
    """Read the samples at these positions, in rounds: near ones together, one span a partition and
    round.
    """
    topic, samples = log.plan.topic(ROLLOUT_SAMPLES), {}
    records = {(partition, offset) for partition, offset, _ in positions}
    for spans in rounds(list(records)):
        ranges = {(topic, partition): span for partition, span in spans.items()}
        for record in log.records(ranges):
            at = record.partition, record.offset
            for event in log.decode_samples(record) if at in records else ():
                if isinstance(event, SampleRolledOut):
                    samples[*at, event.key.sample_index] = event
    return {at: samples[at] for at in positions if at in samples}


def rounds(positions: Sequence[tuple[int, int]]) -> list[dict[int, tuple[int, int]]]:
    """Return offset ranges by partition that hold these positions, one a partition and round."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for partition, offset in sorted(positions):
        mine = spans.setdefault(partition, [])
        if mine and offset - mine[-1][1] <= MAX_GAP:
            mine[-1] = mine[-1][0], offset + 1
        else:
            mine.append((offset, offset + 1))
    count = max(map(len, spans.values()), default=0)
    return [
        {partition: mine[turn] for partition, mine in spans.items() if turn < len(mine)}
        for turn in range(count)
    ]


def read_sample(log: RunLog, table: SampleTable, row: int) -> dict[str, Any]:
    """Return all of a sample: its conversation, its score, its tokens and media."""
    position = table.position(row)
    sample = read_samples_at(log, [position]).get(position)
    if sample is None:
        raise ConfigError(
            f"the record of row {row} was purged from the log; see run.retain_versions"
        )
    score = next(read_sample_events(log, sample, REWARD_SCORES, SampleScored), None)
    ready = next(read_sample_events(log, sample, TRAINING_SAMPLES, SampleReady), None)
    tokens, why_not = _tokens(log, sample, ready.event if ready else None)
    return {
        **table.describe([row])[0],
        "messages": [_message(message) for message in sample.messages],
        "turns": [_message(message) for message in sample.turns],
        "completion": sample.completion,
        "answer": sample.answer,
        "metadata": sample.metadata[:20_000],
        "temperature": sample.temperature,
        "num_prompt_tokens": sample.num_prompt_tokens,
        "path_lengths": sample.path_lengths,
        "truncated_paths": sample.truncated_paths,
        "segments": [asdict(segment) for segment in sample.version_segments],
        "score": _score(score.event) if score else None,
        "tokens_table": tokens,
        "tokens_problem": why_not,
        "num_tokens": len(sample.tokens),
        "media": [
            {"type": media.media_type, "extent": media.extent, "num_bytes": media.num_bytes}
            for media in list_media(sample)
        ],
        "group": table.describe(table.group_rows(row)),
    }


def _message(message: ChatMessage) -> dict[str, Any]:
    return {"role": message.role, "text": describe_message(message)}


def _score(score: SampleScored) -> dict[str, Any]:
    return {
        "reward": score.reward,
        "components": score.components,
        "name": score.reward_name,
        "error": score.error,
        "judge_response": score.judge_response,
        "at": score.scored_at // 1000,
    }


def _tokens(
    log: RunLog, sample: SampleRolledOut, ready: SampleReady | None
) -> tuple[list[list[Any]], str]:
    """Return a row for each token, the first `MAX_TOKENS`; or the reason why there are none."""
    try:
        rows = token_rows(log, sample, ready)[:MAX_TOKENS]
    except (ConfigError, EnvironmentProblem, ObjectError) as error:
        return [], str(error)
    versions = (
        segment.policy_version
        for segment in sample.version_segments
        for _ in range(segment.num_tokens)
    )
    return [
        [
            row.token,
            row.text,
            int(row.is_trained),
            row.rollout_logprob,
            row.actor_logprob,
            row.ref_logprob,
            row.advantage,
            next(versions, None) if row.is_trained else None,
            row.path,
        ]
        for row in rows
    ], ""


def list_media(sample: SampleRolledOut) -> list[MediaRef]:
    """Return the media of a sample's conversation, in order."""
    return [
        part.media
        for message in (*sample.messages, *sample.turns)
        for part in message.parts
        if part.media is not None
    ]


def render_media(
    log: RunLog, table: SampleTable, row: int, number: int, frame: int
) -> tuple[str, bytes]:
    """Return media type and bytes of a frame, or of audio: encoded from the model's input,
    never the file of an untrusted producer.

    Raises:
        ConfigError: There is no such medium.
    """
    position = table.position(row)
    sample = read_samples_at(log, [position]).get(position)
    media = list_media(sample) if sample else []
    if not 0 <= number < len(media):
        raise ConfigError(f"the sample has {len(media)} media; there is no number {number}")
    library = MediaLibrary(log.config)
    loaded = library.load(media[number])
    if loaded.samples is not None and loaded.pixels is None:
        rate = library.find_sample_rate(media[number])
        begin = loaded.samples[: MAX_SECONDS * rate].astype(np.float64)
        return "audio/wav", encode_wav(begin, rate_hertz=rate)
    frames = select_frames(loaded)
    if not 0 <= frame < len(frames):
        raise ConfigError(f"the medium has {len(frames)} frames; there is no frame {frame}")
    file = BytesIO()
    encode_png(frames[frame], file)
    return "image/png", file.getvalue()


def read_lineage_of_sample(log: RunLog, sample_id: str) -> dict[str, Any]:
    """Return the stages of a sample, from its prompt to the versions it trained."""
    return asdict(sample_lineage(log, sample_id))


def read_lineage_of_version(log: RunLog, version: int) -> dict[str, Any]:
    """Return where a version comes from: its step, its samples, its rewards."""
    lineage = asdict(version_lineage(log, version))
    lineage["num_samples"] = len(lineage["samples"])
    lineage["samples"] = lineage["samples"][:500]
    return lineage


def list_dead_letters(log: RunLog) -> list[dict[str, Any]]:
    """Return the dead letters, newest first, without their values."""
    return [
        asdict(dead_letter) | {"id": dead_letter.id, "origin": dead_letter.origin}
        for dead_letter in reversed(read_dead_letters(log))
    ]


def show_dead_letter(log: RunLog, name: str) -> dict[str, Any]:
    """Return a dead letter with what its record holds, as far as it can be decoded."""
    dead_letter, record = read_dead_letter(log, name)
    read = read_record(log, record)
    return asdict(dead_letter) | {
        "holds": read.event,
        "fields": read.fields,
        "decoding_error": read.error,
        "head_hex": record.value[:256].hex(" "),
    }


def read_lag(config: RunConfig) -> list[dict[str, Any]]:
    """Return a row for each role and slot, with the age of the oldest unread record. It asks the
    broker for many offsets.
    """
    with closing(open_admin(config, name="dashboard-lag")) as admin:
        rows = read_partition_lag(config, admin)
    return [asdict(row) for row in sum_by_slot(rows, now_ms=int(time.time() * 1e3))]


def select_frames(media_input: ProcessedMedia) -> list[Frame]:
    """Return the image, or frames of the video: all that the model gets, or an even selection of
    many.
    """
    if media_input.pixels is None:
        return []
    frames = media_input.pixels if media_input.pixels.ndim == 4 else media_input.pixels[None]
    chosen = np.linspace(0, len(frames) - 1, min(len(frames), MAX_FRAMES)).round().astype(int)
    return [frames[index] for index in chosen]


def encode_png(frame: Frame, file: BytesIO) -> None:
    """Write a frame as PNG, reduced where it is large: a page never gets the file of an untrusted
    producer.

    Raises:
        EnvironmentProblem: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentProblem(
            f"images in a page need the package pillow ({error}); install relax-events[media]"
        ) from None
    image = Image.fromarray(frame)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    image.save(file, "PNG")
