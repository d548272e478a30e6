"""A run that purges old records keeps all that a restart needs: the trainer and the prompter are
killed after purges.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from harness import FaultRun, assert_ledger_balances

from relax_events.kafka.admin import Admin
from relax_events.objects import ObjectStore
from relax_events.objects.version_objects import list_stored_versions

BECAUSE = "since their records are purged"
ALWAYS_UNPROVEN = {
    f"that the record of {{}} trained samples is the one that the train step names, {BECAUSE}",
    f"that {{}} prompt groups were issued before they ended, {BECAUSE}",
}
MAYBE_UNPROVEN = {
    f"that {{}} trained samples were generated as they were trained, {BECAUSE}",
    f"that the rewards of {{}} trained samples were scored, {BECAUSE}",
}


@pytest.mark.long
def test_run_recovers_when_old_versions_were_purged(start_run: Callable[..., FaultRun]) -> None:
    run = start_run(
        run={"num_steps": 24, "retain_versions": 3},
        trainer={"checkpoint_every": 2},
        objects={"claim_check_threshold_bytes": 60},
    )
    process = run.start()
    admin = Admin(run.connection)
    topics = [
        run.plan.topic(entity)
        for entity in ("advantage.samples", "rollout.samples", "prompt.groups")
    ]

    def is_purged() -> bool:
        topic_partitions = [
            (topic, partition) for topic in topics for partition in range(run.plan.queue_partitions)
        ]
        begins = admin.beginning_offsets(topic_partitions)
        return all(
            any(
                begins[topic_partition]
                for topic_partition in topic_partitions
                if topic_partition[0] == topic
            )
            for topic in topics
        )

    run.wait_until(is_purged, "records of every kind are purged")
    assert run.state.num_steps < 24
    run.wait_until_ready_again(
        "trainer-0", "prompter-0", killed=run.kill("trainer-0", "prompter-0")
    )
    assert run.wait_until_ended(process) == 0
    ledger = assert_ledger_balances(run)
    assert min(ledger["samples_purged"], ledger["prompt_groups_purged"]) > 0
    claims = {re.sub(r"[0-9]+", "{}", claim): claim for claim in ledger["unproven"]}
    assert claims.keys() >= ALWAYS_UNPROVEN, claims
    # A step that the checkpoint doesn't hold yet keeps its own records, while what these were made
    # from may be purged with its version.
    assert claims.keys() <= ALWAYS_UNPROVEN | MAYBE_UNPROVEN, claims
    # The prompter that started again knew of slots whose issue was purged: it issued none of them
    # again.
    assert (
        sum(line["num_prompt_groups"] for line in run.logged("prompter-0", "prompt_groups.issued"))
        <= ledger["outcomes"]["issued"]
    )
    # Bit for bit: what was trained again from the log has the weights that were published.
    assert all(line["identical"] for line in run.logged("trainer-0", "train_steps.replayed"))
    assert run.logged("trainer-0", "checkpoint.loaded")
    assert run.logged("controller-0", "records.purged")
    assert run.logged("controller-0", "objects.purged")
    versions = list_stored_versions(ObjectStore.open(run.config.objects_uri))
    assert versions[0] > 0, "arrays of versions that were purged are gone"
