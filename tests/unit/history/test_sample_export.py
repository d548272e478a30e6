"""Exported rows equal the log's, in both formats, with verified media."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pyarrow.parquet
import pytest
from event_samples import ended, rolled_out, scored
from small_settings import small_run

from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage, ContentPart, MediaRef, Modality, Outcome
from relax_events.history.run_log import RunLog, Unreadable
from relax_events.history.samples.view import SampleView
from relax_events.objects import ObjectStore, check_in
from relax_events.reports.sample_export import Export

PIXELS = b"\x89PNG, or so it says"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open((tmp_path / "objects").as_uri())


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    """Return a fake of the parts of a run's log that an export needs: the run file, the newest version,
    the count."""
    tree = {
        "run": {"id": "exported"},
        "model": {"path": "model"},
        "data": {"source": "jsonl:rows"},
        "objects": {"uri": (tmp_path / "objects").as_uri(), "by_run": False},
    }
    config = small_run(tree)
    return cast("RunLog", SimpleNamespace(config=config, newest_version=3, unreadable=Unreadable()))


def view(index: int = 0, **changes: Any) -> SampleView:
    sample = rolled_out(index=index, version=1, **changes)
    return SampleView(
        sample,
        f"samples[0]@{index}",
        1,
        scored(index=index, version=1, reward=0.5),
        ended(outcome=Outcome.TRAINED, version=1),
    )


def with_image(store: ObjectStore, index: int = 0) -> SampleView:
    kept = store.put(PIXELS, suffix=".png")
    media = MediaRef(kept.uri, kept.digest, "image/png", kept.num_bytes)
    parts = [ContentPart(Modality.IMAGE, media=media), ContentPart(Modality.TEXT, "what is it?")]
    return view(index, messages=[ChatMessage("user", parts)])


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_exported_row_holds_sample_reward_and_outcome(log: RunLog, tmp_path: Path) -> None:
    path = tmp_path / "out" / "samples.jsonl"
    with Export(log, path) as exported:
        exported.add(view())
    (row,) = rows_of(path)
    assert row["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "say hi", "path": None}]}
    ]
    assert (row["sample_id"], row["completion"], row["reward"], row["reward_name"]) == (
        "000000-0000-0/0",
        "hi",
        0.5,
        "exact_match",
    )
    assert (row["outcome"], row["train_step"], row["staleness"], row["policy_version"]) == (
        "trained",
        1,
        0,
        1,
    )
    assert "tokens" not in row
    assert (exported.num_rows, exported.num_media) == (1, 0)
    assert not (path.parent / "samples-media").exists()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_tokens_are_exported_on_request_including_from_the_object_store(
    log: RunLog, store: ObjectStore, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"samples.{suffix}"
    stored = view()
    stored = replace(stored, sample=check_in(stored.sample, store, claim_check_threshold_bytes=1))
    with Export(log, path, tokens=True) as exported:
        exported.add(stored)
    row = rows_of(path)[0] if suffix == "jsonl" else pyarrow.parquet.read_table(path).to_pylist()[0]
    assert (row["tokens"], row["loss_mask"], row["rollout_logprobs"]) == (
        [5, 6, 7, 8],
        [0, 0, 1, 1],
        [0, 0, -0.5, -0.25],
    )


def test_parquet_export_holds_the_same_rows_as_json_lines(
    log: RunLog, store: ObjectStore, tmp_path: Path
) -> None:
    views = [with_image(store, 0), replace(view(1), score=None, outcome_event=None)]
    for suffix in ("jsonl", "parquet"):
        with Export(log, tmp_path / f"samples.{suffix}", media=tmp_path / "media") as exported:
            for item in views:
                exported.add(item)
    table = pyarrow.parquet.read_table(tmp_path / "samples.parquet")
    for row, other in zip(rows_of(tmp_path / "samples.jsonl"), table.to_pylist(), strict=True):
        micros = int(other.pop("rolled_out_at").timestamp() * 1e6)
        assert (
            other | {"reward_components": dict(other["reward_components"]), "rolled_out_at": micros}
            == row
        )


def test_media_are_saved_once_by_content_with_relative_paths(
    log: RunLog, store: ObjectStore, tmp_path: Path
) -> None:
    path = tmp_path / "samples.jsonl"
    with Export(log, path) as exported:
        exported.add(with_image(store, 0))
        exported.add(with_image(store, 1))
    paths = [row["messages"][0]["content"][0]["path"] for row in rows_of(path)]
    assert paths[0] == paths[1]
    assert (tmp_path / paths[0]).read_bytes() == PIXELS
    assert paths[0].startswith("samples-media/")
    assert paths[0].endswith(".png")
    assert exported.num_media == 1


def test_sample_with_altered_media_is_skipped_and_reported(
    log: RunLog, store: ObjectStore, tmp_path: Path
) -> None:
    good, bad = view(1), with_image(store, 0)
    media = bad.sample.messages[0].parts[0].media
    assert media is not None
    store.put_at(store.key(media.uri), b"\x89PNG, or so it lies")
    with Export(log, tmp_path / "samples.jsonl") as exported:
        exported.add(bad)
        exported.add(good)
    assert [row["sample_id"] for row in rows_of(tmp_path / "samples.jsonl")] == ["000000-0000-0/1"]
    assert log.unreadable.count == 1
    assert log.unreadable.named[0].startswith("samples[0]@0: ")
    assert "was altered" in log.unreadable.named[0]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_failed_export_leaves_no_file(log: RunLog, tmp_path: Path, suffix: str) -> None:
    def fail_in_the_middle() -> None:
        with Export(log, tmp_path / f"samples.{suffix}") as exported:
            exported.add(view())
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail_in_the_middle()
    assert [path.name for path in tmp_path.iterdir() if path.name != "objects"] == []


def test_json_lines_go_to_stdout_without_an_output_file(
    log: RunLog, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with Export(log, None) as exported:
        exported.add(view())
    assert orjson.loads(capfdbinary.readouterr().out)["sample_id"] == "000000-0000-0/0"


def test_unknown_output_file_extension_is_rejected(log: RunLog, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"--output-file must end in \.jsonl, \.parquet or \.html, got .*samples\.csv",
    ):
        Export(log, tmp_path / "samples.csv")
