"""The reward that a stateful environment gives, and how foreign observations are read."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from relax_events.attacks.servers import file_observations
from relax_events.environments.interfaces.contents import (
    read_image,
    read_message,
    read_observation,
)
from relax_events.environments.interfaces.protocol import read_reward
from relax_events.errors import RewardError
from relax_events.packages.verifiers.environment import environment

CALL: dict[str, Any] = {"answer": "", "metadata": {}, "prompt": ""}
PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def file_of(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def pixels_of(image: bytes | str) -> Any:
    assert isinstance(image, bytes)
    return np.asarray(Image.open(BytesIO(image))).tolist()


def test_reward_of_an_environment_is_the_sum_or_one_for_each_turn() -> None:
    given = [0.5, 0.0, 2.0]
    assert environment("x", environment_rewards=given, **CALL) == 2.5
    by_turn = environment("x", environment_rewards=given, by_turn=True, **CALL)
    assert by_turn == {"reward": 0.0, "turn_rewards": given}


def test_environment_without_rewards_is_an_error_and_not_zero() -> None:
    with pytest.raises(RewardError, match="no rewards of its environment"):
        environment("x", environment_rewards=[], **CALL)
    assert environment("x", environment_rewards=[0.0], **CALL) == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308, "much"])
def test_reward_beyond_the_range_of_float32_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"a number within \+-3.4e38|could not convert"):
        read_reward(value)


def test_image_is_read_in_every_usual_form(tmp_path: Any) -> None:
    image = Image.fromarray(PIXELS)
    file, path = file_of(image), tmp_path / "a.png"
    path.write_bytes(file)
    for form in (image, PIXELS, str(path), path, {"bytes": file}, {"path": str(path)}, file):
        assert pixels_of(read_image(form, reads_files=True)) == PIXELS.tolist()
    assert read_image(base64.b64encode(file).decode()) == file
    assert read_image({"url": "data:image/png;base64,AAAA"}) == "data:image/png;base64,AAAA"
    with pytest.raises(ValueError, match="neither a file, a data URI nor base64"):
        read_image("no such file!", reads_files=True)
    with pytest.raises(ValueError, match="an image must be one of PIL"):
        read_image(3)


def test_message_of_parts_has_a_placeholder_for_each_image() -> None:
    parts = [
        {"type": "image", "image": Image.fromarray(PIXELS)},
        {"type": "text", "text": "and "},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    reply = read_message({"role": "tool", "content": parts})
    assert (reply.role, reply.text) == ("tool", "<image>and <image>")
    assert reply.media["image"][1] == "data:image/png;base64,AAAA"
    assert read_message({"content": "<image>"}).media == {}
    with pytest.raises(ValueError, match="must be text or an image"):
        read_message({"content": [{"type": "audio"}]})


def test_observation_is_a_text_an_image_both_or_json() -> None:
    assert read_observation("") is None
    assert read_observation(None) is None
    seen = {"text": read_observation("a"), "image": read_observation(PIXELS)}
    assert seen["text"] is not None
    assert seen["text"].text == "a"
    assert seen["image"] is not None
    assert seen["image"].text == "<image>"
    both = read_observation({"text": "a", "image": PIXELS})
    assert both is not None
    assert both.text == "<image>a"
    other = read_observation({"board": np.zeros((2, 2)), "turn": 1})
    assert other is not None
    assert other.text == '{"board":[[0.0,0.0],[0.0,0.0]],"turn":1}'


@pytest.mark.parametrize("name", sorted(file_observations(Path("/"))))
def test_observation_of_a_server_names_no_file(name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    with pytest.raises(ValueError, match=r"image.* neither a data URI nor base64") as caught:
        read_observation(file_observations(secret)[name])
    assert "paths and addresses in what a server sends are not read" in str(caught.value)
