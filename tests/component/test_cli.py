"""The command line itself: fast and correct help, and errors as one message and an exit code."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from relax_events import cli
from relax_events.cli.app import app
from relax_events.cli.commands import COMMANDS, help_text
from relax_events.errors import (
    BrokerUnavailable,
    CheckFailed,
    ConfigError,
    Fenced,
    RelaxError,
    RunFailed,
    SchemaError,
)
from relax_events.telemetry.final_error import read_final_error

EARLY_END = """
import contextlib, os, signal, sys, threading
from relax_events import cli
from relax_events.cli import app

def work():
    with contextlib.ExitStack() as uses:
        uses.callback(print, "gave back")
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()

app.app = work
sys.argv = ["relax", "worker", "reward", "x.toml"]
threading.Thread(target=threading.Event().wait).start()  # as a client that was left open: it never ends
cli.main()
"""
ROOT = Path(__file__).parents[2]
HEAVY = ("pydantic", "numpy", "torch", "confluent_kafka", "fastavro", "rich", "cyclopts")
HELP = f"""
import sys
from relax_events.cli import main
sys.argv = ["relax", "--help"]
try:
    main()
finally:
    print("loaded:", [name for name in {HEAVY!r} if name in sys.modules])
"""


LOST_INTERRUPT = """
import random, signal, sys
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from relax_events.cli import app, main
from relax_events.cli.run_reader import reader_may_leave

def list_offsets_until_an_interrupt_is_lost():
    client = AdminClient({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    asked = {TopicPartition("topic", number): OffsetSpec.latest() for number in range(200)}
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for _ in range(5_000):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 0.003))
            while True:
                client.list_offsets(asked, request_timeout=0.001)
        except KeyboardInterrupt:
            pass
        except SystemError:
            print("lost", flush=True)
            raise
    print("not lost: this client repairs the defect that entry.raise_lost_signals describes")

def read():
    with reader_may_leave():
        list_offsets_until_an_interrupt_is_lost()

app.app = {"read": read, "ask": list_offsets_until_an_interrupt_is_lost}[sys.argv.pop()]
sys.argv = ["relax", "samples", "x.toml"]
main()
"""
INTERRUPTED = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            print("importing", name, flush=True)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from relax_events.cli import main
main()
"""


