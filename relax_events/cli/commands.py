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
    "doctor": ("relax_events.cli.run:doctor", "Check all that a run needs without starting it."),
    "worker": (
        "relax_events.cli.run:worker",
        "Run one worker of a role: what a container, a unit file or a shell starts.",
    ),
    "status": (
        "relax_events.cli.status:status",
        "Show how a run stands, from another shell: live, or once.",
    ),
    "report": (
        "relax_events.cli.report:report",
        "Write the report of a run from its log, however the run ended.",
    ),
    "logs": (
        "relax_events.cli.logs:logs",
        "Show what the workers of a run wrote into their logs, and follow them.",
    ),
    "health": (
        "relax_events.cli.health:health",
        (
            "Ask a worker on this machine, or all workers of a run, whether their work loops are "
            "alive."
        ),
    ),
    "topics": (
        "relax_events.cli.topics:app",
        (
            "Plan, check and tend topics: plan, apply, check, describe, lag, tail, purge, reset, "
            "export, import."
        ),
    ),
    "samples": (
        "relax_events.cli.samples:app",
        "Look at what the model wrote and what became of it: tail, show, export.",
    ),
    "runs": (
        "relax_events.cli.runs:app",
        "The runs of a cluster: list, show, stop, timeline, replay, fork, delete.",
    ),
    "scale": (
        "relax_events.cli.scale:app",
        "Have workers come and go while a run goes on: out, in, status, cancel.",
    ),
    "lineage": (
        "relax_events.cli.lineage:app",
        "Follow weights back to their data and data to the weights: version, sample, prompt.",
    ),
    "rewards": (
        "relax_events.cli.rewards:app",
        (
            "Look at the reward functions that score samples, and try them: list, show, score, "
            "compare."
        ),
    ),
    "rescore": (
        "relax_events.cli.rescore:rescore",
        "Run another reward function over a run's samples and compare.",
    ),
    "deadletter": (
        "relax_events.cli.deadletter:app",
        "Look after records that roles could not use: list, show, requeue, drop.",
    ),
    "schemas": (
        "relax_events.cli.schemas:app",
        "Show and check the contract of the log: check, diff, show, release.",
    ),
    "alerts": (
        "relax_events.cli.alerts:app",
        "Hand Prometheus's alerts on to chats, mails and pagers: forward.",
    ),
    "eval": (
        "relax_events.cli.eval:app",
        "Look at how good the policy versions of a run are: show.",
    ),
    "ledger": (
        "relax_events.cli.ledger:app",
        "Prove from the log that nothing was lost or trained twice: check.",
    ),
    "algorithms": (
        "relax_events.cli.algorithms:app",
        "Show what a run can be trained by: list, show.",
    ),
    "models": (
        "relax_events.cli.models:app",
        "Make small models for trying things out: prepare, warm-start, make-tiny.",
    ),
    "serve": (
        "relax_events.cli.serve:serve",
        "Serve a model behind SGLang's HTTP API and a part of OpenAI's, without SGLang.",
    ),
    "broker": (
        "relax_events.cli.broker:app",
        (
            "Run or secure a Kafka broker: start, stop, status, logs, client-config, format, "
            "secure, quota."
        ),
    ),
}
HELP_FLAGS = ("--help", "-h")


def help_text() -> str:
    """Return what `relax --help` prints."""
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items())
    more = "relax COMMAND --help tells more; relax --version tells the version."
    return "\n\n".join(["Usage: relax COMMAND", SUMMARY, EXAMPLE, f"Commands:\n{commands}", more])
