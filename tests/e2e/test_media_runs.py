"""Runs on images, audio and videos, from the data row to the gradient."""

from __future__ import annotations

import base64
import hashlib
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from command_line import SPREAD_REWARD, Relax, report_of, write_rows

from relax_events.config import load_run_config
from relax_events.events.codec import EventCodec
from relax_events.events.parts import ChatMessage, ContentPart, MediaRef, Modality
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import (
    Event,
    PromptGroupEnded,
    PromptGroupIssued,
    SampleRolledOut,
    TrainStepCommitted,
)
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.objects.store import list_media
from relax_events.topics import TopicPlan
from tests.unit.image_model import image_file
from tests.unit.video_and_audio import audio_file, video_file

ROOT = Path(__file__).parents[2]
GUEST = "000000-1000000-0"
SETTINGS = """
[run]
id = "{run_id}"
num_steps = 2
prompts_per_step = 4
samples_per_prompt = 4
mode = "sync"
max_staleness = 0

[model]
path = "model"
tiny = {{ family = "qwen3_omni_moe_thinker", hidden_size = 32, num_layers = 1, corpus_rows = 8 }}
media = {{ video_min_token_num = 4, video_max_token_num = 16 }}

[data]
source = "jsonl:rows.jsonl"
multimodal_keys = {{ image = "images", audio = "audio", video = "video" }}
media_root = "media"
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
def media_run(tmp_path: Path, bootstrap_servers: str, run_id: str) -> Path:
    """Write a run file and rows about images, audio, a video, all of them, and none; among the
    first there are three that can't be used."""
    (tmp_path / "media").mkdir()
    files = {
        "0.png": image_file(32, 48),
        "1.png": image_file(48, 48, seed=1),
        "a.wav": audio_file(0.4),
        "b.wav": audio_file(0.9, seed=1),
    }
    for name, data in {
        **files,
        "a.mp4": video_file(32, 32, 4),
        "b.mp4": video_file(48, 32, 8),
    }.items():
        (tmp_path / "media" / name).write_bytes(data)
    cut_off = base64.b64encode(video_file(96, 96)[:500]).decode()
    rows: list[dict[str, Any]] = [
        {"prompt": "<image>what is it?", "images": ["0.png"]},
        {"prompt": "<video>?", "video": f"data:video/mp4;base64,{cut_off}"},
        {"prompt": "<audio>what is it?", "audio": "a.wav"},
        {"prompt": "<audio>?", "audio": "0.png"},
        {"prompt": "<video>what is it?", "video": "a.mp4"},
        {"prompt": "<image>?", "images": ["../run.toml"]},
        {
            "prompt": "<image><audio><video>what are they?",
            "images": ["1.png"],
            "audio": "b.wav",
            "video": "b.mp4",
        },
        {"prompt": "<image> or <image>?", "images": ["0.png", "1.png"]},
        {"prompt": "<video>and <audio>?", "video": "b.mp4", "audio": "a.wav"},
        {"prompt": "<audio>or what?", "audio": "b.wav"},
        {"prompt": "and without?"},
    ]
    write_rows(
        tmp_path / "rows.jsonl",
        [{"answer": "", "images": None, "audio": None, "video": None, **row} for row in rows],
    )
    (tmp_path / "reward.py").write_text(SPREAD_REWARD)
    path = tmp_path / "run.toml"
    path.write_text(SETTINGS.format(run_id=run_id, bootstrap_servers=bootstrap_servers))
    return path


def events_of(bootstrap_servers: str, run_id: str, **partitions: int) -> list[Event]:
    """Read topics of a run; their names with an underscore for the dot."""
    topic_partitions = [
        (f"relax.{run_id}.{entity.replace('_', '.', 1).replace('_', '-')}", index)
        for entity, count in partitions.items()
        for index in range(count)
    ]
    codec = EventCodec()
    with closing(LogReader(Connection(bootstrap_servers, client_id="test"))) as reader:
        return [
            event
            for record in reader.read_to_end(topic_partitions)
            for event in split_samples(codec.decode(record.value))
        ]


