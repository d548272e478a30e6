"""The program of each engine's worker in test_broadcast: reads engine lists and publications from
stdin, and writes the received versions to stdout.
"""

import json
import os
import sys
import time
from contextlib import closing
from pathlib import Path

import structlog

from relax_events.config import WeightsConfig
from relax_events.events.parts import ObjectRef
from relax_events.events.types import BroadcastMembership, PolicyVersionPublished
from relax_events.objects import ObjectStore
from relax_events.runtime.failpoints import arm_failpoints
from relax_events.telemetry.metrics import WorkerMetrics
from relax_events.weights.artifact_writer import weights_digest
from relax_events.weights.broadcast.receiver import Receiver
from relax_events.weights.broadcast.transports import BroadcastReader


def main() -> None:
    """Serve until stdin ends."""
    store_uri, worker_id, folder = sys.argv[1:]
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    arm_failpoints(Path(folder), os.environ)
    receiver = Receiver(
        worker_id,
        WeightsConfig(),
        metrics=WorkerMetrics("rollout").weights,
    )
    with closing(BroadcastReader(ObjectStore.open(store_uri), receiver)) as transport:
        note = transport.subscribe(lambda: None)
        for line in sys.stdin:
            event = json.loads(line)
            if "join_token" in event:
                note(BroadcastMembership(**event))
                continue
            artifact = event["artifact"]
            reference = ObjectRef(
                artifact["uri"], bytes.fromhex(artifact["digest"]), artifact["num_bytes"]
            )
            published = PolicyVersionPublished(
                policy_version=event["policy_version"],
                artifact=reference,
                transports=[],
                start_offsets=[],
            )
            while transport.is_in_transit(published):
                time.sleep(0.001)
            weights = transport.fetch(published)
            reported = {
                "policy_version": weights.policy_version,
                "transport": weights.transport,
                "digest": weights_digest(weights.tensors).hex(),
            }
            print(json.dumps(reported), flush=True)


if __name__ == "__main__":
    main()
