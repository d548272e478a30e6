"""A restarted prompter resumes from the log, with external producers, lost rows, skipped rows and
lost images.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from broker_steps import TIMEOUT_SECONDS, fetch_until
from event_samples import issued, published

from relax_events.config import RunConfig
from relax_events.data.prompt_filter import build_filters
from relax_events.data.rows import build_storing_reader
from relax_events.data.sources import open_source
from relax_events.data.stream import PromptStream
from relax_events.errors import Fenced
from relax_events.events.codec import EventCodec
from relax_events.events.parts import ChatMessage, Outcome, TopicOffset, WorkerState
from relax_events.events.types import PromptGroupEnded, PromptGroupIssued, WorkerHeartbeat
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.media.library import MediaLibrary
from relax_events.roles.worker_factory import open_worker
from relax_events.runtime.control_view import ControlView
from relax_events.staleness import build_group_end
from relax_events.topics import TopicPlan
from relax_events.topics.partitions import TopicPartition
from tests.unit.image_model import build_image_model, image_file
from workers import prompter
from workers.prompter import ENDS, HELD, PrompterLoop

CODEC = EventCodec()
end_group = partial(build_group_end, policy_version=0, trainer_version=0)

Ranges = Mapping[TopicPartition, tuple[int, int]]


def write_rows(folder: Path, num_rows: int) -> str:
    """Write a dataset whose prompts are the rows' numbers, and return its source."""
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(f'{{"prompt": "{number}", "answer": ""}}\n' for number in range(num_rows))
    )
    return f"jsonl:{path}"


OpenRun = Callable[..., tuple[RunConfig, TopicPlan]]


@pytest.fixture
def open_run(apply_run: Callable[..., RunConfig], tmp_path: Path) -> OpenRun:
    """Apply a run with the given numbers of prompts per step, train steps and rows."""

    def open_one(
        *, num_prompts: int, num_steps: int, num_rows: int, max_staleness: int = 0
    ) -> tuple[RunConfig, TopicPlan]:
        config = apply_run(
            run={
                "prompts_per_step": num_prompts,
                "samples_per_prompt": 2,
                "num_steps": num_steps,
                "max_staleness": max_staleness,
            },
            data={"source": write_rows(tmp_path, num_rows)},
        )
        return config, TopicPlan.from_config(config)

    return open_one


def write_queue(
    producer: RecordProducer, plan: TopicPlan, groups: Iterable[PromptGroupIssued]
) -> None:
    """Write issued prompt groups to partition 0 of the queue."""
    producer.write(
        ProducerRecord(
            plan.topic("prompt.groups"), CODEC.encode(event), key=event.prompt_group_id, partition=0
        )
        for event in groups
    )


def write_versions(
    producer: RecordProducer, plan: TopicPlan, *versions: int, takes_spares: bool = False
) -> None:
    """Publish policy versions."""
    topic = plan.topic("control.policy-versions")
    producer.write(
        ProducerRecord(topic, CODEC.encode(published(one, takes_spares=takes_spares)))
        for one in versions
    )


def write_ends(producer: RecordProducer, plan: TopicPlan, ends: Iterable[PromptGroupEnded]) -> None:
    """Write outcomes of prompt groups."""
    topic = plan.topic("control.prompt-group-outcomes")
    producer.write(ProducerRecord(topic, CODEC.encode(event), partition=0) for event in ends)


def external_group(prompt_group_id: str, *, group_index: int) -> PromptGroupIssued:
    return PromptGroupIssued(
        prompt_group_id=prompt_group_id,
        train_step=0,
        group_index=group_index,
        attempt=0,
        row=10**6,
        required_policy_version=0,
        samples_per_prompt=2,
        messages=[ChatMessage.of_text("user", "say hi")],
        seed=1,
    )


