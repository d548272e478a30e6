"""The state file in a broker's directory."""

from pathlib import Path

import pytest

from relax_events.errors import EnvironmentProblem
from relax_events.kafka.embedded.directory import BrokerState, read_state, write_state


def test_read_state_returns_what_was_written(tmp_path: Path) -> None:
    state = BrokerState(
        20001,
        20002,
        "4.3.1",
        pid=7,
        started_at_seconds=12.5,
        archive_at_exit="/cache/x.tmp",
        log_start_byte=99,
    )
    write_state(tmp_path / "broker.json", state)
    assert read_state(tmp_path / "broker.json") == state
    assert [path.name for path in tmp_path.iterdir()] == ["broker.json"]


def test_read_state_returns_none_when_nothing_was_written(tmp_path: Path) -> None:
    assert read_state(tmp_path / "broker.json") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"port": 1}',
        '{"port": 1, "controller_port": 2, "kafka_version": "4", "surprise": 1}',
    ],
)
def test_read_state_names_file_and_remedy_when_content_is_invalid(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "broker.json"
    path.write_text(text)
    with pytest.raises(
        EnvironmentProblem, match=f"{path} does not describe a broker: .*delete that file"
    ):
        read_state(path)
