"""The doctor with a broker: it lists the topics that would be created, and rejects a plan that
contradicts existing topics.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relax_events.config import RunConfig
from relax_events.errors import BrokerUnavailable, CheckFailed
from relax_events.kafka.admin import Admin
from relax_events.launcher.broker_checks import check_broker
from relax_events.launcher.checked_run import CheckedRun
from relax_events.topics import TopicPlan


def test_doctor_plans_all_topics_of_a_new_run(
    make_run_config: Callable[..., RunConfig], bootstrap_servers: str, admin: Admin
) -> None:
    config = make_run_config(broker={"bootstrap_servers": bootstrap_servers})
    plan = TopicPlan.from_config(config)
    assert check_broker(CheckedRun(config)).startswith(
        f"{bootstrap_servers} answers; {len(plan.specs())} topic change(s) to apply; room for "
    )
    assert admin.topics(plan.topic("")) == {}


def test_doctor_plans_no_change_for_existing_topics(apply_run: Callable[..., RunConfig]) -> None:
    assert " answers; 0 topic change(s) to apply; room for " in check_broker(
        CheckedRun(apply_run())
    )


def test_doctor_rejects_a_max_staleness_that_contradicts_the_topics(
    apply_run: Callable[..., RunConfig],
) -> None:
    config = apply_run()
    other = config.model_copy(
        update={
            "run": config.run.model_copy(update={"max_staleness": config.run.max_staleness + 1})
        }
    )
    with pytest.raises(
        CheckFailed, match=r"has 6 partitions, the plan says 8; take another run.id"
    ):
        check_broker(CheckedRun(other))


def test_unresponsive_broker_is_reported_within_the_request_timeout(
    make_run_config: Callable[..., RunConfig],
) -> None:
    config = make_run_config(
        broker={"bootstrap_servers": "127.0.0.1:1", "request_timeout_seconds": 1.0}
    )
    with pytest.raises(
        BrokerUnavailable,
        match=r"no broker answered at 127.0.0.1:1 within 1 s; start it, or set broker.bootstrap_servers",
    ):
        check_broker(CheckedRun(config))
