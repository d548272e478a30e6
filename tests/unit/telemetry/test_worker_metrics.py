"""A worker's metrics of its input: lag by topic and slot, of its assigned partitions."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from relax_events.telemetry.metrics import WorkerMetrics


def lag_of(metrics: WorkerMetrics) -> dict[tuple[str, str, str], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [
        sample
        for family in families
        for sample in family.samples
        if sample.name == "relax_consumer_lag_records"
    ]
    return {
        (sample.labels["role"], sample.labels["topic"], sample.labels["slot"]): sample.value
        for sample in samples
    }


def test_lag_is_summed_over_the_shards_of_a_slot() -> None:
    metrics = WorkerMetrics("advantage")
    counts = {
        ("rollout.samples", 0): 3,
        ("rollout.samples", 1): 4,
        ("rollout.samples", 2): 5,
        ("reward.scores", 5): 6,
    }
    metrics.consumer_lag.set(counts, shards=2)
    assert lag_of(metrics) == {
        ("advantage", "rollout.samples", "0"): 7,
        ("advantage", "rollout.samples", "1"): 5,
        ("advantage", "reward.scores", "2"): 6,
    }


def test_lag_of_a_slot_reassigned_to_another_worker_is_no_longer_reported() -> None:
    metrics = WorkerMetrics("reward")
    metrics.consumer_lag.set({("rollout.samples", 0): 3, ("rollout.samples", 1): 4}, shards=1)
    metrics.consumer_lag.set({("rollout.samples", 1): 0}, shards=1)
    assert lag_of(metrics) == {("reward", "rollout.samples", "1"): 0}
    metrics.consumer_lag.set({("rollout.samples", 0): 2, ("rollout.samples", 1): 1}, shards=1)
    assert lag_of(metrics) == {
        ("reward", "rollout.samples", "0"): 2,
        ("reward", "rollout.samples", "1"): 1,
    }


def test_dead_letter_counters_of_known_reasons_start_at_zero() -> None:
    metrics = WorkerMetrics("reward")
    metrics.initialize_dead_letters(["CorruptRecord", "PoisonSample"])
    metrics.count_dead_letter("PoisonSample")
    families = text_string_to_metric_families(metrics.render().decode())
    counts = {
        one.labels["reason"]: one.value
        for family in families
        for one in family.samples
        if one.name == "relax_dead_letters_total"
    }
    assert counts == {"CorruptRecord": 0, "PoisonSample": 1}


def test_number_of_series_does_not_grow_with_versions() -> None:
    def series(num_versions: int) -> int:
        metrics = WorkerMetrics("rollout")
        for version in range(num_versions):
            metrics.set_policy_version(version)
            metrics.count_processed(8, seconds=0.1 * version)
            metrics.count_tokens(version)
            metrics.count_ended_group("trained")
            metrics.count_dead_letter("CorruptRecord")
            metrics.consumer_lag.set({("rollout.samples", version % 6): version}, shards=2)
        return sum(
            len(family.samples)
            for family in text_string_to_metric_families(metrics.render().decode())
        )

    assert series(6) == series(600)
