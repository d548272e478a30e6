"""Runs on pictures, from the row of the data to the gradient."""

from __future__ import annotations

import base64
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from command_line import SPREAD_REWARD, Relax, report_of, write_rows

from relax_events.broker.connection import Connection
from relax_events.broker.consumer import LogReader
from relax_events.broker.producer import RecordProducer
from relax_events.broker.records import OutRecord
from relax_events.config import load_run_config
from relax_events.events.codec import EventCodec
from relax_events.events.parts import ChatMessage, ContentPart, MediaRef, Modality
from relax_events.events.types import Event, PromptGroupEnded, PromptGroupIssued, SampleRolledOut, TrainStepCommitted
from relax_events.topics import TopicPlan
from tests.unit.pictures import picture_file

ROOT = Path(__file__).parents[2]
GUEST = "000000-1000000-0"
SETTINGS = """
[run]
id = "{run_id}"
num_steps = 2
groups_per_step = 4
samples_per_prompt = 4
mode = "sync"
max_staleness = 0

[model]
path = "model"
tiny = {{ family = "qwen3_vl", hidden_size = 32, num_layers = 1, corpus_rows = 8 }}

[data]
source = "jsonl:rows.jsonl"
multimodal_keys = {{ image = "pictures" }}
media_root = "pictures"
shuffle = false

[engine]
max_context_tokens = 128
sampling = {{ max_new_tokens = 4 }}

[reward]
function = "reward.py:spread"

[algorithm]
old_logprobs = "actor"

[broker]
bootstrap_servers = "{bootstrap_servers}"
"""


@pytest.fixture
def picture_run(tmp_path: Path, bootstrap_servers: str, run_id: str) -> Path:
    """Write a run file and rows about one picture each, two, and none; the second and the fourth row bring what can't be used."""
    (tmp_path / "pictures").mkdir()
    for number in range(4):
        (tmp_path / "pictures" / f"{number}.png").write_bytes(picture_file(32 + 16 * number, 48, seed=number))
    cut_off = base64.b64encode(picture_file(96, 96)[:500]).decode()
    rows: list[dict[str, Any]] = [{"prompt": f"<image>what is {number}?", "pictures": [f"{number % 4}.png"]} for number in range(6)]
    rows.insert(1, {"prompt": "<image>?", "pictures": [f"data:image/png;base64,{cut_off}"]})
    rows.insert(3, {"prompt": "<image>?", "pictures": ["../run.toml"]})
    rows += [{"prompt": "<image> or <image>?", "pictures": ["1.png", "2.png"]}, {"prompt": "and without?", "pictures": None}]
    write_rows(tmp_path / "rows.jsonl", [{"answer": "", **row} for row in rows])
    (tmp_path / "reward.py").write_text(SPREAD_REWARD)
    path = tmp_path / "run.toml"
    path.write_text(SETTINGS.format(run_id=run_id, bootstrap_servers=bootstrap_servers))
    return path


def events_of(bootstrap_servers: str, run_id: str, **partitions: int) -> list[Event]:
    """Read topics of a run; their names with an underscore for the dot."""
    places = [
        (f"relax.{run_id}.{entity.replace('_', '.', 1).replace('_', '-')}", index) for entity, count in partitions.items() for index in range(count)
    ]
    codec = EventCodec()
    with closing(LogReader(Connection(bootstrap_servers, client_id="test"))) as reader:
        return [codec.decode(record.value) for record in reader.read_to_end(places)]


def ask_about_a_picture_that_is_gone(bootstrap_servers: str, run_id: str, *, objects_uri: str) -> str:
    """Issue a prompt group whose picture is not in the store, and return the picture's address."""
    uri = f"{objects_uri}/sha256/00/{64 * '0'}.png"
    picture = ContentPart(Modality.IMAGE, media=MediaRef(uri, bytes(32), "image/png", 100, width=32, height=32))
    issued = PromptGroupIssued(
        prompt_group_id=GUEST,
        train_step=0,
        group_index=1_000_000,
        attempt=0,
        row=-1,
        required_policy_version=0,
        samples_per_prompt=2,
        messages=[ChatMessage("user", [picture])],
        seed=1,
    )
    with closing(RecordProducer(Connection(bootstrap_servers, client_id="test"), one_record_per_batch=True)) as producer:
        producer.write([OutRecord(f"relax.{run_id}.prompt.groups", EventCodec().encode(issued), key=GUEST, partition=0)])
    return uri


@pytest.mark.timeout(300)
def test_run_trains_on_pictures_and_hostile_ones_end_their_own_rows_alone(
    relax: Relax, picture_run: Path, bootstrap_servers: str, run_id: str
) -> None:
    assert relax("topics", "apply", picture_run, "--yes").code == 0
    objects_uri = (picture_run.parent / ".relax/runs" / run_id / "objects").as_uri()
    gone = ask_about_a_picture_that_is_gone(bootstrap_servers, run_id, objects_uri=objects_uri)
    ended = relax("run", picture_run, timeout_seconds=280)
    assert ended.code == 0, ended.err

    report = report_of(picture_run.parent, run_id)
    assert (report["succeeded"], report["samples_lost"], report["ledger_problems"]) == (True, 0, [])
    assert report["prompts_passed_over"] == {"media_truncated": 1, "media_outside_root": 1}
    steps = [event for event in events_of(bootstrap_servers, run_id, control_train_steps=1) if isinstance(event, TrainStepCommitted)]
    assert len(steps) == 2
    assert max(step.figures["mismatch_max_abs"] for step in steps) < 1e-4

    outcomes = [event for event in events_of(bootstrap_servers, run_id, control_group_outcomes=1) if isinstance(event, PromptGroupEnded)]
    (guests_end,) = [event for event in outcomes if event.prompt_group_id == GUEST]
    assert guests_end.outcome == "failed"
    assert gone in guests_end.reason
    assert "there is no such object" in guests_end.reason

    config = load_run_config(picture_run, environment={})
    samples = [
        event
        for event in events_of(bootstrap_servers, run_id, rollout_samples=TopicPlan.of(config).num_sample_partitions)
        if isinstance(event, SampleRolledOut)
    ]
    references = {part.media for sample in samples for message in sample.messages for part in message.parts if part.media}
    assert len(references) == 4  # however often rows and samples name them
    shown = relax("samples", "show", samples[0].sample_id, picture_run)
    (reference, *_) = [part.media for part in samples[0].messages[0].parts if part.media]
    assert f"[image/png, {reference.width} x {reference.height}, {reference.num_bytes} bytes: {reference.uri}]" in shown.out


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mode", [(), ("run.mode=sync", "run.max_staleness=0")], ids=["async", "sync"])
def test_model_learns_to_name_colours(relax: Relax, tmp_path: Path, bootstrap_servers: str, run_id: str, mode: tuple[str, ...]) -> None:
    run_file = shutil.copy(ROOT / "configs/colours.toml", tmp_path / "colours.toml")
    ended = relax("run", run_file, f"run.id={run_id}", f"broker.bootstrap_servers={bootstrap_servers}", *mode, timeout_seconds=1400)
    assert ended.code == 0, ended.err
    rewards = report_of(tmp_path, run_id)["curves"]["reward_mean"]
    assert sum(rewards[:3]) / 3 < 1 / 6 + 0.1
    assert sum(rewards[-5:]) / 5 > 0.8
