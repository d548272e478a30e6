"""Stores the unfinished samples of a rollout worker that exits; the next worker resumes them.

    drain overdue --> abort() --> partials/<prompt group> in the object store --> release the lease
    --> another worker: find, submit, ..., forget

The lease is released only after the object is written; a crash before that loses the tokens, like
every crash. The object is a line of JSON and then the concatenated arrays of all samples: tokens
and log-probabilities and, if the run has them, the top tokens, the loss mask and the routed
experts. The JSON holds the conversation with an environment; environments are stateless (ADR 17).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import numpy as np
import orjson
import structlog

from relax_events.engines.protocol import GeneratedSample
from relax_events.errors import ObjectError, StoreUnavailable
from relax_events.events.parts import (
    ChatMessage,
    ContentPart,
    FinishReason,
    MediaRef,
    Modality,
    ToolCall,
    VersionSegment,
)
from relax_events.objects import ObjectStore

log = structlog.get_logger()
PREFIX = "partials/"
WHOLE = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.LATE)
ARRAYS = ("tokens", "logprobs", "top_tokens", "loss_mask", "routed_experts")
KINDS = "iuf"
"""Accepted kinds of numpy dtypes: integers and floats, which hold no pointers."""


class PartialSamples:
    """Unfinished prompt groups in the run's object store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def keep(self, prompt_group_id: str, samples: Sequence[GeneratedSample]) -> int:
        """Store the generated tokens of a prompt group; return their number, 0 if none could be
        stored.

        Args:
            prompt_group_id: The prompt group whose lease is released next.
            samples: Its samples that have started, finished or aborted. Failed ones are generated
                again.
        """
        begun = [
            sample
            for sample in samples
            if len(sample.tokens) and sample.finish_reason in (*WHOLE, FinishReason.ABORT)
        ]
        if not begun or any(sample.prompt_tokens is not None for sample in begun):
            return 0  # the episode of a program is begun again as a whole
        num_tokens, body = (
            sum(len(sample.tokens) for sample in begun),
            b"".join(_join_bytes(sample) for sample in begun),
        )
        described = [_described(sample) for sample in begun]
        header = orjson.dumps({"samples": described, "digest": _digest(described, body)})
        try:
            self._store.put_at(_key(prompt_group_id), header + b"\n" + body)
        except (ObjectError, StoreUnavailable) as error:
            log.warning(
                "partial_samples.lost",
                prompt_group_id=prompt_group_id,
                num_tokens=num_tokens,
                error=str(error),
            )
            return 0
        return num_tokens

    def find(self, prompt_group_id: str, *, num_samples: int) -> dict[int, GeneratedSample]:
        """Return the samples of a prompt group that another worker stored, by sample index; nothing
        if they are unusable.

        A sample to resume has the finish reason `abort`. At least one sample has it, or has not
        started.
        """
        try:
            if not self._store.exists(_key(prompt_group_id)):
                return {}
            samples = _parsed(self._store.get_at(_key(prompt_group_id)), prompt_group_id)
        except (ObjectError, ValueError, KeyError, TypeError) as error:
            log.warning(
                "partial_samples.unusable", prompt_group_id=prompt_group_id, error=str(error)
            )
            return {}
        is_over = len(samples) == num_samples and all(
            sample.finish_reason in WHOLE for sample in samples.values()
        )
        return {} if is_over or not samples.keys() <= set(range(num_samples)) else samples

    def forget(self, prompt_group_ids: Iterable[str]) -> None:
        """Delete the stored samples of prompt groups that are written."""
        self._store.delete([_key(prompt_group_id) for prompt_group_id in prompt_group_ids])


def _key(prompt_group_id: str) -> str:
    return f"{PREFIX}{prompt_group_id}"


def _digest(described: list[dict[str, Any]], body: bytes) -> str:
    return sha256(orjson.dumps(described) + body).hexdigest()


def _encode_arrays(sample: GeneratedSample) -> dict[str, np.ndarray]:
    """Return a sample's arrays as they are stored: little-endian, in C order."""
    arrays = {name: getattr(sample, name) for name in ARRAYS}
    return {
        name: np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        for name, array in arrays.items()
        if array is not None
    }


def _join_bytes(sample: GeneratedSample) -> bytes:
    return b"".join(array.tobytes() for array in _encode_arrays(sample).values())


def _described(sample: GeneratedSample) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "finish_reason": sample.finish_reason.value,
        "segments": [
            [segment.policy_version, segment.num_tokens, segment.kept_cache]
            for segment in sample.segments
        ],
        "arrays": [
            [name, array.dtype.str, list(array.shape)]
            for name, array in _encode_arrays(sample).items()
        ],
        "turns": [
            asdict(message) | {"parts": [_describe_part(part) for part in message.parts]}
            for message in sample.turns
        ],
    }


def _describe_part(part: ContentPart) -> list[Any]:
    media = None if part.media is None else asdict(part.media) | {"digest": part.media.digest.hex()}
    return [part.kind.value, part.text, media]


def _part(kind: str, text: str | None, media: dict[str, Any] | None) -> ContentPart:
    reference = (
        None if media is None else MediaRef(**media | {"digest": bytes.fromhex(media["digest"])})
    )
    return ContentPart(Modality(kind), text, reference)


def _message(
    parts: list[list[Any]], tool_calls: list[dict[str, Any]], **fields: Any
) -> ChatMessage:
    calls = [ToolCall(**call) for call in tool_calls]
    return ChatMessage(parts=[_part(*one) for one in parts], tool_calls=calls, **fields)


def _parsed(data: bytes, prompt_group_id: str) -> dict[int, GeneratedSample]:
    head, _, body = data.partition(b"\n")
    header = orjson.loads(head)
    if _digest(header["samples"], body) != header["digest"]:
        raise ValueError("the checksum does not match the stored bytes")
    samples, start = dict[int, GeneratedSample](), 0
    for part in header["samples"]:
        arrays: dict[str, Any] = {}
        for name, dtype_name, shape in part["arrays"]:
            dtype = np.dtype(dtype_name)
            if name not in ARRAYS or dtype.kind not in KINDS:
                raise ValueError(f"a sample has no array {name!r} of dtype {dtype_name}")
            count = int(np.prod(shape, dtype=np.int64))
            arrays[name] = (
                np.frombuffer(body, dtype, count, start)
                .reshape(shape)
                .astype(dtype.newbyteorder("="))
            )
            start += count * dtype.itemsize
        samples[int(part["sample_id"].rpartition("/")[2])] = GeneratedSample(
            sample_id=part["sample_id"],
            prompt_group_id=prompt_group_id,
            segments=tuple(VersionSegment(*segment) for segment in part["segments"]),
            finish_reason=FinishReason(part["finish_reason"]),
            turns=tuple(_message(**turn) for turn in part["turns"]),
            **arrays,
        )
    return samples
