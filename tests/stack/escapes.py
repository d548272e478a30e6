"""Try every known escape from the reward container and from the sandbox inside it: `make
stack-escapes`.

In the stack's own container no attempt may succeed. In containers with fewer or more privileges
none may succeed either, unless the reward refuses to run programs there and names the setting.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import dataclass, field
from typing import Any

from benchmarks import report
from relax_events.sandbox.probing import CAPABILITIES
from tests.stack.container_engine import (
    ROOT,
    ContainerEngine,
    StackError,
    exit_code_of,
    open_container_engine,
)
from tests.stack.images import Stopwatch, provide_images
from tests.stack.routes import BROKER, PYTHON, SERVICES, addresses, listening, reached

FOLDER = ROOT / ".relax" / "stack"
TESTS = "/srv/tests"
SERVICE, OTHER_SERVICE = "reward", "relax"
TRY_SECONDS = 900.0
QUESTION = """Programs that a model might write, in the container of the reward worker: access to
files, the network, other processes and the kernel, and tricks that make a test pass with a wrong
solution. The same in containers with fewer or more privileges, and without a sandbox, which shows
that the attempts work there. Then what the reward worker itself reaches, outside of the sandbox."""
HOLDS = """Where programs run, no attempt and no trick succeeds; where one would, no program runs.
The reward worker reaches the broker and nothing else, and writes only to its own temporary folder."""
LANDLOCK = ["landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"]
ENOSYS, EPERM = 38, 1
WITHOUT_LANDLOCK = {
    "defaultAction": "SCMP_ACT_ALLOW",
    "syscalls": [
        {"names": LANDLOCK, "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS},
        {"names": ["unshare", "setns", "mount"], "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM},
    ],
}
"""A seccomp profile that blocks Landlock, as some kernels and engine profiles do."""
READ_ONLY = """
import sys, tempfile
try:
    tempfile.TemporaryFile(dir=sys.argv[1])
    print("written")
except OSError as error:
    print(error.strerror)
"""


@dataclass(frozen=True)
class Container:
    """A way to run the reward service."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    """Laid over the service."""
    walls: str = "chosen"
    refused: str = ""
    """Text of the refusal if programs must not run; empty if they must run."""


CONTAINERS = (
    Container("as the stack has it"),
    Container("without any walls, for comparison", walls="nothing"),
    Container("no seccomp profile of the engine's", {"security_opt": ["seccomp:unconfined"]}),
    Container(
        "no Landlock",
        {"security_opt": [f"seccomp:{FOLDER / 'without-landlock.json'}"]},
        refused="reward.options.allow_unprotected",
    ),
    Container(
        "as root, with the capabilities that takes", {"user": "root", "cap_add": list(CAPABILITIES)}
    ),
    Container(
        "as root, without capabilities",
        {"user": "root"},
        refused="run it as a user other than root",
    ),
)


def try_out(engine: ContainerEngine, container: Container) -> dict[str, Any]:
    """Try all escapes and all tricks in a container; return the row of results.

    Raises:
        StackError: The container could not be run, or the attempts did not end as expected.
    """
    print(f"{container.name} ...", flush=True)
    overlay = FOLDER / "escapes.json"
    overlay.write_text(json.dumps({"version": "2.4", "services": {SERVICE: container.changes}}))
    laid = ContainerEngine(
        engine.host, engine.settings, [*engine.overlays, *([overlay] if container.changes else [])]
    )
    ways = _run(laid, container.walls, "ways")
    if refusal := ways.get("refused"):
        return _row(container, "refused", "-", "-", refusal)
    tricks = (
        _run(laid, container.walls, "tricks")
        if container.walls != "nothing"
        else {"tried": "-", "escaped": []}
    )
    led = [*ways["escaped"], *tricks["escaped"]]
    names = f": {', '.join(led)}" if led and container.walls == "chosen" else ""
    return _row(container, ways["walls"], ways["tried"], tricks["tried"], f"{len(led)}{names}")


def _row(
    container: Container, walls: str, ways: object, tricks: object, led: str
) -> dict[str, Any]:
    return {
        "container": container.name,
        "walls": walls,
        "ways tried": ways,
        "tricks tried": tricks,
        "led somewhere": led,
    }


def _run(engine: ContainerEngine, walls: str, what: str) -> dict[str, Any]:
    """Run the tests' escape program in a new container of the reward service, and return its
    output.
    """
    paths = f"PYTHONPATH=/opt/project:{TESTS}:{TESTS}/component"
    line = [
        "run",
        "--rm",
        "-T",
        "--no-deps",
        "-e",
        paths,
        "--volume",
        f"{ROOT / 'tests'}:{TESTS}:ro",
        "--entrypoint",
        PYTHON,
        SERVICE,
    ]
    said: dict[str, Any] = json.loads(
        engine.compose(
            *line, f"{TESTS}/component/escape_program.py", walls, what, seconds=TRY_SECONDS
        )
    )
    return said


def problems(rows: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong in the table."""
    found = []
    for container, row in zip(CONTAINERS, rows, strict=True):
        led = row["led somewhere"]
        if container.walls == "nothing":
            found += (
                []
                if int(led)
                else [f"{container.name}: no way led anywhere, so they prove nothing"]
            )
        elif container.refused:
            is_refused = row["walls"] == "refused" and container.refused in led
            found += (
                []
                if is_refused
                else [f"{container.name}: a refusal must say {container.refused!r}, got {led}"]
            )
        elif led != "0":
            found.append(f"{container.name}: {led}")
    return found


