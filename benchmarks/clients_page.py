"""The page of `benchmarks.clients`: tables from what was measured, and what follows by
calculation."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import report

COMMAND = "python -m benchmarks.clients"
QUESTION = """\
How many rollout workers do three brokers carry, and what do the workers ask for while they have nothing to do? Each simulated worker opens the
Kafka clients of a rollout worker by the product's own classes and settings: a producer, a reader of the four control topics, and its members of
the group that shares the prompt queue. It writes heartbeats and metrics. Engine, weights and the other roles are left out. The brokers are real:
combined nodes of Kafka with {heap} MiB of heap each, three copies of each record, acknowledged by two, with the embedded broker's other settings
(heartbeats of share groups every 500 ms).

Brokers and clients share this machine's two cores, so all times hold for a machine that is busy with both. "All have work" is the time from the
first client's start until every worker holds a prompt group; the clients start four at a time in each process of at most {per_process}. Under load
the prompter writes {rate:g} prompt groups a second for {seconds:g} s, and each is answered with {samples} samples of {tokens} tokens; the latency is
from a prompt group's issue to its acknowledged samples. "Control readers wait" is how long the brokers hold a worker's fetch from the control
topics while no record comes: half a second in a run of up to 50 workers, then 10 ms a worker, 5 s at most. In the end a tenth of the workers leave
at once, a prompt group for each worker is written, and the rest answer them."""
SHOWN_REQUESTS = 0.02
MOST_THREADS = 8


def write(measured: Sequence[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Write the page from these cases and those that it already has."""
    path = report.FOLDER / "clients.json"
    kept = json.loads(path.read_text())["data"] if path.exists() else []
    cases = {(one["case"], one["follow_wait_ms"]): one for one in [*kept, *measured]}
    ordered = sorted(cases.values(), key=lambda one: (one["prompt_queue"], one["num_workers"]))
    report.write(
        "clients",
        title="Rollout workers on three brokers",
        question=QUESTION.format(**settings),
        command=COMMAND,
        tables={
            "Start, load and loss": [times_of(one) for one in ordered],
            "What is open": [open_of(one) for one in ordered],
            "At rest: requests a second": [requests_of(one, ordered) for one in ordered],
            "At rest: cores of the three brokers, by thread": [
                threads_of(ordered, one) for one in ordered
            ],
        },
        conclusion=conclusion_of(ordered),
        data=ordered,
    )


def head_of(one: dict[str, Any]) -> dict[str, str]:
    """Name a case."""
    return {
        "workers": f"{one['num_workers']}",
        "queue": one["prompt_queue"].replace("_", " "),
        "control readers wait, s": f"{one['follow_wait_ms'] / 1000:g}",
    }


def times_of(one: dict[str, Any]) -> dict[str, str]:
    """Write how long the start, the answers and a rebalance take."""
    load = one["load"]
    return {
        **head_of(one),
        "all open, s": f"{one['open_seconds']:.1f}",
        "all have work, s": f"{one['work_seconds']:.1f}"
        if one["num_with_work"] == one["num_workers"]
        else f"{one['num_with_work']} after {one['work_seconds']:.0f}",
        "answered under load": f"{load['num_answered']} of {load['num_written']}",
        "p50 ms": f"{load['p50_ms']:.0f}",
        "p99 ms": f"{load['p99_ms']:.0f}",
        "a tenth left: all answered after, s": f"{one['after_leave_seconds']:.1f}"
        if one["num_after_leave"] >= one["num_workers"]
        else f"{one['num_after_leave']} after {one['after_leave_seconds']:.0f}",
    }


def open_of(one: dict[str, Any]) -> dict[str, str]:
    """Write what brokers and clients hold."""
    number = one["num_workers"]
    grown = sum(one["broker_rss_mib"]) - sum(one["empty_broker_rss_mib"])
    return {
        **head_of(one),
        "connections, most at one broker": f"{max(one['connections']):,}",
        "connections a worker": f"{sum(one['connections']) / number:.1f}",
        "broker MiB, three": f"{sum(one['broker_rss_mib']):,.0f}",
        "of it by the workers": f"{grown:,.0f}",
        "open files, most at one broker": f"{max(one['broker_files']):,}",
        "client MiB a worker": f"{one['client_rss_mib'] / number:.1f}",
        "client threads a worker": f"{one['client_threads'] / number:.1f}",
        "client files a worker": f"{one['client_files'] / number:.0f}",
    }


def requests_of(one: dict[str, Any], cases: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Write what the workers ask for at rest."""
    kinds = sorted(
        {
            kind
            for case in cases
            for kind, rate in case["rest"]["requests"].items()
            if rate / case["num_workers"] > SHOWN_REQUESTS
        }
    )
    found = one["rest"]["requests"]
    return {
        **head_of(one),
        **{kind: f"{found.get(kind, 0.0):,.0f}" for kind in kinds},
        "all": f"{sum(found.values()):,.0f}",
        "a worker": f"{sum(found.values()) / one['num_workers']:.1f}",
        "broker cores": f"{one['rest']['broker_cores']:.2f}",
        "client cores": f"{one['rest']['client_cores']:.2f}",
    }


def threads_of(cases: Sequence[dict[str, Any]], one: dict[str, Any]) -> dict[str, str]:
    """Write which threads of the brokers work at rest."""
    largest = max(cases, key=lambda case: case["rest"]["broker_cores"])["rest"]["threads_cores"]
    names = sorted(largest, key=lambda name: -largest[name])[:MOST_THREADS]
    controllers = [name for name in largest if name.startswith(("quorum", "kafka-"))]
    found = one["rest"]["threads_cores"]
    return {
        **head_of(one),
        **{f"`{name}`": f"{found.get(name, 0.0):.3f}" for name in names},
        "controllers and their log": f"{sum(found.get(name, 0.0) for name in controllers):.3f}",
    }


def spread(values: Sequence[float]) -> str:
    """Write the least and the most of some values."""
    least, most = f"{min(values):.1f}", f"{max(values):.1f}"
    return least if least == most else f"{least} to {most}"


def conclusion_of(cases: Sequence[dict[str, Any]]) -> str:
    """Say what a worker takes at rest, and what 1,000 would, by calculation."""
    lines = []
    for queue in sorted({one["prompt_queue"] for one in cases}):
        found = [one for one in cases if one["prompt_queue"] == queue]
        per_worker = [sum(one["rest"]["requests"].values()) / one["num_workers"] for one in found]
        largest = found[-1]
        number, cores = largest["num_workers"], largest["rest"]["broker_cores"]
        request_microseconds = cores / sum(largest["rest"]["requests"].values()) * 1e6
        lines.append(
            f"- {queue.replace('_', ' ')}: a worker at rest asks "
            f"{spread(per_worker)} times a second; at {number} workers a "
            f"request costs the brokers {request_microseconds:.0f} us. Computed, not run: 1,000 "
            f"workers at rest take {cores * 1000 / number:.1f} broker cores, "
            f"{statistics.median(sum(one['connections']) / one['num_workers'] for one in found) * 1000:,.0f} "
            f"connections and {largest['client_rss_mib'] * 1000 / number / 1024:.1f} GiB of clients, "
            f"over all machines."
        )
    notes = [f"- {one['case']}: {one['note']}" for one in cases if one.get("note")]
    return "\n".join([*lines, *notes])
