"""The scaling API over a real socket: who may call it, the effect of calls, and that no request
makes it fail.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from small_settings import small_run

from relax_events.cli.scale import scale
from relax_events.config import RunConfig
from relax_events.controller.api_client import ScaleClient
from relax_events.controller.api_server import ApiEndpointFile, ApiServer, require_api_port
from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.controller.scaling_service import MainThreadTask, ScalingService
from relax_events.errors import BrokerUnavailable, CheckFailed, ConfigError, EnvironmentProblem
from relax_events.events.types import ChangeRequested, RunCommanded
from relax_events.launcher.checked_run import CheckedRun
from relax_events.launcher.file_checks import check_roles
from relax_events.projections.scale_requests import Status
from relax_events.projections.scaling import ScaleState
from relax_events.session.change_audit import describe_account
from tests.unit.run_events import make_heartbeat, run_config


@dataclass
class Served:
    """An API, and a fake of the controller's loop behind it."""

    config: RunConfig
    service: ScalingService
    server: ApiServer
    commands: list[RunCommanded]
    changes: list[ChangeRequested]
    client: ScaleClient

    def called(
        self, method: str, path: str, body: Any = None, **more: str
    ) -> tuple[int, dict[str, Any]]:
        """Call a route; return the code and the answer."""
        import http.client

        host, _, port = self.client.url.removeprefix("http://").rpartition(":")
        with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
            headers = {
                "Authorization": f"Bearer {self.client.token}",
                "Content-Type": "application/json",
            } | more
            content = (
                body
                if isinstance(body, bytes)
                else orjson.dumps(body)
                if body is not None
                else None
            )
            connection.request(method, path, content, headers)
            answer = connection.getresponse()
            return answer.status, orjson.loads(answer.read())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    config = run_config(tmp_path)
    state, commands = ScaleState(), []
    state.apply(make_heartbeat("rollout-0", at_seconds=1))
    inbox: queue.SimpleQueue[MainThreadTask[object] | None] = queue.SimpleQueue()

    def give(given: Sequence[RunCommanded]) -> None:
        commands.extend(given)
        for command in given:
            state.apply(command)

    def loop() -> None:
        while (task := inbox.get()) is not None:
            task.run()

    changes: list[ChangeRequested] = []
    bounds = ScalingBounds.from_config(config, is_supervised=True)
    service = ScalingService(state, bounds, give, record=changes.append)
    thread = threading.Thread(target=loop)
    thread.start()
    with closing(ApiServer(config, service, inbox.put)) as server:
        endpoint_file = ApiEndpointFile.from_config(config)
        yield Served(
            config,
            service,
            server,
            commands,
            changes,
            ScaleClient(endpoint_file.read_url(), endpoint_file.read_token()),
        )
    inbox.put(None)
    thread.join(60)


def test_scaling_api_rejects_calls_without_the_token(served: Served) -> None:
    for authorization in (
        "",
        "Bearer",
        "Bearer wrong",
        f"Basic {served.client.token}",
        "Bearer \xe4",
    ):
        code, answer = served.called(
            "POST", "/rollout/scale_out", {"num_replicas": 2}, Authorization=authorization
        )
        assert (code, answer["message"]) == (
            401,
            "no token, or the wrong one; send `Authorization: Bearer TOKEN`",
        )
    assert served.commands == []
    with pytest.raises(ConfigError, match=r"rejected the call \(401\): no token, or the wrong one"):
        ScaleClient(served.client.url, "wrong").call("GET", "engines")


def test_changes_are_recorded_with_who_asked_for_them(served: Served) -> None:
    """Accepted and refused ones are; calls that change nothing, dry runs and callers without the token are not."""
    call = served.client.call
    call("POST", "scale_out", {"num_replicas": 3, "dry_run": True})
    call("GET", "engines")
    opened = call("POST", "scale_out", {"num_replicas": 3})
    with pytest.raises(ConfigError):
        call("POST", "scale_in", {"num_replicas": 1, "model_name": "none"})
    call("POST", f"scale_out/{opened['request_id']}/cancel")
    served.called("POST", "/rollout/scale_out", {"num_replicas": 2}, Authorization="Bearer x")
    found = [(one.command, one.outcome, one.answer) for one in served.changes]
    assert found == [
        ("POST /rollout/scale_out", "accepted", opened["message"]),
        ("POST /rollout/scale_in", "refused", found[1][2]),
        (f"POST /rollout/scale_out/{opened['request_id']}/cancel", "accepted", found[2][2]),
    ]
    assert "none" in found[1][2]
    first = served.changes[0]
    assert (first.identity, first.caller, first.address) == (
        "token",
        describe_account(),
        "127.0.0.1",
    )
    assert orjson.loads(first.arguments)["num_replicas"] == 3
    served.called("POST", "/rollout/scale_in", {"num_replicas": 1}, **{"X-Relax-Caller": "x" * 999})
    assert served.changes[-1].caller == "x" * 128