def test_external_prompt_groups_use_no_batch_slots_and_no_rows(
    apply_run: Callable[..., RunConfig],
    producer: RecordProducer,
    connection: Connection,
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "one", "answer": ""}\n{"prompt": "two", "answer": ""}\n'
    )
    config = apply_run(
        run={"prompts_per_step": 2, "samples_per_prompt": 2, "num_steps": 1},
        data={"source": f"jsonl:{tmp_path / 'rows.jsonl'}"},
    )
    plan = TopicPlan.from_config(config)
    external_groups = [
        external_group("000000-1000000-0", group_index=1_000_000),
        external_group("000000-1000001-0", group_index=1),
    ]
    write_queue(producer, plan, external_groups)
    write_versions(producer, plan, 0)
    events = issued_by_prompter(config, connection, num_records=4)
    assert sorted((event.prompt_group_id, event.row) for event in events if event.row < 10**6) == [
        ("000000-0000-0", 0),
        ("000000-0001-0", 1),
    ]


def test_rows_of_lost_records_are_issued_before_new_ones(
    open_run: OpenRun,
    producer: RecordProducer,
    connection: Connection,
) -> None:
    config, plan = open_run(num_prompts=4, num_steps=2, num_rows=20)
    # Of the first step's prompt groups two were written when the prompter died; row 2 had been
    # passed over, rows 0 and 1 are lost.
    written = [
        replace(issued("000000-0002-0", row=3), skipped_rows={"2": "too_long"}),
        issued("000000-0003-0", row=4),
    ]
    write_queue(producer, plan, written)
    write_versions(producer, plan, 0, 1)
    events = issued_by_prompter(config, connection, num_records=8)
    rows = {event.prompt_group_id: event.row for event in events}
    assert [rows[f"00000{step}-000{index}-0"] for step in (0, 1) for index in range(4)] == [
        0,
        1,
        3,
        4,
        5,
        6,
        7,
        8,
    ]


@pytest.mark.parametrize("is_read", [False, True], ids=["before", "while the queue is read"])
def test_rows_of_purged_records_are_not_issued_again(
    is_read: bool,
    monkeypatch: pytest.MonkeyPatch,
    open_run: OpenRun,
    producer: RecordProducer,
    connection: Connection,
    admin: Admin,
) -> None:
    config, plan = open_run(num_prompts=2, num_steps=3, num_rows=20)
    written = [
        replace(
            issued(f"00000{step}-000{index}-0", row=2 * step + index),
            required_policy_version=step,
        )
        for step in (0, 1)
        for index in (0, 1)
    ]
    write_queue(producer, plan, written)
    ends = [end_group(event.prompt_group_id, Outcome.TRAINED) for event in written[:2]]

    def purge() -> None:
        write_ends(producer, plan, ends)
        admin.delete_records([TopicOffset(plan.topic("prompt.groups"), 0, 2)])

    read_stream, purges = LogReader.stream, [purge]

    def purge_then_read(reader: LogReader, ranges: Ranges) -> Iterator[Record]:
        if purges and (plan.topic("prompt.groups"), 0) in ranges:
            purges.pop()()
        return read_stream(reader, ranges)

    if is_read:
        monkeypatch.setattr(LogReader, "stream", purge_then_read)
    else:
        purge()
    write_versions(producer, plan, 0, 1, 2)
    # The purge may come after the reader has read what it deletes: it reads what is kept.
    events = issued_by_prompter(config, connection, num_records=4, begin=2)
    assert sorted(
        (event.prompt_group_id, event.row) for event in events if event.train_step == 2
    ) == [("000002-0000-0", 4), ("000002-0001-0", 5)]


def test_prompts_with_too_high_a_pass_rate_are_not_issued_again(
    apply_run: Callable[..., RunConfig],
    producer: RecordProducer,
    connection: Connection,
    tmp_path: Path,
) -> None:
    data = {"source": write_rows(tmp_path, 3), "pass_rate_range": [0.1, 0.9]}
    config = apply_run(
        run={"prompts_per_step": 3, "samples_per_prompt": 2, "num_steps": 2, "max_staleness": 0},
        data=data,
    )
    plan = TopicPlan.from_config(config)
    written = [issued(f"000000-000{index}-0", row=index) for index in range(3)]
    write_queue(producer, plan, written)
    write_versions(producer, plan, 0, 1)
    ends = [
        end_group(event.prompt_group_id, Outcome.TRAINED, mean_reward=reward)
        for event, reward in zip(written, (1.0, 0.5, 0.0), strict=True)
    ]
    write_ends(producer, plan, ends)
    events = issued_by_prompter(config, connection, num_records=6)
    second = sorted(
        (event.prompt_group_id, event.row, event.skipped_rows)
        for event in events
        if event.train_step == 1
    )
    # Rows 3, 4 and 5 of the stream are the three prompts again, and so on: only the second, at 4, 7
    # and 10, is taken.
    drops = [
        {"3": "pass_rate_too_high"},
        {"5": "pass_rate_too_low", "6": "pass_rate_too_high"},
        {"8": "pass_rate_too_low", "9": "pass_rate_too_high"},
    ]
    assert second == [(f"000001-000{index}-0", 4 + 3 * index, drops[index]) for index in range(3)]