def issue_prompt_about_a_deleted_image(
    bootstrap_servers: str, run_id: str, *, objects_uri: str
) -> str:
    """Issue a prompt group whose image is not in the store, and return the image's address."""
    uri = f"{objects_uri}/sha256/00/{64 * '0'}.png"
    image = ContentPart(
        Modality.IMAGE, media=MediaRef(uri, bytes(32), "image/png", 100, width=32, height=32)
    )
    issued = PromptGroupIssued(
        prompt_group_id=GUEST,
        train_step=0,
        group_index=1_000_000,
        attempt=0,
        row=-1,
        required_policy_version=0,
        samples_per_prompt=2,
        messages=[ChatMessage("user", [image])],
        seed=1,
    )
    with closing(
        RecordProducer(Connection(bootstrap_servers, client_id="test"), max_batch_records=1)
    ) as producer:
        producer.write(
            [
                ProducerRecord(
                    f"relax.{run_id}.prompt.groups",
                    EventCodec().encode(issued),
                    key=GUEST,
                    partition=0,
                )
            ]
        )
    return uri


@pytest.mark.timeout(300)
def test_run_trains_on_all_media_and_hostile_files_fail_only_their_own_rows(
    relax: Relax, media_run: Path, bootstrap_servers: str, run_id: str
) -> None:
    assert relax("topics", "apply", media_run, "--yes").code == 0
    objects_uri = (media_run.parent / ".relax/runs" / run_id / "objects").as_uri()
    gone = issue_prompt_about_a_deleted_image(bootstrap_servers, run_id, objects_uri=objects_uri)
    ended = relax("run", media_run, timeout_seconds=280)
    assert ended.code == 0, ended.err

    report = report_of(media_run.parent, run_id)
    assert (report["succeeded"], report["samples_lost"], report["ledger_problems"]) == (True, 0, [])
    assert report["prompts_skipped"] == {
        "media_truncated": 1,
        "media_wrong_type": 1,
        "media_outside_root": 1,
    }
    steps = [
        event
        for event in events_of(bootstrap_servers, run_id, control_train_steps=1)
        if isinstance(event, TrainStepCommitted)
    ]
    assert len(steps) == 2
    assert max(step.metrics["mismatch_max_abs"] for step in steps) < 1e-4

    outcomes = [
        event
        for event in events_of(bootstrap_servers, run_id, control_prompt_group_outcomes=1)
        if isinstance(event, PromptGroupEnded)
    ]
    (external_outcome,) = [event for event in outcomes if event.prompt_group_id == GUEST]
    assert external_outcome.outcome == "failed"
    assert gone in external_outcome.reason
    assert "there is no such object" in external_outcome.reason

    config = load_run_config(media_run, environment={})
    samples = [
        event
        for event in events_of(
            bootstrap_servers,
            run_id,
            rollout_samples=TopicPlan.from_config(config).num_sample_partitions,
        )
        if isinstance(event, SampleRolledOut)
    ]
    references = {
        part.media
        for sample in samples
        for message in sample.messages
        for part in message.parts
        if part.media
    }
    assert len(references) == 6  # however often rows and samples name them
    about_all = next(sample for sample in samples if sample.key.row == 6)
    shown = relax("samples", media_run, "--sample", about_all.sample_id).out
    extents = {
        "image/png": "48 x 48",
        "audio/x-wav": "14400 frames at 16000 Hz",
        "video/mp4": "48 x 32, 8 frames at 2 Hz",
    }
    for reference in list_media(about_all):
        assert (
            f"[{reference.media_type}, {extents[reference.media_type]}, "
            f"{reference.num_bytes} bytes: {reference.uri}]"
        ) in shown
    assert relax("samples", media_run, "--out", media_run.parent / "out.jsonl").code == 0
    kept = {path.suffix: path for path in (media_run.parent / "out-media").iterdir()}
    assert sorted(kept) == [".mp4", ".png", ".wav"]
    assert {
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (media_run.parent / "out-media").iterdir()
    } <= {reference.digest.hex() for reference in references}


CONVERSATION = """
[run]
id = "{run_id}"
num_steps = 2
prompts_per_step = 2
samples_per_prompt = 2
mode = "sync"
max_staleness = 0

[model]
path = "model"
tiny = {{ family = "qwen3_vl", hidden_size = 32, num_layers = 1, corpus_rows = 4 }}

[sft_warmup] # until it knows how answers end
steps = 20
batch_size = 8
learning_rate = 1e-2

[data]
source = "jsonl:rows.jsonl"
multimodal_keys = {{ image = "images" }}
media_root = "."
shuffle = false

[environment]
function = "environment.py:show"

[engine]
max_context_tokens = 128
sampling = {{ max_new_tokens = 8 }}

[reward]
function = "reward.py:spread"

[algorithm]
name = "ppo"
old_logprobs = "actor"
kl_coefficient = 0.01

[broker]
bootstrap_servers = "{bootstrap_servers}"
"""
SHOW = """
from relax_events.environments.reply import Reply

def show(completion, *, messages, answer, metadata, files):
    if len(messages) > 1:
        return None
    return Reply("<image>and this?", {"image": [b"no image" if metadata["is_invalid"] else files[-1]]})
"""


