"""How much memory the embedded broker may take: bounded by the machine's, and safe from whatever its clients send at once.

What fills a broker's heap are requests that it has read and not answered yet: every client may have five under way, of up to 16 MiB each. So the
broker reads no further requests while those at hand take a quarter of the heap (`queued.max.request.bytes`): clients wait, and nothing is lost.
"""

from pathlib import Path

import psutil

LEAST_MIB, MOST_MIB = 512, 4096
SHARE_OF_MEMORY = 16
"""The heap is this part of the memory; the page cache, from which a broker reads, is worth more to it than heap."""
SHARE_OF_HEAP = 4
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def usual_heap_mib() -> int:
    """Return the heap that the broker of this machine, or of this container, is given where nobody says otherwise."""
    return heap_mib_of(min(psutil.virtual_memory().total, _container_bytes()))


def heap_mib_of(memory_bytes: float) -> int:
    """Return the heap for so much memory."""
    return int(min(max(memory_bytes / SHARE_OF_MEMORY / (1 << 20), LEAST_MIB), MOST_MIB))


def request_bytes(heap_mib: int) -> int:
    """Return how many bytes of requests a broker with such a heap may hold at a time."""
    return (heap_mib << 20) // SHARE_OF_HEAP


def _container_bytes() -> float:
    try:
        text = CONTAINER_LIMIT.read_text().strip()
    except OSError:
        return float("inf")
    return float(text) if text.isdecimal() else float("inf")
