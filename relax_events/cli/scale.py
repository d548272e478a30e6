"""`relax scale`: add and remove workers at runtime, by the API of the controller."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from relax_events.cli.output import agreed
from relax_events.cli.parameters import Output, Overrides, RunFile, Yes
from relax_events.errors import CheckFailed

if TYPE_CHECKING:
    from relax_events.controller.api_client import ScaleClient

app = App(
    name="scale",
    help=(
        "Scale workers at runtime.\n\nExample: relax scale out configs/quickstart.toml --replicas 3"
    ),
)
Target = Annotated[
    int,
    Parameter(
        name=["--replicas", "-n"],
        help="Total number of workers after the change; leave out with --engine-url.",
    ),
]
Urls = Annotated[
    tuple[str, ...],
    Parameter(
        name="--engine-url",
        help="An SGLang server, as http://host:port; may be given several times.",
    ),
]
Api = Annotated[str, Parameter(help="Address of the API; by default from the run's folder.")]
TokenFile = Annotated[
    Path | None, Parameter(help="File that holds its token; by default the run's own.")
]
COLUMNS = ("request", "status", "model", "workers", "kind", "created", "error")


def _client(
    config: Path, overrides: tuple[str, ...], url: str, token_file: Path | None
) -> ScaleClient:
    from relax_events.config import load_run_config
    from relax_events.controller.api_client import ScaleClient
    from relax_events.controller.api_server import ApiEndpointFile
    from relax_events.secret_handling import read_secret

    run = load_run_config(config, overrides)
    endpoint = ApiEndpointFile.from_config(run)
    address = url.rstrip("/") or endpoint.read_url()
    return ScaleClient(
        address,
        read_secret(token_file, key="--token-file") if token_file else endpoint.read_token(),
        run.http.ca_file,
    )


@app.command
def out(
    config: RunFile,
    *overrides: Overrides,
    replicas: Target = 0,
    engine_url: Urls = (),
    model: str = "default",
    timeout_seconds: float | None = None,
    key: str = "",
    dry_run: bool = False,
    url: Api = "",
    token_file: TokenFile = None,
    output: Output = "table",
) -> None:
    """Add workers, or attach SGLang servers. Returns at once; `relax scale status` shows the
    progress.

    Example: relax scale out configs/quickstart.toml --replicas 3

    Args:
        engine_url: An SGLang server, as http://host:port; may be given several times.
        model: `default` are the rollout workers; reward, judge, reference, actor-forward and
            teacher can be scaled as well.
        timeout_seconds: How long they may take until they serve; by default
            health.start_seconds.
        key: Idempotency key: a repeated call with the same key makes no second request.
        dry_run: Say what would be done, and do nothing.
    """
    body = {
        "model_name": model,
        "num_replicas": replicas,
        "engine_urls": list(engine_url),
        "timeout_secs": timeout_seconds,
        "dry_run": dry_run,
    }
    _show_answer(
        _client(config, overrides, url, token_file).call("POST", "scale_out", body, key=key), output
    )


@app.command(name="in")
def scale_in(
    config: RunFile,
    *overrides: Overrides,
    replicas: Target = 0,
    engine_url: Urls = (),
    model: str = "default",
    timeout_seconds: float | None = None,
    force: bool = False,
    key: str = "",
    dry_run: bool = False,
    yes: Yes = False,
    url: Api = "",
    token_file: TokenFile = None,
    output: Output = "table",
) -> int:
    """Remove workers: the newest drain and stop; those that the run started with stay.

    Example: relax scale in configs/quickstart.toml --replicas 1 --dry-run

    Args:
        engine_url: An SGLang server to remove, as http://host:port; may be given several times.
        model: `default` are the rollout workers; reward, judge, reference, actor-forward and
            teacher can be scaled as well.
        timeout_seconds: Deadline for draining, at most workers.drain_seconds, the default.
        force: Don't drain: other workers generate their prompt groups again.
        key: Idempotency key: a repeated call with the same key makes no second request.
        dry_run: Show which workers would be removed, and remove none.
    """
    client = _client(config, overrides, url, token_file)
    body = {
        "model_name": model,
        "num_replicas": replicas,
        "engine_urls": list(engine_url),
        "timeout_secs": timeout_seconds,
        "force": force,
    }
    rehearsed = client.call("POST", "scale_in", body | {"dry_run": True}, key=key)
    if dry_run or not rehearsed["selected_engines"]:
        _show_answer(rehearsed, output)
        return 0
    if not agreed(f"Remove workers {', '.join(rehearsed['selected_engines'])}?", yes=yes):
        return CheckFailed.exit_code
    _show_answer(client.call("POST", "scale_in", body, key=key), output)
    return 0


@app.command
def status(
    config: RunFile,
    *overrides: Overrides,
    url: Api = "",
    token_file: TokenFile = None,
    output: Output = "table",
) -> None:
    """Show the workers of the scalable roles, and the scaling requests.

    Example: relax scale status configs/quickstart.toml
    """
    from relax_events.cli.output import print_rows

    client = _client(config, overrides, url, token_file)
    engines = client.call("GET", "engines")
    requests = [
        request
        for route in ("scale_out", "scale_in")
        for request in client.call("GET", route)["requests"]
    ]
    requests.sort(key=lambda request: request["created_at"])
    rows = [
        (name, engine)
        for name, model in engines["models"].items()
        for group in model["engine_groups"]
        for engine in group["engines"]
    ]
    columns = ("engine_id", "status", "policy_version", "pid", "node_id", "url")
    print_rows(
        ("model", "worker", "state", "version", "pid", "host", "server"),
        [[name, *(engine[key] for key in columns)] for name, engine in rows],
        output,
        data={"engines": engines, "requests": requests},
    )
    if requests and output == "table":
        print()
        print_rows(COLUMNS, [_row(request) for request in requests])


def _row(request: dict[str, Any]) -> list[str]:
    from relax_events.cli.output import excerpt, format_time

    return [
        request["request_id"],
        request["status"],
        request["model_name"],
        " ".join(request["engine_ids"] or request["selected_engines"]),
        request["kind"],
        format_time(int(request["created_at"] * 1e6)),
        excerpt(request["error_message"] or "-", 80),
    ]


@app.command
def cancel(
    config: RunFile,
    request: str,
    *overrides: Overrides,
    url: Api = "",
    token_file: TokenFile = None,
    output: Output = "table",
) -> None:
    """Cancel an open scale-out request; workers that it started are removed.

    Example: relax scale cancel configs/quickstart.toml scale-out-0123456789ab

    Args:
        request: Its id, as `relax scale status` shows it.
    """
    from urllib.parse import quote

    _show_answer(
        _client(config, overrides, url, token_file).call(
            "POST", f"scale_out/{quote(request, safe='')}/cancel"
        ),
        output,
    )


def _show_answer(answer: dict[str, Any], output: Output) -> None:
    from relax_events.cli.output import print_json

    if output == "json":
        print_json(answer)
        return
    named = f" {answer['request_id']}" if answer["request_id"] else ""
    print(f"{answer['status']}{named}: {answer['message']}")