@pytest.mark.timeout(300)
def test_run_with_image_environment_loses_only_prompt_group_of_a_bad_image(
    relax: Relax, tmp_path: Path, bootstrap_servers: str, run_id: str
) -> None:
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(image_file(32, 32 + 16 * number, seed=number))
    rows = [
        {
            "prompt": "<image>what is it?",
            "images": [f"{row % 2}.png"],
            "answer": "a",
            "is_invalid": row == 1,
        }
        for row in range(5)
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "environment.py").write_text(SHOW)
    (tmp_path / "reward.py").write_text(SPREAD_REWARD)
    (tmp_path / "run.toml").write_text(
        CONVERSATION.format(run_id=run_id, bootstrap_servers=bootstrap_servers)
    )
    ended = relax("run", tmp_path / "run.toml", timeout_seconds=280)
    assert ended.code == 0, ended.err
    report = report_of(tmp_path, run_id)
    assert (report["succeeded"], report["samples_lost"], report["ledger_problems"]) == (True, 0, [])
    steps = [
        event
        for event in events_of(bootstrap_servers, run_id, control_train_steps=1)
        if isinstance(event, TrainStepCommitted)
    ]
    assert max(step.metrics["mismatch_max_abs"] for step in steps) < 1e-4
    outcomes = [
        event
        for event in events_of(bootstrap_servers, run_id, control_prompt_group_outcomes=1)
        if isinstance(event, PromptGroupEnded)
    ]
    failed = [event for event in outcomes if event.outcome == "failed"]
    prompts = [
        event
        for event in events_of(bootstrap_servers, run_id, prompt_groups=1)
        if isinstance(event, PromptGroupIssued)
    ]
    rows_issued = {event.prompt_group_id: event.row for event in prompts}
    assert {rows_issued[event.prompt_group_id] for event in failed} == {1}
    assert all(
        "environment environment.py:show on turn 1 of sample" in event.reason
        and "which is not an image" in event.reason
        for event in failed
    )
    config = load_run_config(tmp_path / "run.toml", environment={})
    samples = [
        event
        for event in events_of(
            bootstrap_servers,
            run_id,
            rollout_samples=TopicPlan.from_config(config).num_sample_partitions,
        )
        if isinstance(event, SampleRolledOut)
    ]
    (talked, *_) = [sample for sample in samples if len(sample.turns) == 3]
    first, second = list_media(talked)
    assert (
        first.digest == second.digest
    )  # the environment showed what the prompt had shown; what it shows goes with the sample's version
    shown = relax("samples", tmp_path / "run.toml", "--sample", talked.sample_id).out
    assert shown.count(first.uri) == shown.count(second.uri) == 1
    assert "and this?" in shown


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "mode", [(), ("run.mode=sync", "run.max_staleness=0")], ids=["async", "sync"]
)
@pytest.mark.parametrize(
    ("task", "chance"),
    [("colours", 1 / 6), ("motion", 1 / 4), ("tones", 1 / 6), ("omni", 7 / 36), ("zoom", 1 / 6)],
)
def test_model_learns_what_images_videos_and_audio_show(
    relax: Relax,
    tmp_path: Path,
    bootstrap_servers: str,
    run_id: str,
    task: str,
    chance: float,
    mode: tuple[str, ...],
) -> None:
    run_file = shutil.copy(ROOT / f"configs/{task}.toml", tmp_path / f"{task}.toml")
    ended = relax(
        "run",
        run_file,
        f"run.id={run_id}",
        f"broker.bootstrap_servers={bootstrap_servers}",
        *mode,
        timeout_seconds=1400,
    )
    assert ended.code == 0, ended.err
    rewards = report_of(tmp_path, run_id)["curves"]["reward_mean"]
    assert sum(rewards[:3]) / 3 < chance + 0.1
    assert sum(rewards[-5:]) / 5 > 0.6
