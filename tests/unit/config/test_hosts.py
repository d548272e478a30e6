"""What the hosts of a run need of each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.runtime.run_description import build_run_description

pytestmark = pytest.mark.unit
MakeRunConfig = Callable[..., RunConfig]
BROKER = {"bootstrap_servers": "10.0.0.9:9092"}


@pytest.mark.parametrize(
    ("hosts", "broker", "text"),
    [
        ({"addresses": ["a", "a"]}, BROKER, "names a host twice"),
        ({"addresses": ["a", "localhost"]}, BROKER, "'localhost', by which no other host"),
        ({"addresses": ["a", "-oProxyCommand=x"]}, BROKER, "'-oProxyCommand=x', by which"),
        ({"addresses": ["a", "b;c"]}, BROKER, "'b;c', by which"),
        ({"addresses": ["a", "fd00::2"]}, BROKER, "'fd00::2', .* IPv4"),
        ({"addresses": ["a", "b"]}, {"bootstrap_servers": "embedded"}, "loopback address alone"),
        ({"addresses": ["a", "b"], "command": ["ssh"]}, BROKER, "names no host"),
    ],
)
def test_hosts_that_can_not_work_together_are_refused(
    make_run_config: MakeRunConfig, hosts: dict[str, Any], broker: dict[str, Any], text: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=text):
        make_run_config(hosts=hosts, broker=broker)


def test_description_of_a_run_names_no_hosts(make_run_config: MakeRunConfig) -> None:
    """A fork on other machines must not start programs on the parent's."""
    here = make_run_config(broker=BROKER)
    there = make_run_config(broker=BROKER, hosts={"addresses": ["a", "b"]})
    described = [build_run_description(config) for config in (here, there)]
    assert described[0].config == described[1].config
    assert described[0].config_digest == described[1].config_digest
