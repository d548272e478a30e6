"""One side of a policy version, in a process of its own: the trainer that publishes it, or a worker
that loads it. Called by `benchmarks.version_price`; prints a line of JSON for each version.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.head_memory import CLEAR_PEAK, peak_bytes
from relax_events.config import EngineConfig, ModelConfig
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.events.parts import ObjectRef
from relax_events.events.types import PolicyVersionPublished
from relax_events.objects import ObjectStore
from relax_events.training.backend.weight_stream import split_into_buckets, weight_parts
from relax_events.weights.artifact_writer import delete_weights
from relax_events.weights.file_content import FileContent, lay_out
from relax_events.weights.reused_memory import ReusedMemory
from relax_events.weights.transport import StorePublisher, StoreReader


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def measured(work: Callable[[], Any], *, memory: int) -> tuple[dict[str, float], Any]:
    """Call a function; return the processor time of all threads, seconds, and by how many bytes the
    resident memory was above what is given at its highest, and what it returns.
    """
    Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    value = work()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "user": after.ru_utime - before.ru_utime,
        "system": after.ru_stime - before.ru_stime,
        "seconds": seconds,
        "bytes": max(0, peak_bytes() - memory),
    }, value


class Weights:
    """The weights of a model without its optimizer; the part of a trainer backend that publishing
    needs.
    """

    def __init__(self, model: Path) -> None:
        module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self._parameters = {  # copied: what is mapped would count as memory once it is read
            name: parameter.detach().clone() for name, parameter in module.named_parameters()
        }

    def weight_buckets(self, *, max_bytes: int) -> Iterator[dict[str, Tensor]]:
        """Yield the weights as backend `torch` does on one rank."""
        for names in split_into_buckets(self._parameters, max_bytes=max_bytes):
            yield {name: self._parameters[name].detach() for name in names}


def publish(model: Path, store: ObjectStore, num_versions: int) -> None:
    """Be the trainer: publish versions as the trainer does by default."""
    backend: Any = Weights(model)
    publisher, lender = StorePublisher(store), ReusedMemory()
    memory = resident_bytes()

    def snapshot() -> list[FileContent]:
        return list(lay_out(weight_parts(backend), lender=lender))

    for version in range(num_versions):
        waited, files = measured(snapshot, memory=memory)
        found, (artifact, _) = measured(
            partial(publisher.publish, files, policy_version=version), memory=memory
        )
        del files
        delete_weights(store, version - 2)
        found = {
            "user": waited["user"] + found["user"],
            "system": waited["system"] + found["system"],
            "seconds": waited["seconds"],
            "stored_seconds": waited["seconds"] + found["seconds"],
            "bytes": max(waited["bytes"], found["bytes"]),
        }
        reference = [artifact.uri, artifact.digest.hex(), artifact.num_bytes]
        print(json.dumps(found | {"version": version, "artifact": reference}), flush=True)
        sys.stdin.readline()


def load(model: Path, store: ObjectStore, num_versions: int) -> None:
    """Be a worker: load the versions that the lines of the standard input name."""
    config = EngineConfig(max_running_samples=1, max_context_tokens=64, threads=1)
    settings = ModelConfig(dtype="bfloat16", path=model, device="cpu")
    reader = StoreReader(store)
    with closing(TransformersEngine(model, config=config, model=settings)) as engine:
        print(json.dumps({}), flush=True)
        for _ in range(num_versions):
            line = json.loads(sys.stdin.readline())
            uri, digest, num_bytes = line["artifact"]
            published = PolicyVersionPublished(
                policy_version=line["version"],
                artifact=ObjectRef(uri, bytes.fromhex(digest), num_bytes),
                transports=["store"],
                start_offsets=[],
            )

            def fetch_and_load(published: PolicyVersionPublished) -> None:
                engine.load_weights(reader.fetch(published))

            found, _ = measured(partial(fetch_and_load, published), memory=resident_bytes())
            print(json.dumps(found), flush=True)


def main() -> None:
    """Be the side that the arguments name."""
    side, model, uri, num_versions = sys.argv[1:]
    torch.set_num_threads(1)
    work = {"trainer": publish, "worker": load}[side]
    work(Path(model), ObjectStore.open(uri), int(num_versions))


if __name__ == "__main__":
    main()
