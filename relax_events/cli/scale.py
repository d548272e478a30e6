"""`relax scale`: add and remove workers at runtime, by the API of the controller."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from relax_events.cli.output import agreed
from relax_events.cli.parameters import Output, Overrides, RunFile, Yes
from relax_events.errors import CheckFailed, ConfigError

if TYPE_CHECKING:
    from relax_events.controller.api_client import ScaleClient

COLUMNS = ("request", "status", "model", "workers", "kind", "created", "error")


def scale(
    config: RunFile,
    *overrides: Overrides,
    up_to: int | None = None,
    down_to: int | None = None,
    attach: tuple[str, ...] = (),
    detach: tuple[str, ...] = (),
    cancel: str = "",
    model: str = "default",
    timeout_seconds: float | None = None,
    force: bool = False,
    key: str = "",
    dry_run: bool = False,
    yes: Yes = False,
    url: str = "",
    token_file: Path | None = None,
    output: Output = "table",
) -> int:
    """Show the workers of the scalable roles and the scaling requests; add workers, remove the
    newest, or cancel a request. A request returns at once.

    Example: relax scale configs/quickstart.toml --up-to 3

    Args:
        up_to: Add workers until there are so many.
        down_to: Remove workers until there are so many: the newest drain and stop; those that the
            run started with stay.
        attach: Add a worker for an SGLang server, http://host:port; may be given several times.
        detach: Remove the worker of such a server; may be given several times.
        cancel: Id of an open request that adds workers; those that it started are removed.
        model: `default` are the rollout workers; reward, judge, reference, actor-forward and
            teacher can be scaled as well.
        timeout_seconds: How long new workers may take until they serve, by default
            health.start_seconds; or leaving ones to drain, by default and at most
            workers.drain_seconds.
        force: Don't drain: other workers generate their prompt groups again.
        key: Idempotency key: a repeated call with the same key makes no second request.
        dry_run: Say what would be done, and do nothing.
        url: Address of the API; by default from the run's folder.
        token_file: File that holds its token; by default the run's own.
    """
    values = {
        "--up-to": up_to,
        "--down-to": down_to,
        "--attach": attach or None,
        "--detach": detach or None,
        "--cancel": cancel or None,
    }
    flags = [name for name, value in values.items() if value is not None]
    if len(flags) > 1:
        raise ConfigError(f"{' and '.join(flags)} are different requests; give one of them")
    client = _client(config, overrides, url, token_file)
    if not flags:
        _show_workers(client, output)
        return 0
    if cancel:
        answer = client.call("POST", f"scale_out/{quote(cancel, safe='')}/cancel")
        _show_answer(answer, output)
        return 0
    is_out = up_to is not None or bool(attach)
    body = {
        "model_name": model,
        "num_replicas": (up_to if is_out else down_to) or 0,
        "engine_urls": list(attach or detach),
        "timeout_secs": timeout_seconds,
        **({"dry_run": dry_run} if is_out else {"force": force}),
    }
    if not is_out:
        plan = client.call("POST", "scale_in", body | {"dry_run": True}, key=key)
        if dry_run or not plan["selected_engines"]:
            _show_answer(plan, output)
            return 0
        if not agreed(f"Remove workers {', '.join(plan['selected_engines'])}?", yes=yes):
            return CheckFailed.exit_code
    route = "scale_out" if is_out else "scale_in"
    _show_answer(client.call("POST", route, body, key=key), output)
    return 0


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


def _show_workers(client: ScaleClient, output: Output) -> None:
    from relax_events.cli.output import print_rows

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


def _show_answer(answer: dict[str, Any], output: Output) -> None:
    from relax_events.cli.output import print_json

    if output == "json":
        print_json(answer)
        return
    named = f" {answer['request_id']}" if answer["request_id"] else ""
    print(f"{answer['status']}{named}: {answer['message']}")
