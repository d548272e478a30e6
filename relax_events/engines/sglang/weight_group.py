"""Weights sent to a server's ranks by broadcast, without a folder that both see.

    worker, rank 0     POST /begin_weight_update
                       for each bucket: POST /update_weights_from_distributed  +  broadcast
                       POST /end_weight_update
    server, ranks 1..n receive a bucket each, and load it

The server reads the tensors' names and shapes from the call, and their bytes from the broadcast, so
both are in flight at once. If either fails, the group is aborted: a broadcast that a rank does not
join would wait for its deadline.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from relax_events.deadline import Deadline
from relax_events.engines.sglang.client import ServerRejected, ServerUnavailable, SGLangClient
from relax_events.weights.broadcast.channel import ConnectionLost
from relax_events.weights.broadcast.process_groups import GlooChannel, serve_rendezvous

BUCKET_BYTES = 512 * 1024**2
HTTPS_PORT, HTTP_PORT = 443, 80
CLOSE_SECONDS = 5.0


class WeightGroup:
    """A process group of this worker and a server's ranks. Used in one event loop."""

    def __init__(
        self, client: SGLangClient, *, seconds: float, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Prepare; `open` forms the group.

        Args:
            client: Of the server.
            seconds: Deadline of the group's start, and of each bucket.
            bucket_bytes: Size of a broadcast; all experts of a layer stay in one, even above it.
        """
        self._client, self._seconds, self._bucket_bytes = client, seconds, bucket_bytes
        self._name = f"relax-{secrets.token_hex(8)}"
        self._channel: GlooChannel | None = None
        self.is_broken = False

    async def open(self, num_ranks: int) -> None:
        """Form the group with a server of so many ranks.

        Raises:
            ServerUnavailable: The server did not join before the deadline.
            ServerRejected: It refuses.
        """
        host = find_local_address(self._client.url)
        deadline = Deadline(self._seconds)
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        # the server joins at the same prefix as torch's own groups have
        self._store = serve_rendezvous(listener, timeout_seconds=self._seconds)
        prefixed = PrefixStore(
            "cpu/", PrefixStore(f"{self._name}/", PrefixStore(self._name, self._store))
        )

        def join() -> None:
            self._channel = GlooChannel(
                prefixed, rank=0, host=host, deadline=deadline, num_ranks=1 + num_ranks
            )

        call = self._client.join_weight_group(
            host, port, name=self._name, num_ranks=1 + num_ranks, seconds=self._seconds
        )
        await self._run_both(call, join)

    async def send(self, tensors: Mapping[str, Tensor], *, name: str, flush_cache: bool) -> None:
        """Load a version into the server; its later tokens carry the name.

        Raises:
            ServerRejected: It refuses, or loaded a part; the group is closed.
            ServerUnavailable: It is lost, or did not receive a bucket before the deadline; the
                group is closed.
        """
        if self.is_broken:
            raise ServerUnavailable("the group of worker and server is closed after a failure")
        try:
            await self._client.begin_weight_update()
            buckets = list(split_into_buckets(tensors, max_bytes=self._bucket_bytes))
            for names in buckets:
                await self._send_bucket(
                    {one: tensors[one] for one in names},
                    name=name if names is buckets[-1] else None,
                    flush_cache=flush_cache and names is buckets[-1],
                )
            await self._client.end_weight_update()
        except (ServerRejected, ServerUnavailable):
            self._abort()
            raise

    async def close(self) -> None:
        """Leave the group; the server leaves it too if it answers."""
        if self._channel is None:
            return
        if not self.is_broken:
            with suppress(ServerRejected, ServerUnavailable):
                await self._client.leave_weight_group(self._name, seconds=CLOSE_SECONDS)
        self._abort()

    async def _send_bucket(
        self, tensors: Mapping[str, Tensor], *, name: str | None, flush_cache: bool
    ) -> None:
        flat = torch.cat(
            [one.detach().cpu().reshape(-1).view(torch.uint8) for one in tensors.values()]
        )
        deadline = Deadline(self._seconds)

        def broadcast() -> None:
            assert self._channel is not None, "called before `open`"
            self._channel.send(flat, deadline).wait()

        call = self._client.receive_bucket(
            names=list(tensors),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
            group=self._name,
            weight_version=name,
            flush_cache=flush_cache,
        )
        await self._run_both(call, broadcast)

    async def _run_both(self, call: Coroutine[Any, Any, None], action: Callable[[], None]) -> None:
        calling: asyncio.Future[None] = asyncio.ensure_future(call)
        acting: asyncio.Future[None] = asyncio.ensure_future(asyncio.to_thread(action))
        done, _ = await asyncio.wait({calling, acting}, return_when=asyncio.FIRST_EXCEPTION)
        failed = next((one for one in (calling, acting) if one in done and one.exception()), None)
        if failed is None:
            return
        self._abort()
        calling.cancel()
        await asyncio.gather(calling, acting, return_exceptions=True)
        error = failed.exception()
        if isinstance(error, ConnectionLost | RuntimeError | OSError):
            raise ServerUnavailable(
                f"{self._client.url} left the group that sends weights: {error}"
            ) from error
        assert error is not None
        raise error

    def _abort(self) -> None:
        self.is_broken = True
        if self._channel is not None:
            self._channel.abort()


def split_into_buckets(tensors: Mapping[str, Tensor], *, max_bytes: int) -> Iterator[list[str]]:
    """Yield the names of each bucket, wide dtypes first: so each tensor begins at a multiple of its
    element's size. All experts of a layer are in one bucket, since a server may fuse them.
    """
    bucket: list[str] = []
    size = 0
    for _, members in groupby(tensors, key=lambda name: name.partition(".experts.")[0]):
        names = list(members)
        num_bytes = sum(tensors[name].nbytes for name in names)
        if bucket and size + num_bytes > max_bytes:
            yield _by_width(bucket, tensors)
            bucket, size = [], 0
        bucket += names
        size += num_bytes
    if bucket:
        yield _by_width(bucket, tensors)


def _by_width(names: list[str], tensors: Mapping[str, Tensor]) -> list[str]:
    return sorted(names, key=lambda name: -tensors[name].element_size())


def find_local_address(url: str) -> str:
    """Return the address of this machine from which a server is reached."""
    parts = urlsplit(url)
    port = parts.port or (HTTPS_PORT if parts.scheme == "https" else HTTP_PORT)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((parts.hostname or "127.0.0.1", port))
        host: str = probe.getsockname()[0]
    return host