def test_scale_request_is_opened_read_and_cancelled(served: Served) -> None:
    call = served.client.call
    rehearsed = call("POST", "scale_out", {"num_replicas": 3, "dry_run": True})
    assert (rehearsed["status"], rehearsed["selected_engines"], served.commands) == (
        "DRY_RUN",
        ["rollout-1", "rollout-2"],
        [],
    )
    opened = call("POST", "scale_out", {"num_replicas": 3, "timeout_secs": 60}, key="once")
    assert (
        call("POST", "scale_out", {"num_replicas": 3, "timeout_secs": 60}, key="once")["request_id"]
        == opened["request_id"]
    )
    shown = call("GET", f"scale_out/{opened['request_id']}")
    assert {
        name: shown[name]
        for name in ("status", "model_name", "num_replicas", "engine_ids", "timeout_secs")
    } == {
        "status": "PENDING",
        "model_name": "default",
        "num_replicas": 3,
        "engine_ids": ["rollout-1", "rollout-2"],
        "timeout_secs": 60.0,
    }
    assert call("GET", "scale_out?status=PENDING")["total_count"] == 1
    assert call("GET", "scale_out?model_name=reward")["total_count"] == 0
    rehearsed = call("POST", "scale_out_cancel", {"model_name": "default", "dry_run": True})
    assert (rehearsed["succeeded"], rehearsed["filters"]["model_name"]) == (
        [opened["request_id"]],
        "default",
    )
    assert call("POST", f"scale_out/{opened['request_id']}/cancel")["status"] == "REMOVING"
    assert call("POST", "scale_out_cancel", {})["skipped"][0]["reason"].endswith(
        "is REMOVING; only what has not ended can be cancelled"
    )
    assert served.service.state.requests[opened["request_id"]].outcome is Status.CANCELLED
    assert len(served.commands) == 2


def test_engine_list_begins_with_the_initial_engines(served: Served) -> None:
    served.client.call("POST", "scale_out", {"num_replicas": 2})
    served.service.reconcile()
    engines = served.client.call("GET", "engines?model_name=default")
    groups = engines["models"]["default"]["engine_groups"]
    reported = [
        (group["num_new_engines"], engine["engine_id"], engine["status"], engine["pid"])
        for group in groups
        for engine in group["engines"]
    ]
    assert reported == [(0, "rollout-0", "working", 1), (1, "rollout-1", "waiting", None)]
    assert (engines["total_engines"], list(engines["models"])) == (2, ["default"])


@pytest.mark.parametrize(
    ("path", "body", "code", "text"),
    [
        ("scale_out", {"num_replicas": 0}, 400, "neither is given"),
        (
            "scale_out",
            {"num_replicas": -1},
            400,
            "num_replicas: Input should be greater than or equal to 0, got -1",
        ),
        (
            "scale_out",
            {"num_replicas": 10**9},
            400,
            "num_replicas: Input should be less than or equal to 1000000, got 1000000000",
        ),
        (
            "scale_out",
            {"num_replicas": 33},
            400,
            "33 workers of default are more than 32: scaling.max_workers = 32",
        ),
        (
            "scale_out",
            {"num_replicas": "two"},
            400,
            "num_replicas: Input should be a valid integer",
        ),
        ("scale_out", {"replicas": 2}, 400, "replicas: Extra inputs are not permitted, got 2"),
        (
            "scale_out",
            {"num_replicas": 2, "timeout_secs": 0},
            400,
            "timeout_secs: Input should be greater than 0, got 0",
        ),
        ("scale_out", b"\xff{", 400, ""),
        (
            "scale_out",
            {"num_replicas": 2, "model_name": "trainer"},
            404,
            "this run has no model 'trainer'; there is default, reward",
        ),
        ("scale_in", {"num_replicas": 0}, 400, "neither is given"),
        (
            "scale_out/absent/cancel",
            None,
            404,
            "there is no request 'absent' among those that are kept",
        ),
        ("scale_sideways", {}, 404, "Not Found"),
    ],
)
def test_invalid_scaling_call_is_answered_with_the_cause(
    served: Served, path: str, body: Any, code: int, text: str
) -> None:
    reported, answer = served.called("POST", f"/rollout/{path}", body)
    assert (reported, answer["request_id"]) == (code, "")
    assert text in answer["message"]


def test_client_conflict_error_names_the_open_scale_request(served: Served) -> None:
    opened = served.client.call("POST", "scale_out", {"num_replicas": 2})
    code, answer = served.called("POST", "/rollout/scale_out", {"num_replicas": 3})
    assert (code, answer["status"]) == (409, "CONFLICT")
    with pytest.raises(
        CheckFailed,
        match=rf"\(409\): request {opened['request_id']} for default is PENDING; wait for its end, or cancel it",
    ):
        served.client.call("POST", "scale_in", {"num_replicas": 1})


