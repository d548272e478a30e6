"""A secured broker: each principal has exactly the rights of its role, and a rejected principal
gets the reason.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acls_table import writes_by_page
from broker_steps import turn_until
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from event_samples import ended, ready
from small_settings import small_run

from relax_events.cli.broker_security import secure
from relax_events.config import RunConfig
from relax_events.errors import (
    AccessDenied,
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    ConfigError,
    EnvironmentProblem,
)
from relax_events.events.codec import EventCodec
from relax_events.events.parts import Command, Outcome, WorkerState
from relax_events.events.types import Event, MetricsReported, RunCommanded, WorkerHeartbeat
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.embedded import EmbeddedBroker
from relax_events.kafka.embedded.tool_login import build_client_properties
from relax_events.kafka.group_leases import ConsumerGroupLeases
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.protocol.queue_lag import read_queue_positions
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.security.certificates import make_authority
from relax_events.kafka.security.folder import SecurityFolder
from relax_events.kafka.security.principals import PrincipalAdmin
from relax_events.kafka.share_leases import ShareGroupLeases
from relax_events.kafka.transactions import TransactionalWriter
from relax_events.objects import ObjectStore
from relax_events.ops.consumer_lag import read_partition_lag
from relax_events.ops.schemas import find_missing_schemas, publish_schemas
from relax_events.ops.security import (
    Renewal,
    admin_connection,
    apply_security,
    create_folder,
    plan_security,
)
from relax_events.ops.topic_apply import apply_topics
from relax_events.roles.worker_factory import StoreClaimCheck
from relax_events.runtime.worker import Worker
from relax_events.session.principals import apply_principal
from relax_events.topics import TopicPlan

YEAR = timedelta(days=365)
PATIENCE_SECONDS = 60.0
REQUEST_SECONDS = 5.0
IMPATIENT_SECONDS = 1.0
FEW_SECONDS = 60.0  # an answer is due after the request timeout; the rest is a busy machine

# Written down from the diagram of the pipeline, not from the table under test. Every worker besides
# follows control and heartbeats.
COMMON_READS = {"control.schemas", "control.policy-versions", "control.commands"}
ROLES = (
    "prompter",
    "rollout",
    "reward",
    "judge",
    "reference",
    "actor-forward",
    "critic",
    "teacher",
    "advantage",
    "trainer",
    "evaluator",
)
ROLES += ("controller", "metrics")
HEARTBEATS, METRICS = (
    [f"control.{kind}.{role}" for role in ROLES] for kind in ("heartbeats", "metrics")
)
STOPPED: dict[str, Any] = {
    "host": "h",
    "pid": 1,
    "state": WorkerState.STOPPED,
    "num_processed": 0,
    "num_in_flight": 0,
    "last_progress_at": 0,
}
READS = {
    "prompter": {
        "control.prompt-group-outcomes",
        "control.prompter-state",
        "prompt.groups",
        "control.heartbeats.rollout",
    },
    "rollout": {"prompt.groups", "control.heartbeats.rollout", "control.broadcast-membership"},
    "reward": {"rollout.samples"},
    "judge": {"rollout.samples"},
    "reference": {"rollout.samples"},
    "actor-forward": {"rollout.samples", "control.broadcast-membership"},
    "critic": {"rollout.samples", "advantage.samples", "control.train-steps"},
    "teacher": {"rollout.samples"},
    "advantage": {
        "rollout.samples",
        "reward.scores",
        "reference.logprobs",
        "actor.logprobs",
        "critic.values",
        "teacher.logprobs",
    },
    "trainer": {
        "advantage.samples",
        "prompt.end-requests",
        "control.train-steps",
        "control.prompt-group-outcomes",
        "control.evaluations",
        "control.broadcast-membership",
    },
    "evaluator": {"control.evaluations"},
    "controller": {
        "control.train-steps",
        "control.prompt-group-outcomes",
        *HEARTBEATS,
        *METRICS,
        "control.evaluations",
    },
    "metrics": {*METRICS, "control.train-steps", "control.evaluations"},
}
WRITES = {
    "prompter": {"prompt.groups", "control.prompter-state"},
    "rollout": {"rollout.samples", "prompt.end-requests", "rollout.dead-letters"},
    "reward": {"reward.scores", "prompt.end-requests", "reward.dead-letters"},
    "judge": {"reward.scores", "prompt.end-requests", "judge.dead-letters"},
    "reference": {"reference.logprobs", "prompt.end-requests", "reference.dead-letters"},
    "actor-forward": {"actor.logprobs", "prompt.end-requests", "actor-forward.dead-letters"},
    "critic": {"critic.values", "prompt.end-requests", "critic.dead-letters"},
    "teacher": {"teacher.logprobs", "prompt.end-requests", "teacher.dead-letters"},
    "advantage": {"advantage.samples", "advantage.dead-letters"},
    "trainer": {
        "control.policy-versions",
        "control.train-steps",
        "control.prompt-group-outcomes",
        "control.broadcast-membership",
        "trainer.dead-letters",
    },
    "evaluator": {"control.evaluations"},
    "controller": {"control.commands", "control.audit"},
    "metrics": set(),
}


@dataclass(frozen=True)
class SecuredRun:
    """A run on the module's broker, and connections to it as any principal."""

    config: RunConfig

    @property
    def plan(self) -> TopicPlan:
        """With the topics of all roles, whether the run needs them or not."""
        return replace(TopicPlan.from_config(self.config), roles=ROLES)

    def as_(self, principal: str, *, worker: str = "") -> Connection:
        return Connection.from_config(
            apply_principal(self.config, principal).broker,
            client_id=f"{self.config.run.id}.{worker or principal}",
        )

    def changed(self, **broker: object) -> SecuredRun:
        return SecuredRun(
            self.config.model_copy(update={"broker": self.config.broker.model_copy(update=broker)})
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("security")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[EmbeddedBroker]:
    create_folder(run_config("mine", folder, "unknown:1"), folder, lifetime=YEAR)
    with EmbeddedBroker(tmp_path_factory.mktemp("node"), credentials=folder) as running:
        yield running


@pytest.fixture(scope="module")
def mine(broker: EmbeddedBroker, folder: Path) -> SecuredRun:
    return secured_run("mine", broker, folder)


@pytest.fixture(scope="module")
def neighbour(broker: EmbeddedBroker, folder: Path) -> SecuredRun:
    return secured_run("neighbour", broker, folder)


def run_config(run_id: str, folder: Path, bootstrap_servers: str) -> RunConfig:
    broker = {
        "bootstrap_servers": bootstrap_servers,
        "credentials": folder,
        "request_timeout_seconds": REQUEST_SECONDS,
        "partitions_per_version": 1,
    }
    return small_run(
        {
            "run": {"id": run_id},
            "model": {"path": "m"},
            "data": {"source": "jsonl:x"},
            "broker": broker,
        }
    )


def secured_run(run_id: str, broker: EmbeddedBroker, folder: Path) -> SecuredRun:
    config = run_config(run_id, folder, broker.bootstrap_servers)
    create_folder(config, folder, lifetime=YEAR)
    apply_security(config, admin_connection(config))
    run, everything = SecuredRun(config), replace(TopicPlan.from_config(config), roles=ROLES)
    apply_topics(config, admin := Admin(run.as_("operator")))
    admin.create(
        [spec for spec in everything.specs() if spec.name not in admin.topics(run.plan.topic(""))]
    )
    return run


def never() -> bool:
    """What is waited for is an error."""
    return False


def entity_of(topic: str, run: SecuredRun) -> str:
    return topic.removeprefix(run.plan.topic(""))


def writable(run: SecuredRun, role: str) -> set[str]:
    """Try to write a record to every topic of the run."""
    producer = Producer(run.as_(role).settings(enable_idempotence=False))
    answers: dict[str, KafkaError | None] = {}
    for spec in run.plan.specs():
        producer.produce(
            spec.name,
            b"x",
            key="k",
            on_delivery=lambda error, message: answers.update({message.topic(): error}),
        )
    assert producer.flush(PATIENCE_SECONDS) == 0
    refused = {error.code() for error in answers.values() if error is not None}
    assert refused <= {KafkaError.TOPIC_AUTHORIZATION_FAILED}
    return {entity_of(topic, run) for topic, error in answers.items() if error is None}


def readable(run: SecuredRun, role: str) -> set[str]:
    """Try to read the first record of every topic; each has one."""
    settings = run.as_(role).settings(
        group_id=f"relax.{run.config.run.id}.{role}-0.reader",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    consumer = Consumer(settings)
    shown = consumer.list_topics(
        timeout=PATIENCE_SECONDS
    ).topics  # what a principal may not even know of never answers
    specs = [spec for spec in run.plan.specs() if spec.name in shown]
    consumer.assign(
        [
            TopicPartition(spec.name, partition, 0)
            for spec in specs
            for partition in range(spec.num_partitions)
        ]
    )
    found: set[str] = set()
    silent = {spec.name for spec in specs}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while silent:
        assert time.monotonic() < deadline, f"nothing said of {silent}"
        for message in consumer.consume(500, 0.1):
            silent.discard(message.topic())
            if message.error() is None:
                found.add(entity_of(message.topic(), run))
            else:
                assert message.error().code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    consumer.close()
    return found


def test_roles_may_write_exactly_the_documented_topics(mine: SecuredRun) -> None:
    """Each cell of role and topic, tried on the broker."""
    found = {role: writable(mine, role) for role in ROLES}
    assert found == writes_by_page(
        ROLES,
        with_dead_letters=tuple(role for role in ROLES if f"{role}.dead-letters" in WRITES[role]),
    )
    assert found == {
        role: {f"control.heartbeats.{role}", f"control.metrics.{role}"} | entities
        for role, entities in WRITES.items()
    }


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed")
def test_kcat_of_any_release_reads_as_the_principal_reader(
    broker: EmbeddedBroker, mine: SecuredRun, tmp_path: Path
) -> None:
    """By PLAIN over TLS, with the rights of the principal."""
    topic = mine.plan.topic("control.commands")
    RecordProducer(mine.as_("operator")).write([ProducerRecord(topic, b"x", key="k")])
    (tmp_path / "kcat.conf").write_text(
        build_client_properties(broker, form="kcat", principal="relax.mine.reader")
    )
    kcat = ["kcat", "-F", str(tmp_path / "kcat.conf"), "-t", topic]
    read = subprocess.run(
        [*kcat, "-C", "-e", "-q", "-o", "beginning", "-f", "%k=%s\n"],
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    assert b"k=x" in read.stdout.splitlines(), read.stderr
    written = subprocess.run(
        [*kcat, "-P"], input=b"y", capture_output=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert b"authorization failed" in written.stderr.lower()
    with pytest.raises(ConfigError, match=r"no PLAIN password for relax.mine.reward: only"):
        build_client_properties(broker, form="kcat", principal="relax.mine.reward")


def test_roles_may_read_exactly_the_documented_topics(mine: SecuredRun) -> None:
    RecordProducer(mine.as_("operator")).write(
        ProducerRecord(spec.name, b"x", key="k") for spec in mine.plan.specs()
    )
    assert {role: readable(mine, role) for role in READS} == {
        role: COMMON_READS | entities for role, entities in READS.items()
    }


def test_worker_starts_once_the_operator_has_published_its_schemas(
    broker: EmbeddedBroker, folder: Path
) -> None:
    run = secured_run("schemas", broker, folder)
    admin = Admin(run.as_("operator"))
    config = apply_principal(run.config, "operator")
    topic = run.plan.topic("control.schemas")

    def worker() -> Worker:
        store = ObjectStore.open("memory://", waits=False)
        return Worker(
            "reward",
            apply_principal(run.config, "reward"),
            claim_check=StoreClaimCheck(store, claim_check_threshold_bytes=10**6),
        )

    refused = worker()
    with (
        closing(refused),
        pytest.raises(
            AccessDenied,
            match=r"schema\(s\) of this release are not on .*call relax topics apply",
        ),
    ):
        refused.__enter__()
    assert admin.end_offsets([(topic, 0)]) == {(topic, 0): 0}
    missing = find_missing_schemas(config, admin)
    assert missing == EventCodec().published_form()
    assert publish_schemas(config, admin) == len(missing)
    assert (find_missing_schemas(config, admin), publish_schemas(config, admin)) == ({}, 0)
    with worker():
        assert admin.end_offsets([(topic, 0)]) == {(topic, 0): len(missing)}


def test_forged_policy_version_is_rejected_and_not_written_to_the_log(mine: SecuredRun) -> None:
    topic = mine.plan.topic("control.policy-versions")
    before = Admin(mine.as_("operator")).end_offsets([(topic, 0)])
    with pytest.raises(
        AccessDenied, match=r"TOPIC_AUTHORIZATION_FAILED.*relax broker secure CONFIG --apply"
    ):
        RecordProducer(mine.as_("rollout")).write(
            [ProducerRecord(topic, b"version 99, tensors of mine")]
        )
    assert Admin(mine.as_("operator")).end_offsets([(topic, 0)]) == before


@pytest.mark.parametrize(
    ("entity", "events"),
    [
        (
            "advantage.samples",
            [
                ready(of=2, advantages=np.full(4, 100, np.float32)),
                ready(index=1, advantages=np.full(4, 100, np.float32)),
            ],
        ),
        ("advantage.samples", [ended(outcome=Outcome.TRAINED)]),
        ("control.prompt-group-outcomes", [ended(outcome=Outcome.TRAINED)]),
        (
            "control.metrics.trainer",
            [MetricsReported(worker_id="trainer-0", role="trainer", values={"loss": 9.0})] * 2,
        ),
        (
            "control.heartbeats.trainer",
            [WorkerHeartbeat(worker_id="trainer-0", role="trainer", **STOPPED)],
        ),
        ("control.commands", [RunCommanded(command=Command.STOP, reason="forged")]),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value[0]).__name__,
)
def test_compromised_reward_worker_can_not_write_events_of_other_roles(
    mine: SecuredRun, entity: str, events: list[Event]
) -> None:
    """It runs programs that a model wrote, so it is the likeliest one. Nothing of it reaches the
    log."""
    topic = mine.plan.topic(entity)
    before = Admin(mine.as_("operator")).end_offsets([(topic, 0)])
    with pytest.raises(AccessDenied, match="TOPIC_AUTHORIZATION_FAILED"):
        RecordProducer(mine.as_("reward")).write(
            [
                ProducerRecord(topic, EventCodec().encode(event), key="000000-0000-0", partition=0)
                for event in events
            ]
        )
    assert Admin(mine.as_("operator")).end_offsets([(topic, 0)]) == before


def test_stolen_transactional_id_is_rejected_and_its_owner_continues(mine: SecuredRun) -> None:
    owner = TransactionalWriter(
        mine.as_("trainer"), transactional_id=mine.plan.transactional_id("trainer")
    )
    with pytest.raises(AccessDenied, match="TRANSACTIONAL_ID_AUTHORIZATION_FAILED"):
        TransactionalWriter(
            mine.as_("rollout"), transactional_id=mine.plan.transactional_id("trainer")
        )
    owner.commit([ProducerRecord(mine.plan.topic("control.train-steps"), b"x")])
    owner.close()


@pytest.mark.parametrize("leases", [ShareGroupLeases, ConsumerGroupLeases])
def test_worker_not_authorized_to_lease_gets_access_denied(
    mine: SecuredRun, leases: Callable[..., ShareGroupLeases | ConsumerGroupLeases]
) -> None:
    connection = mine.as_("reward")
    source = leases(
        connection,
        group=mine.plan.consumer_group("rollout"),
        topic=mine.plan.topic("prompt.groups"),
        max_leases=1,
        on_lease=lambda _: None,
    )
    with pytest.raises(AccessDenied, match="AUTHORIZATION_FAILED"):
        turn_until(never, connection.auth_failures.raise_fatal)
    source.close()


def test_only_authorized_roles_can_read_the_backlog_of_the_queue(
    mine: SecuredRun,
) -> None:
    queue = mine.plan.consumer_group("rollout")

    def reported() -> bool:
        with suppress(BrokerUnavailable):  # the broker's first group waits for its topic to be made
            return read_queue_positions(mine.as_("controller"), queue) == {}
        return False

    turn_until(reported)
    with pytest.raises(BrokerError, match=rf"{queue} .*error 30"):  # GROUP_AUTHORIZATION_FAILED
        read_queue_positions(mine.as_("reward"), queue)


def test_role_can_not_join_the_consumer_group_of_another_role(mine: SecuredRun) -> None:
    topics = [mine.plan.topic("control.metrics.reward")]
    consumer = SubscribedConsumer(
        mine.as_("metrics"), consumer_group=mine.plan.consumer_group("reward"), topics=topics
    )
    with pytest.raises(AccessDenied, match="GROUP_AUTHORIZATION_FAILED"):
        turn_until(never, lambda: consumer.fetch(timeout_seconds=0.2))
    consumer.close()


def test_reader_can_inspect_but_not_change_the_run(mine: SecuredRun) -> None:
    looking, topic = Admin(mine.as_("reader")), mine.plan.topic("rollout.samples")
    assert len(looking.topics(mine.plan.topic(""))) == len(mine.plan.specs())
    assert looking.committed_offsets(mine.plan.consumer_group("trainer"), [(topic, 0)]) == {}
    lags = read_partition_lag(apply_principal(mine.config, "reader"), looking)
    assert "rollout" in {row.role for row in lags}
    refused: list[Callable[[], object]] = [
        lambda: RecordProducer(mine.as_("reader")).write([ProducerRecord(topic, b"x")]),
        lambda: looking.delete([topic]),
        lambda: looking.alter_topic(topic, {"retention.ms": "1"}),
        lambda: looking.alter_group(
            mine.plan.consumer_group("reward"), {"consumer.session.timeout.ms": "45000"}
        ),
        lambda: looking.create(mine.plan.specs()),
    ]
    for change in refused:
        with pytest.raises(BrokerRefused, match="AUTHORIZATION_FAILED"):
            change()
    assert len(looking.topics(mine.plan.topic(""))) == len(mine.plan.specs())


def test_principal_of_one_run_can_neither_see_nor_change_another_run(
    mine: SecuredRun, neighbour: SecuredRun
) -> None:
    for principal in ("operator", "reader", "trainer"):
        shown = {partition.topic for partition in Admin(mine.as_(principal)).partitions("")}
        assert shown
        assert [name for name in shown if not name.startswith(mine.plan.topic(""))] == []
    topic, impatient = (
        neighbour.plan.topic("control.commands"),
        mine.changed(request_timeout_seconds=IMPATIENT_SECONDS),
    )
    with pytest.raises(AccessDenied, match="TOPIC_AUTHORIZATION_FAILED"):
        RecordProducer(mine.as_("operator")).write([ProducerRecord(topic, b"stop")])
    with pytest.raises(AccessDenied, match="TOPIC_AUTHORIZATION_FAILED"):
        LogReader(mine.as_("operator")).watermarks(topic, 0)
    with pytest.raises(AccessDenied, match="TOPIC_AUTHORIZATION_FAILED"):
        LogReader(mine.as_("operator"), start={(topic, 0): 0})
    with pytest.raises(AccessDenied, match="GROUP_AUTHORIZATION_FAILED"):
        Admin(impatient.as_("operator")).committed_offsets(
            neighbour.plan.consumer_group("reward"), [(mine.plan.topic("rollout.samples"), 0)]
        )
    with pytest.raises(AccessDenied):
        TransactionalWriter(
            mine.as_("operator"), transactional_id=neighbour.plan.transactional_id("trainer")
        )


def wrong_password(run: SecuredRun, folder: Path) -> SecuredRun:
    (folder / "password").write_text("not the password\n")
    ca_file = SecurityFolder(credentials(run)).ca_file
    return run.changed(
        credentials=None,
        username="relax.mine.operator",
        password_file=folder / "password",
        ca_file=ca_file,
    )


def unknown_user(run: SecuredRun, folder: Path) -> SecuredRun:
    return wrong_password(run, folder).changed(username="relax.mine.absent")


def wrong_authority(run: SecuredRun, folder: Path) -> SecuredRun:
    (folder / "ca.pem").write_bytes(make_authority(lifetime=YEAR).certificate)
    return run.changed(ca_file=folder / "ca.pem")


def no_tls(run: SecuredRun, folder: Path) -> SecuredRun:
    return run.changed(credentials=None)


def credentials(run: SecuredRun) -> Path:
    assert run.config.broker.credentials is not None
    return run.config.broker.credentials


INTRUDERS = {
    wrong_password: r"authentication of user 'relax.mine.operator' failed; .*broker.password_file",
    unknown_user: r"authentication of user 'relax.mine.absent' failed; .*relax broker secure CONFIG --apply",
    wrong_authority: r"certificate of the broker at .* can't be trusted: (self-signed|unable to get local issuer) certificate.*broker.ca_file",
    no_tls: r"the broker at .* uses TLS and this client does not; set broker.credentials",
}


@pytest.mark.parametrize(
    ("disguise", "text"), INTRUDERS.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_unauthorized_client_gets_the_reason_within_the_request_timeout(
    mine: SecuredRun, tmp_path: Path, disguise: Callable[[SecuredRun, Path], SecuredRun], text: str
) -> None:
    connection = disguise(mine.changed(request_timeout_seconds=IMPATIENT_SECONDS), tmp_path).as_(
        "operator"
    )
    attempts: list[Callable[[], object]] = [
        lambda: Admin(connection).ping(timeout_seconds=IMPATIENT_SECONDS),
        lambda: TransactionalWriter(
            connection, transactional_id=mine.plan.transactional_id("trainer")
        ),
    ]
    for attempt in attempts:
        started = time.monotonic()
        with pytest.raises(AccessDenied, match=text):
            attempt()
        assert time.monotonic() - started < FEW_SECONDS


def test_writer_and_reader_with_a_wrong_password_fail_without_hanging(
    mine: SecuredRun, tmp_path: Path
) -> None:
    intruder, topic = (
        wrong_password(mine.changed(request_timeout_seconds=IMPATIENT_SECONDS), tmp_path),
        mine.plan.topic("control.commands"),
    )
    started = time.monotonic()
    with pytest.raises(AccessDenied, match=r"authentication of user .* failed"):
        RecordProducer(intruder.as_("operator")).write([ProducerRecord(topic, b"x")])
    reader = LogReader(intruder.as_("operator"), start={(topic, 0): 0})
    with pytest.raises(AccessDenied, match=r"authentication of user .* failed"):
        turn_until(never, lambda: reader.fetch(timeout_seconds=0.2))
    reader.close()
    assert time.monotonic() - started < FEW_SECONDS


def test_command_exits_with_the_code_for_denied_access(mine: SecuredRun, tmp_path: Path) -> None:
    run_file, intruder = tmp_path / "run.json", wrong_password(mine, tmp_path)
    run_file.write_text(intruder.config.model_dump_json())
    command = [sys.executable, "-m", "relax_events.cli", "topics", "show", str(run_file)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert (ended.returncode, ended.stdout) == (AccessDenied.exit_code, "") == (4, "")
    assert "error: reaching" in ended.stderr
    assert "authentication of user 'relax.mine.operator' failed" in ended.stderr
    assert "not the password" not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_secure_command_shows_changes_and_asks_for_confirmation(
    neighbour: SecuredRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_file, folder = tmp_path / "run.json", credentials(neighbour)
    run_file.write_text(neighbour.config.model_dump_json())
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    assert secure(run_file, out=folder, apply=True) == 6
    assert secure(run_file, out=folder, apply=True, yes=True) == 0
    assert secure(run_file, out=folder, apply=True, dry_run=True) == 0
    shown = capsys.readouterr().out
    assert re.search(r"set +relax.neighbour.trainer +password of the folder", shown)


def test_secure_grants_what_the_credentials_need_and_changes_only_differences(
    mine: SecuredRun,
) -> None:
    admin = admin_connection(mine.config)
    changes = plan_security(mine.config, admin)
    assert (changes.missing, changes.surplus, changes.unexpected_users) == ([], [], [])
    granted = PrincipalAdmin(admin).plan_changes("relax.mine.", (), ())
    lost, kept = granted.surplus[0], granted.surplus[1:]
    PrincipalAdmin(admin).apply(
        PrincipalAdmin(admin).plan_changes("relax.mine.", kept, changes.users),
        password_of=password_in(mine),
    )
    assert plan_security(mine.config, admin).missing == [lost]
    apply_security(mine.config, admin)
    assert plan_security(mine.config, admin).missing == []


def test_renewed_password_works_and_the_old_one_is_rejected(
    neighbour: SecuredRun, tmp_path: Path
) -> None:
    folder = SecurityFolder(credentials(neighbour))
    old = tmp_path / "old"
    old.write_bytes(folder.password_file("relax.neighbour.reader").read_bytes())
    create_folder(neighbour.config, folder.path, lifetime=YEAR, renewal=Renewal(passwords=True))
    apply_security(neighbour.config, admin_connection(neighbour.config))
    assert Admin(neighbour.as_("reader")).ping(timeout_seconds=PATIENCE_SECONDS) == 1
    late = neighbour.changed(
        credentials=None,
        username="relax.neighbour.reader",
        password_file=old,
        ca_file=folder.ca_file,
    )
    with pytest.raises(AccessDenied, match=r"authentication of user .* failed"):
        Admin(late.as_("reader")).ping(timeout_seconds=IMPATIENT_SECONDS)


def test_withdrawn_run_loses_access_and_other_runs_keep_theirs(
    broker: EmbeddedBroker,
    folder: Path,
    mine: SecuredRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    leaving, run_file = secured_run("leaving", broker, folder), tmp_path / "run.json"
    run_file.write_text(leaving.config.model_dump_json())
    connection = leaving.as_("reader")
    assert secure(run_file, out=folder, withdraw=True, dry_run=True) == 0
    assert Admin(connection).ping(timeout_seconds=PATIENCE_SECONDS) == 1
    capsys.readouterr()
    assert secure(run_file, out=folder, withdraw=True, yes=True) == 0
    shown = capsys.readouterr().out
    assert re.search(r"delete +relax.leaving.trainer", shown)
    assert re.search(r"withdraw +relax.leaving.reader +read +topic relax.leaving.\*", shown)
    with pytest.raises(AccessDenied, match=r"authentication of user .* failed"):
        Admin(connection).ping(timeout_seconds=IMPATIENT_SECONDS)
    assert SecurityFolder(folder).usernames("leaving") == []
    assert not list(folder.rglob("*leaving*"))
    assert plan_security(mine.config, admin_connection(mine.config)).missing == []
    assert Admin(mine.as_("reader")).ping(timeout_seconds=PATIENCE_SECONDS) == 1


def test_withdraw_together_with_apply_is_rejected(mine: SecuredRun, tmp_path: Path) -> None:
    run_file = tmp_path / "run.json"
    run_file.write_text(mine.config.model_dump_json())
    with pytest.raises(
        ConfigError, match=r"--withdraw takes what is there away; give it without --apply"
    ):
        secure(run_file, out=credentials(mine), withdraw=True, apply=True)


def password_in(run: SecuredRun) -> Callable[[str], str]:
    return lambda user: SecurityFolder(credentials(run)).password_file(user).read_text()


def test_credentials_are_rejected_for_a_broker_created_without_them(
    tmp_path: Path, folder: Path, broker: EmbeddedBroker
) -> None:
    data = tmp_path / "node/data"
    data.mkdir(parents=True)
    (data / "meta.properties").write_text("version=1\n")
    with pytest.raises(
        EnvironmentProblem,
        match=r"was created without broker.credentials and does not know their users",
    ):
        EmbeddedBroker(tmp_path / "node", credentials=folder).start()
    assert broker.state is not None
    assert broker.state.credentials == str(
        folder
    )  # so that a start without the key keeps it closed
