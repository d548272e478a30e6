"""Topics that were created again under their names, or are gone, are refused before anything starts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_settings import small_run

from relax_events.errors import ConfigError
from relax_events.events.codec import EventCodec
from relax_events.runtime.run_description import build_run_description, is_recorded
from relax_events.session.resume import require_same_topics
from relax_events.topics import TopicPlan
from relax_events.topics.names import COMMANDS

CONFIG = small_run(
    {"run": {"id": "again"}, "model": {"path": "unused"}, "data": {"source": "jsonl:unused"}}
)
PLAN = TopicPlan.from_config(CONFIG)
NAMES = [spec.name for spec in PLAN.specs()]
LOGGED = {name: f"id-{number}" for number, name in enumerate(NAMES)}
OTHERS = [name for name in NAMES if name != PLAN.topic(COMMANDS)]
DESCRIBED = build_run_description(CONFIG, topic_ids=LOGGED)


def test_the_same_topics_pass() -> None:
    require_same_topics(CONFIG, DESCRIBED, LOGGED)
    require_same_topics(CONFIG, DESCRIBED, LOGGED | {"again.reward.scores.1": "later"})


@given(st.sets(st.sampled_from(OTHERS), min_size=1), st.sets(st.sampled_from(OTHERS)))
def test_every_topic_that_is_another_is_refused(created: set[str], gone: set[str]) -> None:
    topic_ids = {name: topic_id for name, topic_id in LOGGED.items() if name not in gone}
    topic_ids |= {name: f"new-{name}" for name in created}
    changed = sorted(created | gone)
    state = f"got new-{changed[0]}" if changed[0] in created else "and there is no such topic"
    with pytest.raises(ConfigError) as caught:
        require_same_topics(CONFIG, DESCRIBED, topic_ids)
    assert str(caught.value).startswith(
        f"topic {changed[0]} is not the one that run again has written to: its id must be "
        f"{LOGGED[changed[0]]} as on the log, {state} ({len(changed)} such topics)."
    )
    assert "relax runs fork again NEW_ID" in str(caught.value)


@given(st.dictionaries(st.sampled_from(OTHERS), st.text(min_size=1)))
def test_a_copy_of_a_log_describes_the_topics_of_the_original(others: dict[str, str]) -> None:
    copied = {PLAN.topic(COMMANDS): "another"} | others
    require_same_topics(CONFIG, DESCRIBED, copied)


def test_logs_of_earlier_releases_have_no_ids() -> None:
    require_same_topics(CONFIG, build_run_description(CONFIG), LOGGED)


def test_ids_travel_on_the_log_and_a_description_with_others_is_written_again() -> None:
    codec = EventCodec()
    read = codec.decode(codec.encode(DESCRIBED))
    assert read == DESCRIBED
    assert is_recorded(DESCRIBED, [read])
    assert not is_recorded(build_run_description(CONFIG), [read])