def test_prompter_skips_rows_with_missing_or_broken_images(
    apply_run: Callable[..., RunConfig],
    producer: RecordProducer,
    connection: Connection,
    tmp_path: Path,
) -> None:
    for number, content in (
        (1, image_file(32, 32)),
        (2, image_file(96, 96)[:400]),
        (3, image_file(48, 32)),
    ):
        (tmp_path / f"{number}.png").write_bytes(content)
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            f'{{"prompt": "<image>", "answer": "", "image": "{number}.png"}}\n'
            for number in range(4)
        )
    )
    data = {
        "source": f"jsonl:{tmp_path / 'rows.jsonl'}",
        "multimodal_keys": {"image": "image"},
        "media_root": tmp_path,
    }
    config = apply_run(
        run={"prompts_per_step": 2, "samples_per_prompt": 2, "num_steps": 1},
        data=data,
        model={"path": build_image_model()},
    )
    plan = TopicPlan.from_config(config)
    written = [issued(f"000000-000{index}-0", row=index) for index in (0, 1)]
    write_queue(producer, plan, written)
    write_versions(producer, plan, 0)
    ends = [end_group(event.prompt_group_id, Outcome.EXPIRED) for event in written]
    write_ends(producer, plan, ends)
    again = {
        event.prompt_group_id: event
        for event in issued_by_prompter(config, connection, num_records=4)
        if event.attempt
    }
    assert {name: event.row for name, event in again.items()} == {
        "000000-0000-1": 3,
        "000000-0001-1": 1,
    }
    assert again["000000-0000-1"].skipped_rows == {"2": "media_truncated"}
    widths = {
        name: event.messages[0].parts[0].media.width
        for name, event in again.items()
        if event.messages[0].parts[0].media
    }
    assert widths == {"000000-0000-1": 48, "000000-0001-1": 32}


def test_prompt_groups_of_a_silent_worker_are_issued_once_more(
    apply_run: Callable[..., RunConfig],
    producer: RecordProducer,
    connection: Connection,
    tmp_path: Path,
) -> None:
    config = apply_run(
        run={"prompts_per_step": 3, "samples_per_prompt": 2, "num_steps": 1, "max_staleness": 0},
        data={"source": write_rows(tmp_path, 9)},
        workers={"heartbeat_seconds": 0.2, "takeover_seconds": 2.0},
    )
    plan = TopicPlan.from_config(config)
    held = WorkerHeartbeat(
        worker_id="rollout-0",
        role="rollout",
        host="gone",
        pid=1,
        state=WorkerState.WORKING,
        num_processed=0,
        num_in_flight=3,
        last_progress_at=0,
        prompt_groups_in_flight=["000000-0002-0", "000000-0000-0", "000000-1000000-0"],
    )
    topics = (("control.policy-versions", published(0)), (HELD, held))
    for entity, event in topics:
        producer.write([ProducerRecord(plan.topic(entity), CODEC.encode(event), key="rollout-0")])
    events = issued_by_prompter(config, connection, num_records=5)
    first, again = events[:3], events[3:]
    assert [event.prompt_group_id for event in again] == ["000000-0000-0", "000000-0002-0"]
    assert {event.lost_worker for event in first} == {""}
    assert [replace(event, issued_at=0) for event in again] == [
        replace(event, issued_at=0, lost_worker="rollout-0") for event in (first[0], first[2])
    ]


