"""The reason of a broker's exit, found in its log."""

import signal
from pathlib import Path

import pytest

from relax_events.errors import BrokerError, EnvironmentProblem, RelaxError
from relax_events.kafka.embedded.broker_log import explain_death


def explain(
    tmp_path: Path, text: str, start_byte: int = 0, exit_code: int | None = None
) -> RelaxError:
    (tmp_path / "broker.log").write_text(text)
    return explain_death(
        tmp_path / "broker.log",
        port=20001,
        directory=tmp_path,
        start_byte=start_byte,
        exit_code=exit_code,
    )


def test_explain_death_gives_the_last_lines_when_the_cause_is_unknown(tmp_path: Path) -> None:
    error = explain(tmp_path, "".join(f"line {index}\n" for index in range(40)))
    assert isinstance(error, BrokerError)
    assert str(error).startswith(
        f"the embedded broker in {tmp_path} ended by itself; the last lines of "
        f"{tmp_path / 'broker.log'}:\n  line 25\n"
    )
    assert str(error).endswith("  line 39")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "java.io.IOException: No space left on device",
            "the disk under .* is full; free some space",
        ),
        (
            "java.net.BindException: Address already in use",
            "port 20001 on 127.0.0.1 is taken by another program",
        ),
    ],
)
def test_explain_death_names_the_cause_that_the_log_shows(
    tmp_path: Path, line: str, said: str
) -> None:
    error = explain(tmp_path, f"start\n{line}\n" + "more\n" * 50)
    assert isinstance(error, EnvironmentProblem)
    with pytest.raises(EnvironmentProblem, match=said):
        raise error


def test_explain_death_ignores_the_log_of_earlier_brokers(tmp_path: Path) -> None:
    past = "No space left on device\n"
    assert "ended by itself" in str(explain(tmp_path, past + "killed\n", start_byte=len(past)))


@pytest.mark.parametrize("text", ["", "java.io.IOException: a peer was gone\n"])
def test_explain_death_says_that_a_broker_was_killed(tmp_path: Path, text: str) -> None:
    assert str(explain(tmp_path, text, exit_code=-signal.SIGKILL)) == (
        f"the embedded broker in {tmp_path} was killed (SIGKILL); see {tmp_path / 'broker.log'}"
    )
    assert "killed" not in str(explain(tmp_path, text, exit_code=1))


def test_explain_death_reports_an_empty_log(tmp_path: Path) -> None:
    assert "(it printed nothing)" in str(explain(tmp_path, ""))


def test_explain_death_gives_the_cause_and_no_stack_when_java_threw(tmp_path: Path) -> None:
    stack = "".join(f"\tat kafka.Some.place(Some.java:{line})\n" for line in range(40))
    cause = "Caused by: java.nio.file.InvalidPathException: Malformed input: /my dir"
    error = explain(
        tmp_path,
        (
            "[main] ERROR Exiting\njava.lang.RuntimeException: "
            f"outer\n{stack}{cause}\n{stack}\t... 12 more\n"
        ),
    )
    assert str(error).endswith(f"ended by itself: {cause}; see {tmp_path / 'broker.log'}")
