"""Redis streams, one stream a channel, one consumer group a consumer; samples encoded by our
codec."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import redis

from benchmarks.planes.protocol import UNDER_WAY, Got
from benchmarks.planes.samples import copy_sample, sample
from relax_events.events.codec import EventCodec
from relax_events.events.parts import now_micros
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import SampleReady

FIELD = b"sample"
MEMBER = "reader"


def open_client(address: str) -> Any:
    """Return a client; replies stay bytes."""
    host, port = address.split(":")
    return redis.Redis(host=host, port=int(port), socket_timeout=60)


class RedisWriter:
    """Adds samples to a stream: one command a sample, in one pipeline a batch."""

    def __init__(self, address: str, channel: str, num_tokens: int) -> None:
        self._client, self._channel = open_client(address), channel
        self._codec, self._pattern = EventCodec(), sample(num_tokens)

    def put(self, rows: Sequence[int], ready_at: int) -> None:
        """See `Writer.put`."""
        self._add((row, ready_at) for row in rows)

    def stream(self, num_samples: int) -> None:
        """See `Writer.stream`."""
        for first in range(0, num_samples, UNDER_WAY):
            self._add(
                (row, now_micros()) for row in range(first, min(first + UNDER_WAY, num_samples))
            )

    def _add(self, samples: Iterable[tuple[int, int]]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for row, ready_at in samples:
            pipeline.xadd(
                self._channel,
                {FIELD: self._codec.encode(copy_sample(self._pattern, row, ready_at))},
            )
        pipeline.execute()

    def drop(self) -> None:
        """See `Writer.drop`."""
        self._client.delete(self._channel)
        self._client.close()


class RedisReader:
    """The one member of a consumer group; it first claims what a dead one before it left
    pending."""

    def __init__(self, address: str, channel: str, consumer: str) -> None:
        self._client, self._channel, self._group, self._codec = (
            open_client(address),
            channel,
            consumer,
            EventCodec(),
        )
        try:
            self._client.xgroup_create(channel, consumer, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._claimed = [
            entry
            for entry in self._client.xautoclaim(
                channel, consumer, MEMBER, min_idle_time=0, count=10_000
            )[1]
            if entry[1]
        ]

    def _fetch(self, max_samples: int, timeout_seconds: float) -> Any:
        entries, self._claimed = self._claimed[:max_samples], self._claimed[max_samples:]
        if entries:
            return entries
        streams = self._client.xreadgroup(
            self._group,
            MEMBER,
            {self._channel: ">"},
            count=max_samples,
            block=int(timeout_seconds * 1000),
        )
        return streams[0][1] if streams else []

    def get(self, max_samples: int, *, timeout_seconds: float) -> list[Got]:
        """See `Reader.get`."""
        entries = self._fetch(max_samples, timeout_seconds)
        events = [
            event
            for _, fields in entries
            for event in split_samples(self._codec.decode(fields[FIELD]))
        ]
        if entries:
            self._client.xack(self._channel, self._group, *(entry for entry, _ in entries))
        return [
            Got(event.key.row, event.ready_at) for event in events if isinstance(event, SampleReady)
        ]

    def take(self, max_samples: int, *, timeout_seconds: float) -> int:
        """See `Reader.take`."""
        return len(self._fetch(max_samples, timeout_seconds))

    def close(self) -> None:
        """See `Reader.close`."""
        self._client.close()


open_writer, open_reader = RedisWriter, RedisReader