def test_prompt_groups_that_ended_together_are_issued_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
    apply_run: Callable[..., RunConfig],
    producer: RecordProducer,
    connection: Connection,
    tmp_path: Path,
) -> None:
    config = apply_run(
        run={"prompts_per_step": 12, "samples_per_prompt": 2, "num_steps": 1},
        data={"source": write_rows(tmp_path, 30)},
    )
    plan = TopicPlan.from_config(config)
    written = [issued(f"000000-{index:04}-0", row=index) for index in range(12)]
    write_queue(producer, plan, written)
    ends = [end_group(event.prompt_group_id, Outcome.FAILED) for event in written]
    passes: list[str] = []
    monkeypatch.setattr(prompter, "failpoint", passes.append)
    monkeypatch.setattr(
        ControlView, "follow", lambda _, put, **__: [put(event) for event in (published(0), *ends)]
    )
    again = [
        event for event in issued_by_prompter(config, connection, num_records=24) if event.attempt
    ]
    assert sorted(event.prompt_group_id for event in again) == [
        f"000000-{index:04}-1" for index in range(12)
    ]
    assert passes.count("prompter.after_issue") == 1


def test_second_prompter_takes_over_and_issues_nothing_again(
    open_run: OpenRun,
    connection: Connection,
) -> None:
    config, plan = open_run(num_prompts=4, num_steps=4, num_rows=20)
    stream = PromptStream(open_source(config.data, seed=0), seed=0, shuffle=False)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(open_worker("prompter", config, index=index, follow=(ENDS, HELD)))
            for index in (0, 1)
        ]
        reader = stack.enter_context(closing(LogReader(connection)))
        first = PrompterLoop(workers[0], stream)
        first._recover()
        first._take(published(0), 0)
        first._issue_due()
        second = PrompterLoop(workers[1], stream)
        second._recover()
        for event in (published(0), published(1)):
            for loop in (second, first):
                loop._take(event, 0)
        second._issue_due()
        with pytest.raises(Fenced, match="another prompter of this run took over"):
            first._issue_due()
        queue = [(plan.topic("prompt.groups"), at) for at in range(plan.queue_partitions)]
        events = [CODEC.decode(record.value) for record in reader.read_to_end(queue)]
    assert sorted(
        event.prompt_group_id for event in events if isinstance(event, PromptGroupIssued)
    ) == [f"00000{step}-000{index}-0" for step in (0, 1) for index in range(4)]


def group_end(name: str, outcome: Outcome) -> PromptGroupEnded:
    """Build an outcome of step 0."""
    return build_group_end(name, outcome, policy_version=0, trainer_version=0)


HALF_FILTERED = [
    ("000000-0001-0", Outcome.FILTERED),
    ("000000-0003-1", Outcome.FILTERED),
    ("000000-0000-0", Outcome.TRAINED),
    ("000000-0002-1", Outcome.TRAINED),
    ("000000-0004-1", Outcome.EXPIRED),
]
"""Step 0 takes three batch slots for two prompt groups; rows 3 and 4 lie behind them."""


def test_restarted_prompter_issues_ahead_what_the_last_steps_needed(
    open_run: OpenRun,
    producer: RecordProducer,
    connection: Connection,
) -> None:
    config, plan = open_run(num_prompts=2, num_steps=2, num_rows=20)
    names = [
        "000000-0000-0",
        "000000-0001-0",
        "000000-0002-1",
        "000000-0003-1",
        "000000-0004-1",
    ]
    write_queue(producer, plan, [issued(name, row=row) for row, name in enumerate(names)])
    write_ends(producer, plan, [group_end(*end) for end in HALF_FILTERED])
    write_versions(producer, plan, 0, 1, takes_spares=True)
    events = issued_by_prompter(config, connection, num_records=8)
    assert sorted((event.prompt_group_id, event.row) for event in events if event.train_step) == [
        ("000001-0000-0", 3),
        ("000001-0001-0", 4),
        ("000001-0002-0", 5),
    ]


def test_batch_slot_that_a_crash_left_out_between_spares_is_issued(
    open_run: OpenRun,
    producer: RecordProducer,
    connection: Connection,
) -> None:
    config, plan = open_run(num_prompts=2, num_steps=1, num_rows=20)
    names = {0: "000000-0000-0", 1: "000000-0001-0", 3: "000000-0003-1", 4: "000000-0004-1"}
    write_queue(producer, plan, [issued(name, row=row) for row, name in names.items()])
    write_ends(producer, plan, [group_end("000000-0001-0", Outcome.FILTERED)])
    write_versions(producer, plan, 0, takes_spares=True)
    events = issued_by_prompter(config, connection, num_records=5)
    assert [(event.prompt_group_id, event.row) for event in events if event.row == 2] == [
        ("000000-0002-0", 2)
    ]


