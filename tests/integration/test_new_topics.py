"""A topic that was created again under its name is refused by `relax run` and the doctor."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.kafka.admin import Admin
from relax_events.kafka.producer import RecordProducer
from relax_events.ops.topic_apply import apply_topics
from relax_events.runtime.run_description import build_run_description
from relax_events.session.resume import read_last_session, refuse_new_topics
from relax_events.topics import TopicPlan
from relax_events.topics.names import COMMANDS, TRAIN_STEPS
from tests.broker_steps import fill


def test_ids_of_topics_are_kafkas(admin: Admin, make_topic: Callable[..., str]) -> None:
    name = make_topic("work")
    ids = admin.topic_ids([name, f"{name}.missing"])
    assert list(ids) == [name]
    assert ids == admin.topic_ids([name])
    assert admin.topic_ids([]) == {}
    admin.delete([name])
    assert admin.topic_ids([name]) == {}


def test_a_topic_created_again_is_refused(
    admin: Admin, apply_run: Callable[..., RunConfig]
) -> None:
    config = apply_run()
    plan = TopicPlan.from_config(config)
    described = build_run_description(
        config, topic_ids=admin.topic_ids([spec.name for spec in plan.specs()])
    )
    assert len(described.topic_ids) == len(plan.specs())
    refuse_new_topics(config, described)
    topic = plan.sample_topics()[0]
    admin.delete([topic])
    with pytest.raises(ConfigError, match=rf"topic {topic} .*there is no such topic"):
        refuse_new_topics(config, described)
    apply_topics(config, admin)
    with pytest.raises(ConfigError, match=rf"topic {topic} is not the one that run .*, got "):
        refuse_new_topics(config, described)


def test_steps_of_a_run_whose_description_is_gone_are_refused(
    admin: Admin, apply_run: Callable[..., RunConfig], producer: RecordProducer
) -> None:
    config = apply_run()
    plan = TopicPlan.from_config(config)
    refuse_new_topics(config, None)  # a run whose session ended before its first step
    fill(producer, plan.topic(TRAIN_STEPS), [b"a step"])
    admin.delete([plan.topic(COMMANDS)])
    assert read_last_session(config) is None
    names = rf"{plan.topic(TRAIN_STEPS)} has records, and topic {plan.topic(COMMANDS)} does"
    with pytest.raises(ConfigError, match=names):
        refuse_new_topics(config, None)
    new = config.model_copy(update={"run": config.run.model_copy(update={"id": "never-begun"})})
    refuse_new_topics(new, None)
    apply_topics(config, admin)
    assert read_last_session(config) is None
    with pytest.raises(ConfigError, match=names):
        refuse_new_topics(config, None)