def run_script(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python source in a process of its own, to its end."""
    return subprocess.run(
        [sys.executable, "-c", text, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def subcommands(parent: App = app, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command, the groups' own included."""
    for name in parent:
        if not name.startswith("-"):
            yield (*words, name)
            yield from subcommands(parent[name], (*words, name))


def test_help_imports_no_heavy_packages() -> None:
    assert run_script(HELP).stdout == help_text() + "\nloaded: []\n"


def test_import_of_the_package_loads_no_heavy_packages_before_its_face_is_used() -> None:
    loaded = f"print([name for name in {HEAVY!r} if name in sys.modules])"
    code = f"import sys, relax_events; dir(relax_events); {loaded}; print(relax_events.train.__module__)"
    assert run_script(code).stdout == "[]\nrelax_events.launcher.run_handle\n"


def test_help_names_every_command_and_nothing_else() -> None:
    assert {words[0] for words in subcommands() if len(words) == 1} == set(COMMANDS)
    listed = help_text().partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    verbs = {
        words[0]: {other[1] for other in subcommands() if len(other) == 2 and other[0] == words[0]}
        for words in subcommands()
        if len(words) == 1
    }
    for name, (_, text) in COMMANDS.items():
        assert all(verb in text for verb in verbs[name])


@pytest.mark.parametrize("words", list(subcommands()), ids=" ".join)
def test_help_of_command_opens_with_a_sentence_and_an_example_that_parses(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    app([*words, "--help"], exit_on_error=False)
    _, sentence, example, *_ = capsys.readouterr().out.split("\n\n")
    assert sentence[0].isupper()
    assert sentence.rstrip().endswith(".")
    assert example.startswith("Example: relax " + " ".join(words))
    for command in example.removeprefix("Example: ").split("&&"):
        assert app.parse_args(command.split()[1:], print_error=False, exit_on_error=False)


def test_docs_and_messages_name_only_commands_that_exist() -> None:
    """A message may break its line between the words, and a record of a decision names old ones."""
    nouns = {words[0] for words in subcommands() if len(words) == 2}
    verbs = {words for words in subcommands() if len(words) == 2}
    paths = [
        path
        for folder in ("docs", "relax_events", "compose", "deploy", "configs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".md", ".py", ".toml", ".yml", ".yaml", ".tpl", ".js", ".jinja"}
        and path.parent.name != "adr"
    ]
    for path in [*paths, *ROOT.glob("*.md")]:
        if path.name == "CHANGELOG.md":
            continue
        text = path.read_text()
        for noun, verb in re.findall(rf"relax ({'|'.join(nouns)})[\s\"]+([a-z][a-z-]+)", text):
            assert (noun, verb) in verbs, f"{path}: relax {noun} {verb}"
        for name in re.findall(r"`relax\s+([a-z][a-z-]+)", text):
            assert name in COMMANDS, f"{path}: relax {name}"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunFailed, 1),
        (ConfigError, 2),
        (BrokerUnavailable, 3),
        (SchemaError, 5),
        (CheckFailed, 6),
        (Fenced, 7),
    ],
)
def test_error_becomes_an_exit_code_and_one_text(
    error: type[RelaxError],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error("the thing; the remedy")

    monkeypatch.setattr("relax_events.cli.app.app", fail)
    monkeypatch.setattr(sys, "argv", ["relax", "run", "x.toml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert capsys.readouterr() == ("", "error: the thing; the remedy\n")


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (BrokerUnavailable("the broker is away"), 3, "error: the broker is away\n"),
        (MemoryError("no room"), 1, "Traceback"),
    ],
)
def test_failed_worker_exits_at_once_with_its_error_as_the_last_log_line(
    error: Exception,
    code: int,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def fail() -> None:
        raise error

    def leave(code: int) -> None:
        raise SystemExit(f"left with {code}")

    monkeypatch.setattr("relax_events.cli.app.app", fail)
    monkeypatch.setattr("relax_events.cli.os._exit", leave)
    monkeypatch.setattr(sys, "argv", ["relax", "worker", "reward", "x.toml"])
    with pytest.raises(SystemExit, match=f"left with {code}"):
        cli.main()
    log = tmp_path / "reward-0.log"
    log.write_text(capsys.readouterr().err)
    assert log.read_text().startswith(shown)
    final = read_final_error(log, pid=os.getpid())
    assert final is not None
    assert (str(final), final.exit_code) == (f"{type(error).__name__}: {error}", code)
    assert read_final_error(log, pid=1) is None, "another process wrote it"


def test_worker_terminated_during_startup_releases_its_resources() -> None:
    ended = run_script(EARLY_END)
    assert (ended.returncode, ended.stdout) == (143, "gave back\n")


def test_keyboard_interrupt_exits_with_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("relax_events.cli.app.app", interrupt)
    monkeypatch.setattr(sys, "argv", ["relax", "run", "x.toml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130


@pytest.mark.parametrize(("command", "exit_code"), [("ask", 130), ("read", 0)])
def test_interrupt_under_an_error_of_the_kafka_client_ends_the_command(
    command: str, exit_code: int
) -> None:
    ended = run_script(LOST_INTERRUPT, command)
    assert (ended.returncode, ended.stdout, ended.stderr) == (exit_code, "lost\n", "")


@pytest.mark.parametrize(
    "module",
    ["relax_events.errors", "relax_events.cli.commands", "structlog", "relax_events.cli.app"],
)
def test_interrupt_while_the_command_is_imported_ends_it_quietly(module: str) -> None:
    ended = run_script(INTERRUPTED, module)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, f"importing {module}\n", "")


@pytest.mark.parametrize("result", [(None, 0), (0, 0), (6, 6)])
def test_command_result_becomes_the_exit_code(
    result: tuple[int | None, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_events.cli.app.app", lambda: result[0])
    monkeypatch.setattr(sys, "argv", ["relax", "doctor", "x.toml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == result[1]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["runn"], 'Unknown command "runn". Did you mean "run"?'),
        (["run"], "requires an argument"),
        (["topics", "show", "x.toml", "--output", "yaml"], "table"),
        (["broker", "start", "--port", "many"], "many"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_error_says_what_is_wrong(words: list[str], text: str) -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "relax_events.cli", *words],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert asked.returncode == 2
    assert text in " ".join(asked.stderr.replace("│", " ").split())
    assert asked.stdout == ""


def test_run_file_that_is_missing_is_a_usage_error(tmp_path: Path) -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "relax_events.cli", "doctor", "nowhere.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (asked.returncode, asked.stdout) == (2, "")
    assert asked.stderr.startswith(
        "error: run file nowhere.toml does not exist; give the path of a TOML file"
    )


@pytest.mark.parametrize("arguments", [["--help"], ["algorithms"], ["algorithms", "grpo"]])
def test_command_exits_silently_when_its_output_pipe_is_closed(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with subprocess.Popen(
        [sys.executable, "-m", "relax_events.cli", *arguments],
        stdout=write_end,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(write_end)
        _, errors = process.communicate(timeout=200)
    assert (process.returncode, errors) == (141, b"")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_error_names_unwritable_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def refused() -> None:
        raise OSError(number, os.strerror(number), "/there/.relax")

    monkeypatch.setattr("relax_events.cli.entry._called", refused)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(
        f"error: can't write /there/.relax: {os.strerror(number)}; "
    )