def test_filtered_prompt_group_is_replaced_in_its_slot_for_a_trainer_without_spares(
    open_run: OpenRun,
    producer: RecordProducer,
    connection: Connection,
) -> None:
    config, plan = open_run(num_prompts=2, num_steps=1, num_rows=20)
    write_ends(producer, plan, [group_end("000000-0001-0", Outcome.FILTERED)])
    write_versions(producer, plan, 0)
    events = issued_by_prompter(config, connection, num_records=3)
    assert sorted((event.prompt_group_id, event.row) for event in events) == [
        ("000000-0000-0", 0),
        ("000000-0001-0", 1),
        ("000000-0001-1", 2),
    ]


def test_summary_holds_what_the_spares_of_open_steps_follow_from(
    monkeypatch: pytest.MonkeyPatch,
    open_run: OpenRun,
    connection: Connection,
) -> None:
    monkeypatch.setattr(prompter, "SUMMARY_STEPS", 1)
    config, plan = open_run(num_prompts=2, num_steps=9, num_rows=40, max_staleness=1)
    stream = PromptStream(open_source(config.data, seed=0), seed=0, shuffle=False)
    ends = [
        group_end("000000-0001-0", Outcome.FILTERED),
        *(group_end(f"000000-000{index}-{index // 2}", Outcome.TRAINED) for index in (0, 2)),
        group_end("000001-0001-0", Outcome.FAILED),
    ]
    supplies = []
    with ExitStack() as stack:
        reader = stack.enter_context(closing(LogReader(connection)))
        for index in (0, 1):
            worker = stack.enter_context(
                open_worker("prompter", config, index=index, follow=(ENDS, HELD))
            )
            loop = PrompterLoop(worker, stream)
            loop._recover()
            if not index:
                for event in (
                    published(0, takes_spares=True),
                    *ends,
                    published(1, takes_spares=True),
                ):
                    loop._take(event, 0)
                loop._issue_due()
                loop._write_summary()
            supplies.append(loop._supply)
        queue = [(plan.topic("prompt.groups"), at) for at in range(plan.queue_partitions)]
        num_issued = len(list(reader.read_to_end(queue)))
        loop._take(published(1, takes_spares=True), 0)
        loop._issue_due()
        assert len(list(reader.read_to_end(queue))) == num_issued
    first, second = supplies
    assert (second.open_step, list(second.slots_used)) == (1, [3])
    assert second.ended == first.ended == {"000001-0001-0": 3}
    assert second.returned_rows == first.returned_rows


def issued_by_prompter(
    config: RunConfig, connection: Connection, *, num_records: int, begin: int = 0
) -> list[PromptGroupIssued]:
    """Run a prompter until the queue holds so many records, and return what they are.

    Of partition 0, to which the tests write, the records from `begin` on count.
    """
    plan = TopicPlan.from_config(config)
    stream = PromptStream(open_source(config.data, seed=0), seed=0, shuffle=False)
    read_messages = build_storing_reader(MediaLibrary(config))
    filters = build_filters(config.data, renderer=None, read_messages=read_messages)
    with (
        open_worker("prompter", config, index=0, follow=(ENDS, HELD)) as worker,
        closing(LogReader(connection)) as reader,
    ):
        thread = threading.Thread(
            target=PrompterLoop(worker, stream, filters, read_messages=read_messages).run
        )
        thread.start()
        reader.assign(
            {
                (plan.topic("prompt.groups"), partition): begin if partition == 0 else 0
                for partition in range(plan.queue_partitions)
            }
        )
        try:
            records = fetch_until(reader, lambda found: len(found) == num_records)
        finally:
            worker.drain.start()
            thread.join(TIMEOUT_SECONDS)
    return [
        event
        for record in records
        if isinstance(event := CODEC.decode(record.value), PromptGroupIssued)
    ]
