"""Prints what a tracker has kept offline, as JSON: the points (step, value) by name of each of its
runs. Runs in the environment of `make trackers`: `python tracker_readers.py TRACKER FOLDER`.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Points = dict[str, list[tuple[int, float]]]
BLOCK_BYTES, HEADER_BYTES = 32768, 7
FILE_HEADER = b":W&B"
"""Of the files of W&B, which are logs in LevelDB's form: blocks of records, large ones in parts."""


def read_tensorboard(folder: Path) -> list[Points]:
    """Read the event files of one run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(next(folder.rglob("tensorboard")))).Reload()
    names = read.Tags()["scalars"]
    return [{name: [(one.step, one.value) for one in read.Scalars(name)] for name in names}]


def read_trackio(folder: Path) -> list[Points]:
    """Read the SQLite file of a project, whose runs have names."""
    (path,) = (folder / "trackio").glob("*.db")
    runs: dict[str, Points] = defaultdict(lambda: defaultdict(list))
    with sqlite3.connect(path) as opened:
        for run, step, metrics in opened.execute(
            "select run_name, step, metrics from metrics order by id"
        ):
            for name, value in json.loads(metrics).items():
                runs[run][name].append((step, value))
    return list(runs.values())


def read_mlflow(folder: Path) -> list[Points]:
    """Ask MLflow's own client for the history of every metric."""
    from mlflow import MlflowClient

    del folder
    client, found = MlflowClient(), []
    experiment = client.get_experiment_by_name("relax-events")
    for run in client.search_runs([experiment.experiment_id]):
        assert run.info.status == "FINISHED", run.info.status
        history = {
            name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics
        }
        found.append(
            {name: [(one.step, one.value) for one in points] for name, points in history.items()}
        )
    return found


def read_clearml(folder: Path) -> list[Points]:
    """Read the metrics of every offline session, in the order of their closing."""
    found = []
    sessions = (folder / "clearml" / "offline").glob("*/metrics.jsonl")
    for path in sorted(sessions, key=lambda one: one.stat().st_mtime):
        assert path.parent.with_suffix(".zip").exists(), "the session is not closed"
        points: Points = defaultdict(list)
        for line in path.read_text().splitlines():
            for event in json.loads(line):
                points[f"{event['metric']}/{event['variant']}"].append(
                    (event["iter"], event["value"])
                )
        found.append(points)
    return found


def read_wandb(folder: Path) -> list[Points]:
    """Read the offline files of every process, in the order of their names, which begin with the
    time.
    """
    from wandb.proto import wandb_internal_pb2

    points: Points = defaultdict(list)
    for path in sorted(folder.rglob("run-*.wandb"), key=lambda one: one.parent.name):
        exits = 0
        for data in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            exits += record.HasField("exit")
            row = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in row.items():
                axis = f"{name.rpartition('/')[0]}/step"
                if axis in row and name != axis:
                    points[name].append((row[axis], value))
        assert exits == 1, "the process ended without closing it"
    return [points]


def log_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's form, whole."""
    assert data.startswith(FILE_HEADER)
    at, parts = HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER_BYTES:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + HEADER_BYTES : at + HEADER_BYTES + length]
        at += HEADER_BYTES + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


READERS: dict[str, Any] = {
    "tensorboard": read_tensorboard,
    "trackio": read_trackio,
    "mlflow": read_mlflow,
    "clearml": read_clearml,
    "wandb": read_wandb,
}

if __name__ == "__main__":
    print(json.dumps(READERS[sys.argv[1]](Path(sys.argv[2]))))
