"""`relax broker`: the Kafka node of this machine, started, stopped and looked at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from relax_events.cli.parameters import Output

if TYPE_CHECKING:
    from relax_events.kafka.embedded import EmbeddedBroker

app = App(
    name="broker",
    help=(
        "Run a real Apache Kafka node on this machine.\n\nExample: relax broker start && relax "
        "broker status"
    ),
)
_DEFAULT_DIRECTORY = Path(".relax/broker")

app.command("relax_events.cli.broker_security:secure", name="secure")

Directory = Annotated[Path, Parameter(help="Where the broker keeps its records, log and settings.")]


@app.command
def start(
    *,
    directory: Directory = _DEFAULT_DIRECTORY,
    port: int = 0,
    credentials: Path | None = None,
    password: bool | None = None,
    heap_mib: int = 0,
    timeout_seconds: float = 180.0,
) -> None:
    """Start the broker in the background and print its bootstrap servers; it runs until `relax
    broker stop`, also one that a run had started.

    Example: relax broker start --directory .relax/broker

    Clients log in with the password that it makes in its folder, which commands and runs find
    there; `relax broker status --client-config java` shows others how.

    Args:
        directory: Where the broker keeps its records, log and settings.
        port: Where clients connect; 0 takes the port used before, or a free one.
        credentials: A folder made by `relax broker secure`: only its principals get in, from this
            start on.
        password: Whether clients log in; --no-password lets every user of this machine in, from
            this start on until --password.
        heap_mib: The most that its heap may grow to, in MiB; 0 is a sixteenth of the machine's
            memory, 512 to 4096.
        timeout_seconds: How long it may take to get ready, the first download apart.
    """
    from relax_events.kafka.embedded import EmbeddedBroker

    broker = EmbeddedBroker(
        directory, port=port, credentials=credentials, has_password=password, heap_mib=heap_mib
    )
    broker.start(timeout_seconds=timeout_seconds)
    print(broker.bootstrap_servers)


@app.command
def format(directory: Path, *, credentials: Path, cluster_id: str, node_id: int = 1) -> None:  # noqa: A001 the name of the command
    """Prepare the empty disk of a broker that is not ours to start, so that its super user can log
    in; one that is formatted stays as it is.

    Example: relax broker format /var/lib/kafka/data --credentials .relax/security --cluster-id
        5L6g3nShT-eMCtK--X86sw

    Args:
        directory: The broker's log folder.
        credentials: A folder made by `relax broker secure`.
        cluster_id: What all brokers of the cluster share.
        node_id: The broker's number among them.
    """
    from relax_events.kafka.embedded.security import read_bootstrap_users
    from relax_events.kafka.embedded.storage import ensure_formatted
    from relax_events.kafka.security.folder import SecurityFolder

    ensure_formatted(
        directory,
        users=read_bootstrap_users(SecurityFolder(credentials.absolute())),
        node_id=node_id,
        cluster_id=cluster_id,
    )


@app.command
def stop(
    *, directory: Directory = _DEFAULT_DIRECTORY, timeout_seconds: float = 20.0, force: bool = False
) -> None:
    """Shut the broker down cleanly, unless a run or a command uses it; its records and its port
    stay for the next start.

    Example: relax broker stop

    Args:
        directory: Where the broker keeps its records, log and settings.
        timeout_seconds: How long it may take before it is ended by force.
        force: Also under those who use it; a run starts it again.
    """
    from relax_events.errors import CheckFailed
    from relax_events.kafka.embedded import EmbeddedBroker

    broker = EmbeddedBroker(directory)
    if broker.is_running and (users := broker.users) and not force:
        raise CheckFailed(
            f"the broker in {directory} is used by process {', '.join(map(str, users))}; end "
            "that first, or give --force"
        )
    broker.stop(timeout_seconds=timeout_seconds)


@app.command
def status(
    *,
    directory: Directory = _DEFAULT_DIRECTORY,
    lines: int = 0,
    follow: bool = False,
    client_config: Literal["", "java", "librdkafka", "kcat"] = "",
    principal: str = "",
    output: Output = "table",
) -> int:
    """Show whether the broker runs, where, since when, and what it takes on disk; or the end of its
    log, or how other tools log in. Exit code 3 when it is down.

    Example: relax broker status --output json

    Args:
        directory: Where the broker keeps its records, log and settings.
        lines: Print so many of the last lines of its log instead; with --follow 50 by default.
        follow: Go on with new lines of its log until the broker ends.
        client_config: Print the settings by which other tools log in instead, the password among
            them, for a file of your own: properties for Kafka's own tools (--command-config), for
            programs on librdkafka 2.6.1 or later, or for kcat on any librdkafka, valid until the
            broker's next start.
        principal: With --client-config, who logs in to a broker that has a security folder, such
            as relax.RUN.reader.
    """
    from relax_events.cli.output import print_fields
    from relax_events.errors import BrokerUnavailable, ConfigError
    from relax_events.kafka.embedded import EmbeddedBroker
    from relax_events.kafka.embedded.status import read_broker_status
    from relax_events.kafka.embedded.tool_login import build_client_properties

    broker = EmbeddedBroker(directory)
    if principal and not client_config:
        raise ConfigError("--principal says who logs in; give --client-config FORM as well")
    if client_config:
        print(build_client_properties(broker, form=client_config, principal=principal), end="")
    elif lines or follow:
        _print_log(broker, lines, follow=follow)
    else:
        report = read_broker_status(directory)
        print_fields(report.describe(), output, data=report)
        return 0 if report.running else BrokerUnavailable.exit_code
    return 0


def _print_log(broker: EmbeddedBroker, num_lines: int, *, follow: bool) -> None:
    from relax_events.kafka.embedded.broker_log import follow_lines, read_last_lines

    end_byte = broker.log_path.stat().st_size if broker.log_path.exists() else 0
    for line in read_last_lines(broker.log_path, num_lines=num_lines or 50, end_byte=end_byte):
        print(line)
    if follow and broker.is_running:
        for line in follow_lines(
            broker.log_path, start_byte=end_byte, ended_within=broker.wait_for_end
        ):
            print(line, flush=True)
