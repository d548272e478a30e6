"""Exported rows equal the log's, by every exporter, with verified media."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
from relax_events.reports.sample_export import SampleRows, export_samples

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
    exported = export_samples(log, [view()], path)
    (row,) = rows_of(path)
    fields = ("reasoning_content", "tool_calls", "name", "tool_call_id")
    assert row["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "say hi", "path": None}]}
        | dict.fromkeys(fields)
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
    export_samples(log, [stored], path, tokens=True)
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
        export_samples(log, views, tmp_path / f"samples.{suffix}", media=tmp_path / "media")
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
    exported = export_samples(log, [with_image(store, 0), with_image(store, 1)], path)
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
    export_samples(log, [bad, good], tmp_path / "samples.jsonl")
    assert [row["sample_id"] for row in rows_of(tmp_path / "samples.jsonl")] == ["000000-0000-0/1"]
    assert log.unreadable.count == 1
    assert log.unreadable.named[0].startswith("samples[0]@0: ")
    assert "was altered" in log.unreadable.named[0]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_failed_export_leaves_no_file(log: RunLog, tmp_path: Path, suffix: str) -> None:
    def fail_in_the_middle() -> Iterator[SampleView]:
        yield view()
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        export_samples(log, fail_in_the_middle(), tmp_path / f"samples.{suffix}")
    assert [path.name for path in tmp_path.iterdir() if path.name != "objects"] == []


def test_json_lines_go_to_stdout_without_an_output_file(
    log: RunLog, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    export_samples(log, [view()], None)
    assert orjson.loads(capfdbinary.readouterr().out)["sample_id"] == "000000-0000-0/0"


def test_unknown_output_file_extension_is_rejected(log: RunLog, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"an exporter for --output-file .*samples\.csv is not installed; installed are jsonl, "
        "parquet",
    ):
        export_samples(log, [view()], tmp_path / "samples.csv")


def test_parquet_without_an_output_file_is_rejected(log: RunLog) -> None:
    with pytest.raises(ConfigError, match="writes a file; give --output-file"):
        export_samples(log, [view()], None, exporter="parquet")


def test_exporter_in_a_file_writes_the_rows_with_what_it_names(log: RunLog, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def ids(rows, *, path):\n    path.write_text(' '.join(row['sample_id'] for row in rows))\n"
    )
    path = tmp_path / "ids.txt"
    rows = export_samples(log, [view(0), view(1)], path, exporter=f"{tmp_path}/mine.py:ids")
    assert path.read_text() == "000000-0000-0/0 000000-0000-0/1"
    assert isinstance(rows, SampleRows)
    assert rows.num_rows == 2


def test_documented_exporter_writes_conversations(log: RunLog, tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "extensions.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    (source,) = [block for block in blocks if "def conversations(" in block]
    (tmp_path / "mine.py").write_text(source)
    path = tmp_path / "conversations.jsonl"
    export_samples(log, [view()], path, exporter=f"{tmp_path}/mine.py:conversations")
    (conversation,) = rows_of(path)
    assert conversation == {
        "messages": [
            {"role": "user", "content": "say hi"},
            {"role": "assistant", "content": "hi"},
        ],
        "reward": 0.5,
    }
