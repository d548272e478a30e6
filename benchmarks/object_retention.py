"""How large a store grows over a long run whose large arrays are purged with their versions. Prints
a line of JSON.

python -m benchmarks.object_retention

Each step writes the routed experts of its samples as a role does; at each checkpoint what
`run.retain_versions` lets go is purged, as the controller does.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from relax_events.objects import ObjectStore
from relax_events.objects.claim_check import store_array
from relax_events.objects.version_objects import delete_objects_before, build_version_folder, list_stored_versions

NUM_STEPS, RETAINED, CHECKPOINT_EVERY = 2_000, 50, 20
SAMPLES_PER_STEP, ARRAY_SHAPE = 8, (512, 16, 8)
NUM_IMAGES, IMAGE_BYTES = 100, 20_000


def main() -> None:
    """Measure."""
    drawn = np.random.default_rng(0)
    largest = num_deleted = 0
    purge_seconds: list[float] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        store = ObjectStore.open(folder.as_uri())
        images = [drawn.bytes(IMAGE_BYTES) for _ in range(NUM_IMAGES)]
        references = [store.put(image, suffix=".png") for image in images]
        for step in range(NUM_STEPS):
            for _ in range(SAMPLES_PER_STEP):
                store_array(
                    drawn.integers(0, 128, ARRAY_SHAPE, dtype=np.uint8),
                    store,
                    folder=build_version_folder(step),
                )
            store.put(images[step % NUM_IMAGES], suffix=".png")
            if (step + 1) % CHECKPOINT_EVERY == 0:
                largest = max(largest, num_bytes_in(folder))
                started = time.perf_counter()
                num_deleted += delete_objects_before(store, step - RETAINED + 1)
                purge_seconds.append(time.perf_counter() - started)
        left = [store.get(reference) for reference in references]
        found = {
            "num_steps": NUM_STEPS,
            "written_bytes": NUM_STEPS * SAMPLES_PER_STEP * int(np.prod(ARRAY_SHAPE)),
            "largest_bytes": largest,
            "versions_left": len(list_stored_versions(store)),
            "num_deleted": num_deleted,
            "images_left": sum(image == data for image, data in zip(images, left, strict=True)),
            "longest_purge_seconds": round(max(purge_seconds), 4),
        }
    sys.stdout.write(json.dumps(found) + "\n")


def num_bytes_in(folder: Path) -> int:
    """Return the size of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
