"""TransferQueue with its simple storage: two storage units, one controller, clients that are Ray
drivers.

Samples go in as the tensors that its users put (stacked already, which is not counted) and come out
as tensors: no codec of ours. `python -m benchmarks.planes.transfer_queue <folder>` is the server:
it prints its address and ends when its input is closed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.planes.protocol import UNDER_WAY, Got
from benchmarks.planes.samples import arrays

FIELDS = ["tokens", "loss_mask", "rollout_logprobs", "advantages", "row", "ready_at"]
ROOT = Path(__file__).parents[2]
STOP_SECONDS = 30.0
# its controller notifies no client when samples come; asked in between it would be busy with that
RETRY_SECONDS = 0.002
# its client hangs on a dead storage unit for 200 s, three times; who looks for what is left needn't
IMPATIENT = {
    "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "1",
    "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "1",
    "TQ_SIMPLE_STORAGE_PROBE_TIMEOUT": "1",
}
ENVIRONMENT = {
    "TQ_LOGGING_LEVEL": "CRITICAL",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_AUTH_MODE": "token",  # our clients share a token with our cluster, and no one else's do
}


def connect(address: str) -> Any:
    """Join the Ray cluster and return a client of the queue that runs there."""
    import ray
    import transfer_queue

    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        transfer_queue.init()
    return transfer_queue.get_client()


class TransferQueueWriter:
    """Puts stacked samples into a partition."""

    def __init__(self, address: str, channel: str, num_tokens: int) -> None:
        import torch

        self._client, self._channel = connect(address), channel
        self._arrays = {name: torch.from_numpy(array) for name, array in arrays(num_tokens).items()}
        self._stacked: dict[int, Any] = {}

    def _data(self, rows: Sequence[int], ready_at: int) -> Any:
        import torch
        from tensordict import TensorDict

        size = len(rows)
        if size not in self._stacked:
            self._stacked[size] = {
                name: array.repeat(size, 1) for name, array in self._arrays.items()
            }
        stamps = {"row": torch.tensor(list(rows)), "ready_at": torch.full((size,), ready_at)}
        return TensorDict(self._stacked[size] | stamps, batch_size=size)

    def prepare(self, batch: int) -> None:
        """Stack a batch before the clock runs."""
        self._data(range(batch), 0)

    def put(self, rows: Sequence[int], ready_at: int) -> None:
        """See `Writer.put`."""
        self._client.put(data=self._data(rows, ready_at), partition_id=self._channel)

    def stream(self, num_samples: int) -> None:
        """See `Writer.stream`."""
        self._client._run_coroutine(self._stream(num_samples))  # noqa: SLF001 - its own synchronous calls go this way, on its own loop

    async def _stream(self, num_samples: int) -> None:
        free = asyncio.Semaphore(UNDER_WAY)

        async def put(row: int) -> None:
            async with free:
                await self._client.async_put(
                    data=self._data([row], time.time_ns() // 1000), partition_id=self._channel
                )

        await asyncio.gather(*(put(row) for row in range(num_samples)))

    def drop(self) -> None:
        """See `Writer.drop`."""
        self._client.clear_partition(self._channel)


class TransferQueueReader:
    """A task: it gets every sample of the partition once; a received sample counts as
    consumed."""

    def __init__(self, address: str, channel: str, consumer: str) -> None:
        self._client, self._channel, self._task = connect(address), channel, consumer

    def _meta(self, max_samples: int, timeout_seconds: float) -> Any:
        deadline = time.monotonic() + timeout_seconds
        while not len(
            meta := self._client.get_meta(
                FIELDS, batch_size=max_samples, partition_id=self._channel, task_name=self._task
            )
        ):
            if time.monotonic() > deadline:
                break
            time.sleep(RETRY_SECONDS)
        return meta

    def get(self, max_samples: int, *, timeout_seconds: float) -> list[Got]:
        """See `Reader.get`; it gives `max_samples` or none."""
        meta = self._meta(max_samples, timeout_seconds)
        if not len(meta):
            return []
        data = self._client.get_data(meta)
        return [
            Got(row, ready_at)
            for row, ready_at in zip(
                data["row"].flatten().tolist(), data["ready_at"].flatten().tolist(), strict=True
            )
        ]

    def take(self, max_samples: int, *, timeout_seconds: float) -> int:
        """See `Reader.take`."""
        return len(self._meta(max_samples, timeout_seconds))

    def close(self) -> None:
        """See `Reader.close`; the client serves the next reader of this process."""


class TransferQueueServer:
    """A Ray cluster of one node with the queue's controller and storage in it."""

    def __init__(self, python: Path, directory: Path) -> None:
        self.environment = ENVIRONMENT | {"RAY_AUTH_TOKEN": uuid.uuid4().hex}
        self._command = [str(python), "-m", "benchmarks.planes.transfer_queue", str(directory)]
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    def start(self) -> None:
        """See `Server.start`; a storage unit that was killed does not come back."""
        if self._process is None:
            environment = os.environ | self.environment
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env=environment,
                text=True,
            )
            assert self._process.stdout is not None
            self.address = self._process.stdout.readline().strip()
            if not self.address:
                raise RuntimeError("TransferQueue did not start; see the lines above")

    def pids(self) -> list[int]:
        """See `Server.pids`."""
        if self._process is None:
            return []
        return [
            self._process.pid,
            *(
                process.pid
                for process in psutil.Process(self._process.pid).children(recursive=True)
            ),
        ]

    def kill_storage(self) -> None:
        """See `Server.kill_storage`: one of the two storage units."""
        unit = next(
            pid for pid in self.pids() if "StorageUnit" in " ".join(psutil.Process(pid).cmdline())
        )
        os.kill(unit, signal.SIGKILL)
        self.environment |= IMPATIENT

    def stop(self) -> None:
        """See `Server.stop`."""
        if self._process is not None:
            try:
                self._process.communicate(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:  # it waits for a storage unit that was killed
                for pid in reversed(self.pids()):
                    os.kill(pid, signal.SIGKILL)


def serve(directory: str) -> None:
    """Run the queue until the input is closed; Ray's files go into the directory."""
    import ray
    import transfer_queue
    from omegaconf import OmegaConf

    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Two units and one controller want a core each, whatever the machine has; clients are drivers
    # and take none.
    ray.init(
        num_cpus=8,
        _node_ip_address="127.0.0.1",
        _temp_dir=directory,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    print(ray.get_runtime_context().gcs_address, file=answer, flush=True)
    sys.stdin.read()
    transfer_queue.close()
    ray.shutdown()


open_writer, open_reader = TransferQueueWriter, TransferQueueReader

if __name__ == "__main__":
    serve(sys.argv[1])
