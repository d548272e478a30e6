"""A Java program with Kafka's client and Apache's Avro requests samples from a run, and decodes the
same numbers as we do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apicurio import serve_apicurio
from command_line import Relax, report_of
from confluent_kafka.schema_registry import SchemaRegistryClient
from java_program import JavaProgram

from relax_events.events.codec import EventCodec
from relax_events.events.sample_columns import split_samples
from relax_events.events.schemas import current_release, schema_directory
from relax_events.events.types import PromptGroupEnded, SampleRolledOut, SampleScored
from relax_events.kafka.connection import Connection
from relax_events.kafka.inventory import Inventory
from relax_events.kafka.log_reader import LogReader

PROMPTS = ("spell \u8336 backwards", "spell tea sdrawkcab")
SAMPLES_PER_PROMPT = 3
PATIENCE_SECONDS = 280
KINDS = {kind.__name__: kind for kind in (SampleRolledOut, SampleScored, PromptGroupEnded)}


@pytest.fixture
def external_client(tmp_path: Path) -> JavaProgram:
    return JavaProgram("Guest", tmp_path / "classes")


def read_events(bootstrap_servers: str, run_id: str) -> dict[tuple[str, str], Any]:
    """Read a run's events as Python has them, by kind and id."""
    connection = Connection(bootstrap_servers, client_id="test")
    reader, codec, found = LogReader(connection), EventCodec(), {}
    counts = Inventory(connection).topics(f"relax.{run_id}.")
    topics = [
        f"relax.{run_id}.{entity}"
        for entity in (
            "rollout.samples",
            "reward.scores",
            "control.prompt-group-outcomes",
            "prompt.groups",
        )
    ]
    for record in reader.read_to_end([(f"relax.{run_id}.control.schemas", 0)]):
        codec.learn(record.value)
    for record in reader.read_to_end(
        (topic, partition) for topic in topics for partition in range(counts[topic])
    ):
        for event in split_samples(codec.decode(record.value)):
            name = getattr(event, "sample_id", None) or event.prompt_group_id  # type: ignore[union-attr]
            found[type(event).__name__, name] = event
    reader.close()
    return found


def check_same(theirs: Any, ours: Any) -> None:
    """See that a value which Java printed is the one that Python has."""
    if isinstance(ours, np.ndarray):
        np.testing.assert_array_equal(np.array(theirs, ours.dtype), ours)
    elif isinstance(ours, list):
        assert len(theirs) == len(ours)
        for left, right in zip(theirs, ours, strict=True):
            check_same(left, right)
    elif hasattr(ours, "__dataclass_fields__"):
        for name in ours.__dataclass_fields__:
            check_same(theirs[name], getattr(ours, name))
    else:
        assert theirs == ours


@dataclass(frozen=True)
class Asked:
    """A finished run, and what an external producer got from it."""

    lines: list[dict[str, Any]]
    events: dict[tuple[str, str], Any]


@pytest.fixture
def ask(
    relax: Relax, run_file: Path, bootstrap_servers: str, run_id: str, external_client: JavaProgram
) -> Callable[..., Asked]:
    """Return a function that lets an external producer visit a run from its start to its end."""

    def visit(*overrides: str) -> Asked:
        settings = (f"broker.bootstrap_servers={bootstrap_servers}", "run.num_steps=5", *overrides)
        assert relax("topics", "apply", run_file, *settings, "--yes").code == 0
        with external_client.start(
            bootstrap_servers, run_id, PATIENCE_SECONDS, SAMPLES_PER_PROMPT, *PROMPTS
        ) as java:
            ran = relax("run", run_file, *settings, timeout_seconds=280)
            out, errors = java.communicate(timeout=PATIENCE_SECONDS)
        assert (ran.code, java.returncode) == (0, 0), ran.err + errors
        return Asked(
            [json.loads(line) for line in out.splitlines()], read_events(bootstrap_servers, run_id)
        )

    return visit


@pytest.mark.timeout(900)
@pytest.mark.long
def test_external_java_producer_gets_samples_of_its_own_prompts(
    ask: Callable[..., Asked], relax: Relax, run_file: Path, bootstrap_servers: str, run_id: str
) -> None:
    asked = ask()
    assert {line["event"] for line in asked.lines} == set(KINDS)
    check_external_groups(asked)
    outcomes = report_of(run_file.parent, run_id)["outcomes"]
    assert (outcomes["trained"], outcomes["filtered"], outcomes["failed"]) == (20, 0, 0)
    checked = relax(
        "ledger",
        "check",
        run_file,
        f"broker.bootstrap_servers={bootstrap_servers}",
        "--output",
        "json",
    )
    assert (checked.code, json.loads(checked.out)["prompt_groups_external"]) == (0, len(PROMPTS))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_external_reader_without_schema_registry_reads_a_run_that_uses_one(
    ask: Callable[..., Asked], relax: Relax, bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    """All roles write Confluent's framing, the external producer the other one; the schema ids are
    on the log, so reading it does not need the registry."""
    with serve_apicurio(tmp_path / "apicurio") as url, SchemaRegistryClient({"url": url}) as client:
        client.set_compatibility(level="FULL_TRANSITIVE")
        asked = ask(f"broker.schema_registry={url}")
        versions = {name: client.get_versions(name) for name in client.get_subjects()}
    assert versions == {name: [1] for name in current_release(schema_directory()).schemas}
    check_external_groups(asked)
    checked = relax("schemas", "--check", "--run", run_id, "--bootstrap-servers", bootstrap_servers)
    first, *unreleased = (
        checked.out.splitlines()
    )  # between two releases, those of the next one are listed behind it
    assert (checked.code, first) == (0, "every release reads what is written now, and the reverse")
    assert all(line.startswith("not in any release as they stand: ") for line in unreleased)


def is_late(line: Mapping[str, str]) -> bool:
    """Return whether a prompt group expired before all its samples were scored, as on a slow
    machine, where the run's own ones overtake it."""
    return line["outcome"] == "expired" and line["reason"].endswith("were scored")


def check_external_groups(asked: Asked) -> None:
    """See that each prompt got its samples and an end, and that Java read in every one of them what
    Python reads."""
    lines, events = asked.lines, asked.events
    for line in lines:
        key = line.get("key", line)
        check_same(line, events[line["event"], key.get("sample_id", key["prompt_group_id"])])
    samples = {
        line["key"]["sample_id"]: line for line in lines if line["event"] == "SampleRolledOut"
    }
    ended = {line["prompt_group_id"]: line for line in lines if line["event"] == "PromptGroupEnded"}
    issued = {
        name: event
        for (kind, name), event in events.items()
        if kind == "PromptGroupIssued" and name in ended
    }
    assert [event.messages[0].text for _, event in sorted(issued.items())] == list(PROMPTS)
    assert sorted(samples) == [
        f"{name}/{index}" for name in sorted(issued) for index in range(SAMPLES_PER_PROMPT)
    ]
    for line in ended.values():
        assert (line["outcome"], line["reason"]) == (
            "filtered",
            "external: generated and scored, not trained",
        ) or is_late(line)
    for line in samples.values():
        assert (
            line["messages"][0]["parts"][0]["text"]
            == issued[line["key"]["prompt_group_id"]].messages[0].text
        )
        assert sum(line["loss_mask"]) == len(line["tokens"]) - line["num_prompt_tokens"]
