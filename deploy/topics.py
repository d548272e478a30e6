"""Print the topics of a run as values of the Helm chart, for Strimzi's KafkaTopic resources.

python -m deploy.topics configs/gsm8k.toml > topics.yaml
helm install gsm8k deploy/helm/relax-events --values topics.yaml ...
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from relax_events.config import RunConfig, load_run_config
from relax_events.kafka.security.acls import build_run_prefix
from relax_events.topics import TopicPlan


def build_values(config: RunConfig) -> dict[str, Any]:
    """Return the chart's values for the run's topics."""
    prefix = build_run_prefix(config.run.id)
    topics = [
        {
            "entity": topic.name.removeprefix(prefix),
            "partitions": topic.num_partitions,
            "config": topic.settings,
        }
        for topic in TopicPlan.from_config(config).specs()
    ]
    return {"kafka": {"strimzi": {"topics": topics}}}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_file", type=Path)
    config = load_run_config(parser.parse_args().run_file)
    print(yaml.safe_dump(build_values(config), sort_keys=False), end="")


if __name__ == "__main__":
    main()
