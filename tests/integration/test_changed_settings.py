"""A worker that is started by hand or in a container rejects a run file whose settings are
incompatible with the run: it would leave prompt groups open.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.events.codec import EventCodec
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.roles.worker_factory import open_worker
from relax_events.runtime.run_description import build_run_description
from relax_events.topics import TopicPlan


@pytest.mark.parametrize("role", ["prompter", "advantage"])
def test_worker_rejects_a_run_file_that_is_incompatible_with_the_run(
    apply_run: Callable[..., RunConfig], producer: RecordProducer, role: str
) -> None:
    config = apply_run()
    topic = TopicPlan.from_config(config).topic("control.commands")
    producer.write(
        [ProducerRecord(topic, EventCodec().encode(build_run_description(config)), key="k")]
    )
    changed = config.model_copy(
        update={
            "run": config.run.model_copy(
                update={"prompts_per_step": 2 * config.run.prompts_per_step}
            )
        }
    )
    with pytest.raises(ConfigError, match=r"run.prompts_per_step: 16 -> 32"):
        open_worker(role, changed, index=0)
    with open_worker(role, config, index=0) as worker:
        assert worker.worker_id == f"{role}-0"
