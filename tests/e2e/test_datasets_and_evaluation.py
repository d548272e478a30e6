"""A run on two weighted datasets, one of them Parquet, whose versions are evaluated next to the
training."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import orjson
import pyarrow as pa
import pytest
from command_line import PROMPTS, Relax, log_of, report_of, snapshot_of, write_rows
from pyarrow import parquet as pq

from relax_events.events.codec import EventCodec
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import Event, PolicyEvaluated, PromptGroupIssued, TrainStepCommitted
from relax_events.kafka.connection import Connection
from relax_events.kafka.inventory import Inventory
from relax_events.kafka.log_reader import LogReader

pytestmark = pytest.mark.timeout(300)
DATA = """
[data]
max_prompt_tokens = 60

[[data.datasets]]
source = "parquet:{folder}/words"
split = "train"
prompt_key = "question"
answer_key = "solution.text"
weight = 3

[[data.datasets]]
source = "jsonl:{folder}/drinks.jsonl[2:6]"
system_prompt = "be brief"
metadata_keys = ["kind"]

[evaluation]
every = 2

[[evaluation.datasets]]
name = "words"
source = "jsonl:{folder}/held-out.jsonl"
samples_per_prompt = 4
pass_at = [1, 4]
pass_reward = 0.5
sampling = {{ temperature = 0.7, max_new_tokens = 4 }}

[[evaluation.datasets]]
name = "greedy"
source = "jsonl:{folder}/held-out.jsonl[:2]"
sampling = {{ top_k = 1, max_new_tokens = 4 }}
reward = {{ function = "exact_match" }}
"""


@pytest.fixture
def mixed_run(tmp_path: Path, run_file: Path) -> Path:
    """Write a run file with its data; one row of the Parquet file is too long for the filter."""
    rows = [
        {"question": prompt, "solution": {"text": "x"}}
        for prompt in [*PROMPTS[:5], "spell " + 30 * "tea " + "backwards"]
    ]
    (tmp_path / "words/train").mkdir(parents=True)
    pq.write_table(
        pa.Table.from_pylist(rows), tmp_path / "words/train/0000.parquet", row_group_size=2
    )
    write_rows(
        tmp_path / "drinks.jsonl",
        [{"prompt": prompt, "answer": "y", "kind": "drink", "more": 1} for prompt in PROMPTS],
    )
    write_rows(
        tmp_path / "held-out.jsonl", [{"prompt": prompt, "answer": "z"} for prompt in PROMPTS[:4]]
    )
    run_file.write_text(
        re.sub(r"\[data\]\nsource = .*\n", DATA.format(folder=tmp_path), run_file.read_text())
    )
    return run_file


def events_of(bootstrap_servers: str, run_id: str, entity: str) -> list[Event]:
    """Read a topic of a run from the log."""
    connection, topic = Connection(bootstrap_servers, client_id="test"), f"relax.{run_id}.{entity}"
    reader, codec = LogReader(connection), EventCodec()
    records = reader.read_to_end(
        (topic, partition) for partition in range(Inventory(connection).topics(topic)[topic])
    )
    reader.close()
    return [event for record in records for event in split_samples(codec.decode(record.value))]


@pytest.mark.long
def test_run_mixes_datasets_and_evaluates_its_versions(
    relax: Relax, mixed_run: Path, bootstrap_servers: str, run_id: str
) -> None:
    server = f"broker.bootstrap_servers={bootstrap_servers}"
    checked = relax("doctor", mixed_run, server)
    assert "6 prompts in parquet:" in checked.out
    assert "of its first 6 are passed over: 1 too long" in checked.out
    assert "4 to evaluate words on" in checked.out
    ended = relax("run", mixed_run, server, timeout_seconds=280)
    assert ended.code == 0, ended.err
    report = report_of(mixed_run.parent, run_id)
    assert (report["steps"], report["ledger_problems"]) == (3, [])

    issued = [
        event
        for event in events_of(bootstrap_servers, run_id, "prompt.groups")
        if isinstance(event, PromptGroupIssued)
    ]
    firsts = [event for event in issued if event.attempt == 0]
    kinds = Counter(orjson.loads(event.metadata).get("kind", "word") for event in firsts)
    assert len(firsts) == 12
    # Rows go 3 to 1 by weight; each that was passed over was a word.
    rows = 12 + sum(report["prompts_skipped"].values())
    assert kinds["drink"] in (rows // 4, -(-rows // 4))
    assert report["prompts_skipped"].keys() == {"too_long"}
    assert {event.messages[0].text for event in firsts if "kind" in event.metadata} == {"be brief"}

    evaluated = [
        event
        for event in events_of(bootstrap_servers, run_id, "control.evaluations")
        if isinstance(event, PolicyEvaluated)
    ]
    assert [(event.policy_version, event.dataset) for event in evaluated] == [
        (version, dataset) for version in (0, 2, 3) for dataset in ("words", "greedy")
    ]
    steps = [
        event
        for event in events_of(bootstrap_servers, run_id, "control.train-steps")
        if isinstance(event, TrainStepCommitted)
    ]
    digests = {step.policy_version: step.weights_digest for step in steps}
    assert [event.weights_digest for event in evaluated[2:]] == [
        digests[version] for version in (2, 2, 3, 3)
    ]
    for event in evaluated[::2]:
        assert (event.num_prompts, event.num_unscored, event.num_failed_prompts) == (4, 0, 0)
        assert 0 <= event.pass_at_k["1"] <= event.pass_at_k["4"] <= 1
        assert event.pass_at_k["4"] * 4 == round(
            event.pass_at_k["4"] * 4
        )  # with n = k a prompt either passes or not
        assert event.pass_at_k["1"] * 16 == pytest.approx(round(event.pass_at_k["1"] * 16))
    assert {row["dataset"] for row in report["evaluations"]} == {"words", "greedy"}
    shown = snapshot_of(mixed_run.parent / ".relax/runs" / run_id)["overview"]["evaluations"]
    assert "4" in shown[0]["pass_at_k"]

    shown = relax(
        *("runs", "show", run_id, "--bootstrap-servers", bootstrap_servers),
        *("--part", "evaluations", "--dataset", "words", "--output", "json"),
    )
    assert [row["reward_mean"] for row in orjson.loads(shown.out)] == [
        event.reward_mean for event in evaluated[::2]
    ]
    assert [line["policy_version"] for line in log_of(mixed_run.parent, run_id, "evaluator-0") if line["event"] == "policy_version.evaluated"] == [
        0, 0, 2, 2, 3, 3,
    ]  # fmt: skip