def try_routes(engine: ContainerEngine) -> tuple[list[dict[str, str]], list[str]]:
    """Connect to the stack's services and to this machine, from the reward container and from
    another one; return the table and what is wrong.

    Raises:
        StackError: A service or a container could not be run.
    """
    print("routes ...", flush=True)
    engine.compose("up", "--detach", "--no-build", *SERVICES)
    with listening() as port:
        tried = addresses(engine, port)
        ours, others = reached(engine, SERVICE, tried), reached(engine, OTHER_SERVICE, tried)
    rows = [
        {
            "address": address.name,
            "from reward": _word(mine),
            "from other workers": "-" if address.is_closed else _word(theirs),
        }
        for address, mine, theirs in zip(tried, ours, others, strict=True)
    ]
    wrong = [
        f"reward reaches {address.name}"
        for address, mine in zip(tried, ours, strict=True)
        if mine and not address.name.startswith(BROKER)
    ]
    wrong += [
        f"{row['address']} is not reached"
        for row in rows
        if row["address"] == f"{BROKER} by its name" and "no" in row.values()
    ]
    return rows, wrong


def _word(is_reached: bool) -> str:
    return "reached" if is_reached else "no"


def try_writes(engine: ContainerEngine) -> tuple[list[dict[str, str]], list[str]]:
    """Write as the reward worker would, in each of the container's folders; return the table and
    what is wrong.
    """
    rows = []
    for folder in ("/srv/relax/.relax", "/srv/relax/configs", "/srv/relax", "/opt/project", "/tmp"):
        said = engine.compose(
            "run",
            "--rm",
            "-T",
            "--no-deps",
            "--entrypoint",
            PYTHON,
            SERVICE,
            "-c",
            READ_ONLY,
            folder,
        ).strip()
        rows.append({"folder": folder, "a file of the reward worker's": said})
    return rows, [
        f"reward writes to {row['folder']}"
        for row in rows[:-1]
        if row["a file of the reward worker's"] == "written"
    ]


def try_all(engine: ContainerEngine) -> None:
    """Try out all containers, and write the report.

    Raises:
        StackError: An image or a container failed, or something led somewhere.
    """
    provide_images(engine, Stopwatch())
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "without-landlock.json").write_text(json.dumps(WITHOUT_LANDLOCK))
    (routes, open_routes), (writes, open_writes) = try_routes(engine), try_writes(engine)
    rows = [try_out(engine, container) for container in CONTAINERS]
    wrong = [*problems(rows), *open_routes, *open_writes]
    report.write(
        "stack-escapes",
        title="Ways out of the reward container",
        question=QUESTION,
        command=shlex.join(["python", "-m", "tests.stack.escapes", *sys.argv[1:]]),
        conclusion="; ".join(wrong) or HOLDS,
        tables={
            "Programs": rows,
            "Routes of the reward worker itself": routes,
            "Files of the reward worker itself": writes,
        },
        data={"problems": wrong},
    )
    if wrong:
        raise StackError("; ".join(wrong))


def main() -> int:
    """Try the escapes that the command line names."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    return exit_code_of(lambda: try_all(open_container_engine()))


if __name__ == "__main__":
    sys.exit(main())
