"""`relax topics describe`."""

from __future__ import annotations

from relax_events.cli.output import print_rows
from relax_events.cli.parameters import Output, Overrides, RunFile
from relax_events.cli.topics.run_topics import open_run


def describe(config: RunFile, *overrides: Overrides, output: Output = "table") -> None:
    """Show the run's topics: partitions, offsets, replicas, what they are for.

    Example: relax topics describe configs/quickstart.toml

    The numbers of records count the transactions' own marks, which no reader sees.

    """
    from relax_events.topics import TopicPlan

    with open_run(config, overrides) as (settings, admin):
        topics = TopicPlan.from_config(settings)
        docs = {spec.name: spec.doc for spec in topics.specs()}
        states = admin.topics(topics.topic(""))
        partitions = [
            (state.name, partition)
            for state in states.values()
            for partition in range(state.num_partitions)
        ]
        begins, ends = admin.beginning_offsets(partitions), admin.end_offsets(partitions)
        rows = []
        for name, state in sorted(states.items()):
            mine = [partition for partition in partitions if partition[0] == name]
            gone = sum(begins[partition] for partition in mine)
            kept = sum(ends[partition] - begins[partition] for partition in mine)
            rows.append(
                [
                    name,
                    state.num_partitions,
                    state.replication_factor,
                    kept,
                    gone,
                    docs.get(name, "not in the plan"),
                ]
            )
        print_rows(["topic", "partitions", "replicas", "records", "purged", "what"], rows, output)
