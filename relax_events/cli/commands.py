"""The commands of `relax`, and its `--help`, without the parser: loading that alone would take most
of a third of a second.
"""

from __future__ import annotations

SUMMARY = "Reinforcement-learning post-training as an event-driven pipeline on Kafka."
EXAMPLE = "Example: relax run configs/quickstart.toml"
COMMANDS = {
    "run": (
        "relax_events.cli.run:run",
        "Run everything on this machine, show progress, and end by itself.",
    ),
    "init": (
        "relax_events.cli.init:init",
        "Write a run file from a model's folder and a dataset, or those that the package brings.",
    ),
    "doctor": (
        "relax_events.cli.doctor:doctor",
        "Check everything a run needs, or attack this machine's walls.",
    ),
    "plan": (
        "relax_events.cli.plan:plan",
        "Show what a run takes on given devices: memory by worker and part, time of a step.",
    ),
    "try": (
        "relax_events.cli.try_task:try_task",
        "Play prompts of a run file without a run, and show what their reward is and why.",
    ),
    "worker": (
        "relax_events.cli.run:worker",
        "Run one worker of a role: what a container, a unit file or a shell starts.",
    ),
    "gateway": (
        "relax_events.cli.run:gateway",
        "Serve sessions on a run to harnesses that people start.",
    ),
    "status": (
        "relax_events.cli.status:status",
        "Show the progress of a run from another shell, live or once.",
    ),
    "dashboard": (
        "relax_events.cli.dashboard:dashboard",
        "Serve a page that shows runs live: curves, samples, workers, dead letters.",
    ),
    "report": (
        "relax_events.cli.report:report",
        "Write the report of a run from its log, however the run ended.",
    ),
    "logs": (
        "relax_events.cli.logs:logs",
        "Show and follow the logs of a run's workers.",
    ),
    "health": (
        "relax_events.cli.health:health",
        ("Check a worker on this machine, or all workers of a run."),
    ),
    "topics": (
        "relax_events.cli.topics:app",
        ("Show, check and operate topics: show, apply, tail, purge, reset, export, import."),
    ),
    "samples": (
        "relax_events.cli.samples:samples",
        "Follow, show and export samples with their outcomes.",
    ),
    "runs": (
        "relax_events.cli.runs:app",
        ("List, inspect, replay, fork and delete runs: show, stop, replay, fork, delete."),
    ),
    "scale": (
        "relax_events.cli.scale:scale",
        "Show, add and remove workers at runtime.",
    ),
    "lineage": (
        "relax_events.cli.lineage:show_lineage",
        "Trace weights to their training data and back, by version, sample, prompt group or row.",
    ),
    "rewards": (
        "relax_events.cli.rewards:rewards",
        "List, describe, try and compare reward functions.",
    ),
    "deadletter": (
        "relax_events.cli.deadletter:deadletter",
        "List, show, requeue and drop records that a role could not process.",
    ),
    "schemas": (
        "relax_events.cli.schemas:schemas",
        "Show, compare, check and release the event schemas.",
    ),
    "ledger": (
        "relax_events.cli.ledger:app",
        "Prove from the log that nothing was lost or trained twice: check.",
    ),
    "algorithms": (
        "relax_events.cli.algorithms:algorithms",
        "List the training algorithms, or describe one.",
    ),
    "models": (
        "relax_events.cli.models:app",
        "Make the model of a run file, or export one in another form: prepare, export.",
    ),
    "serve": (
        "relax_events.cli.serve:serve",
        "Serve a model behind SGLang's HTTP API and a part of OpenAI's, without SGLang.",
    ),
    "store": (
        "relax_events.cli.store:store",
        "Show each role's rights on the object store, and make its S3 policies.",
    ),
    "broker": (
        "relax_events.cli.broker:app",
        "Run or secure a Kafka broker: start, stop, status, format, secure.",
    ),
}
HELP_FLAGS = ("--help", "-h")


def help_text() -> str:
    """Return what `relax --help` prints."""
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items())
    more = "relax COMMAND --help shows more; relax --version shows the version."
    return "\n\n".join(["Usage: relax COMMAND", SUMMARY, EXAMPLE, f"Commands:\n{commands}", more])
