"""What the stack's tools read out of others' texts."""

from __future__ import annotations

import pytest

from stack.images import default_of, image_names
from stack.run import bytes_of


@pytest.mark.parametrize(
    ("text", "count"), [("512B", 512), ("0B", 0), ("20kB", 20_000), ("1.5MiB", 1_572_864), ("2GiB", 2 * 1024**3), ("605.2MB", 605_200_000)]
)
def test_sizes_are_read_as_docker_writes_them(text: str, count: int) -> None:
    assert bytes_of(text) == count


def test_image_is_the_compose_files_unless_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAFKA_IMAGE", raising=False)
    assert default_of("${KAFKA_IMAGE:-apache/kafka:4.3.1}") == image_names()["kafka"] == "apache/kafka:4.3.1"
    monkeypatch.setenv("KAFKA_IMAGE", "registry.example/kafka:4")
    assert image_names()["kafka"] == "registry.example/kafka:4"
    assert set(image_names()) == {"light", "model", "kafka", "prometheus", "alertmanager"}