def test_scaling_call_is_answered_when_the_broker_is_unreachable(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: object) -> None:
        raise BrokerUnavailable(
            "2 records were not acknowledged within 120 s; see that the broker runs"
        )

    monkeypatch.setattr(served.service, "_emit", away)
    code, answer = served.called("POST", "/rollout/scale_out", {"num_replicas": 3})
    assert (code, answer["status"]) == (503, "UNAVAILABLE")
    assert "see that the broker runs" in answer["message"]


def test_run_is_rejected_when_the_scaling_api_port_is_in_use(tmp_path: Path) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        tree = run_config(tmp_path).model_dump() | {"scaling": {"port": port}}
        with pytest.raises(
            EnvironmentProblem,
            match=rf"can't serve the API on 127.0.0.1:{port}: Address already in use; set scaling.port = 0",
        ):
            require_api_port(small_run(tree))
    assert check_roles(CheckedRun(run_config(tmp_path)))


def test_api_address_and_token_files_are_removed_when_the_run_ends(tmp_path: Path) -> None:
    endpoint_file = ApiEndpointFile.from_config(run_config(tmp_path))
    endpoint_file.address_file.parent.mkdir(parents=True, exist_ok=True)
    endpoint_file.open_token()
    endpoint_file.write_url("http://127.0.0.1:2")
    endpoint_file.remove("http://127.0.0.1:1")
    assert endpoint_file.address_file.exists(), "it is another controller's by now"
    endpoint_file.remove("http://127.0.0.1:2")
    endpoint_file.remove("http://127.0.0.1:2")
    assert not endpoint_file.address_file.exists()
    assert not endpoint_file.token_file.exists()


def test_scaling_client_error_names_missing_address_token_or_server(tmp_path: Path) -> None:
    endpoint_file = ApiEndpointFile.from_config(run_config(tmp_path))
    with pytest.raises(
        CheckFailed,
        match=r"api.json does not exist: the run has served no API here; start the run, or give --url",
    ):
        endpoint_file.read_url()
    with pytest.raises(
        ConfigError, match=r"api-token does not exist: the run has not served its API here"
    ):
        endpoint_file.read_token()
    with pytest.raises(
        CheckFailed,
        match=r"http://127.0.0.1:9 does not answer: .*refused.*; the run has ended, or its controller starts again",
    ):
        ScaleClient("http://127.0.0.1:9", "token").call("GET", "engines")


def test_scale_command_finds_api_and_token_in_the_run_folder(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = tmp_path / "run.json"
    run_file.write_bytes(orjson.dumps(served.config.model_dump(mode="json")))
    scale(run_file, up_to=2, dry_run=True)
    assert (
        capsys.readouterr().out == "DRY_RUN: rollout-1 comes, of model default; nothing was done\n"
    )
    scale(run_file, up_to=2, output="json")
    request_id = orjson.loads(capsys.readouterr().out)["request_id"]
    with pytest.raises(CheckFailed, match=rf"\(409\): request {request_id} for default is PENDING"):
        scale(run_file, down_to=1, yes=True)
    scale(run_file)
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in shown[1:4]] == [
        ["default", "rollout-0", "working"],
        ["default", "rollout-1", "waiting"],
        ["reward", "reward-0", "waiting"],
    ]
    assert shown[-1].split()[:5] == [request_id, "PENDING", "default", "rollout-1", "out"]
    scale(run_file, cancel=request_id)
    assert capsys.readouterr().out == f"REMOVING {request_id}: cancelled: rollout-1\n"
    assert scale(run_file, down_to=1, model="reward") == 0
    assert capsys.readouterr().out == "NOOP: workers of reward there are: 1\n"
    with pytest.raises(ConfigError, match=r"\(404\): there is no request 'absent'"):
        scale(run_file, cancel="absent")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_scaling_api_conforms_to_openapi_for_generated_calls(served: Served) -> None:
    """Walk the OpenAPI page with what it allows and with what it does not; every answer is one that
    the page lists, and none is 5xx."""
    import schemathesis  # takes seconds to load, which only this test waits for
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]
    headers = {"Authorization": f"Bearer {served.client.token}"}
    schema = schemathesis.openapi.from_url(f"{served.client.url}/openapi.json", headers=headers)
    codes: Counter[int] = Counter()

    def walk(operation: Any, mode: GenerationMode) -> None:
        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=15)
        def call(case: Any) -> None:
            response = case.call(headers=headers, timeout=60)
            codes[response.status_code] += 1
            case.validate_response(response, checks=checks)

        call()

    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == 9
    for operation in operations:
        for mode in GenerationMode:
            walk(operation, mode)
    assert {200, 400, 404} <= codes.keys()
    assert max(codes) < 500
