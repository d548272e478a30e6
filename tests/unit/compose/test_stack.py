"""Parsing of other programs' output in the stack's tools."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.stack.container_engine import ContainerEngine, StackError, read_pins
from tests.stack.images import Stopwatch, default_of, image_names, provide_images
from tests.stack.pins import read_third_party_images, render_pins
from tests.stack.run import bytes_of
from tests.stack.webhook_sink import build_alertmanager_config

COMPOSE = Path(__file__).parents[3] / "compose"
DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512B", 512),
        ("0B", 0),
        ("20kB", 20_000),
        ("1.5MiB", 1_572_864),
        ("2GiB", 2 * 1024**3),
        ("605.2MB", 605_200_000),
    ],
)
def test_docker_size_strings_are_parsed(text: str, count: int) -> None:
    assert bytes_of(text) == count


def test_image_defaults_to_the_compose_file_and_can_be_overridden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KAFKA_IMAGE", raising=False)
    assert (
        default_of("${KAFKA_IMAGE:-apache/kafka:4.3.1}")
        == image_names()["kafka"]
        == "apache/kafka:4.3.1"
    )
    monkeypatch.setenv("KAFKA_IMAGE", "registry.example/kafka:4")
    assert image_names()["kafka"] == "registry.example/kafka:4"
    assert set(image_names()) == {"light", "model", "kafka", "prometheus", "alertmanager"}


def test_stack_alerts_reach_a_webhook_of_alertmanager_by_the_stacks_own_route() -> None:
    config = build_alertmanager_config(8000)
    (receiver,) = config["receivers"]
    assert receiver["name"] == config["route"]["receiver"]
    assert [one["url"] for one in receiver["webhook_configs"]] == ["http://webhook-sink:8000/"]


def test_third_party_images_are_pinnable_and_have_version_tags() -> None:
    images = read_third_party_images()
    assert {
        "KAFKA_IMAGE",
        "PROMETHEUS_IMAGE",
        "ALERTMANAGER_IMAGE",
        "GRAFANA_IMAGE",
        "CONSOLE_IMAGE",
        "JAEGER_IMAGE",
        "BASE_IMAGE",
    } == set(images)
    assert all(re.search(r":(v?\d+\.\d+\.\d+|bookworm-slim)$", tag) for tag in images.values())


@pytest.mark.parametrize("file", sorted(COMPOSE.rglob("Dockerfile*")), ids=str)
def test_own_images_use_only_the_pinned_base_image(
    file: Path,
) -> None:
    text = file.read_text()
    bases, stages = zip(*re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE), strict=True)
    assert set(bases) <= {"${BASE_IMAGE}", *stages}
    assert set(re.findall(r"--from=(\S+)", text)) <= set(stages)
    assert len(bases) == text.count("\nFROM ")


def test_written_image_pins_are_read_back_unchanged(tmp_path: Path) -> None:
    pins = {"KAFKA_IMAGE": f"apache/kafka@{DIGEST}", "BASE_IMAGE": f"debian@{DIGEST}"}
    (tmp_path / "images.env").write_text(render_pins(pins))
    assert read_pins(tmp_path / "images.env") == pins
    assert read_pins(tmp_path / "none.env") == {}


def test_unavailable_pinned_image_is_not_replaced_by_a_local_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Cut(ContainerEngine):
        def docker(self, *words: str, seconds: float = 0, check: bool = True) -> str:
            raise StackError("no registry")

    monkeypatch.setattr("tests.stack.images.BASE_IMAGE", f"debian@{DIGEST}")
    with pytest.raises(
        StackError,
        match=r"^debian@sha256:\w+ can't be pulled, and nothing made here has its digest; drop its line",
    ):
        provide_images(Cut(), Stopwatch())
