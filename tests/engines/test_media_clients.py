"""Images and audio by the real clients of OpenAI and Anthropic, in episodes with a real model."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from tests.component.gateway_agents import begin, episodes, finish
from tests.gateway_samples import digests_of, require_equal_logprobs, to_ready
from tests.unit.image_model import build_image_model, image_file
from tests.unit.video_and_audio import audio_file, omni_model

PYTHON = Path(__file__).parents[2] / ".venv-agents" / "bin" / "python"
CLIENT = Path(__file__).with_name("media_clients.py")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of `make agents`"),
]


@pytest.mark.parametrize(
    ("build", "senses"), [(build_image_model, "sees"), (omni_model, "hears")], ids=["vl", "omni"]
)
def test_media_of_real_clients_are_trained_as_they_were_shown(
    build: Callable[[], Path], senses: str, tmp_path: Path
) -> None:
    files = {
        "first.png": image_file(32, 32),
        "second.png": image_file(48, 32, seed=1),
        "sound.wav": audio_file(0.4),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with episodes(
        tmp_path,
        "",
        model=build(),
        command=(str(PYTHON), str(CLIENT), str(tmp_path), senses),
        attempts=1,
        max_turns=8,
    ) as engine:
        begin(engine)
        (sample,) = finish(engine, seconds=200)
        assert sample.error == ""
        require_equal_logprobs(engine._config, sample)
    first, second, sound = (sha256(content).digest() for content in files.values())
    heard = [sound] if senses == "hears" else []
    assert digests_of(sample) == [[first, *heard, second], [first, second], [first, second]]
    assert int(to_ready(sample).loss_mask.sum()) == sample.num_sampled_tokens
