"""Format a broker's data folder: an identity and the feature levels to start at, both written from Python."""

import base64
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from relax_events.broker.embedded.checkpoint import bootstrap_checkpoint
from relax_events.broker.security.scram import ScramCredential
from relax_events.errors import EnvironmentProblem

NODE_ID = 1
MARKER = "meta.properties"
MINIMUM_FREE_BYTES = 256 << 20
_MIB = 1 << 20


def ensure_formatted(data: Path, *, users: Sequence[ScramCredential] = (), node_id: int = NODE_ID, cluster_id: str = "") -> None:
    """Make `data` a formatted log folder that knows these users; one that is formatted already keeps its identity and records.

    `meta.properties` is what marks a folder as formatted, so it is written last and renamed into place: a crash in between formats again.

    Args:
        data: The log folder.
        users: Who can log in from the first moment.
        node_id: The node's number within its cluster.
        cluster_id: What all nodes of a cluster share; empty makes one up, for a cluster of one node.
    """
    marker = data / MARKER
    if is_formatted(data):
        return
    data.mkdir(parents=True, exist_ok=True)
    (data / "bootstrap.checkpoint").write_bytes(bootstrap_checkpoint(users=users))
    draft = data / f"{MARKER}.tmp"
    draft.write_text(f"version=1\ncluster.id={cluster_id or new_id()}\nnode.id={node_id}\ndirectory.id={new_id()}\n", encoding="ascii")
    draft.replace(marker)


def is_formatted(data: Path) -> bool:
    """Tell whether a log folder has been formatted."""
    return (data / MARKER).exists()


def new_id() -> str:
    """Return a random id as Kafka writes it: 16 bytes in URL-safe base64 without padding, never starting with a dash."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode("ascii").rstrip("=")
        if not text.startswith("-"):
            return text


def require_free_space(directory: Path, *, minimum_bytes: int = MINIMUM_FREE_BYTES) -> None:
    """Refuse to go on when the disk under `directory` is nearly full; a broker whose disk fills up ends.

    Raises:
        EnvironmentProblem: Less than the minimum is free.
    """
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < minimum_bytes:
        raise EnvironmentProblem(
            f"the disk under {directory} has {free_bytes / _MIB:.0f} MiB free, the embedded broker needs at least "
            f"{minimum_bytes / _MIB:.0f} MiB there; free some space or choose another place"
        )
