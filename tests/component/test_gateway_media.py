"""Images and audio in messages and in results of tools, in all dialects, with models that read
them: what is trained is what was sampled, and the trainer's log-probabilities are the engine's.
"""

from __future__ import annotations

import base64
import json
from hashlib import sha256
from pathlib import Path

import pytest
from gateway_agents import begin, episodes, finish

from relax_events.events.parts import ChatMessage, ContentPart, Modality
from relax_events.media.library import MediaLibrary
from tests.gateway_samples import digests_of, require_equal_logprobs, to_ready
from tests.unit.image_model import build_image_model, image_file, image_item
from tests.unit.video_and_audio import audio_file, omni_model

IMAGES = [image_file(*size, seed=seed) for seed, size in enumerate([(32, 32), (64, 48), (32, 32)])]
AUDIO = audio_file(0.4)
FILES = "files = " + json.dumps([base64.b64encode(one).decode() for one in (*IMAGES, AUDIO)])
PARTS = f"""
{FILES}
png = ["data:image/png;base64," + one for one in files[:3]]
def chat_image(number):
    return {{"type": "image_url", "image_url": {{"url": png[number]}}}}
def respond(items):
    status, text = post("/responses", {{"input": items, "max_output_tokens": 4}})
    if status != 200:
        sys.exit(text)
    return json.loads(text)
def claude(messages, **more):
    status, text = post("/messages", {{"messages": messages, "max_tokens": 4}} | more,
                        os.environ["ANTHROPIC_API_KEY"], header="x-api-key")
    if status != 200:
        sys.exit(text)
    return json.loads(text)
def refused(text, parts, **more):
    status, found = ask([{{"role": "user", "content": parts}}], max_tokens=4, **more)
    assert status == 400 and text in found, found
"""
CHAT = """
messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, chat_image(0)]}]
messages += [say(messages, max_tokens=4)]
shown = [{"type": "text", "text": "cut"}, chat_image(1)]
messages += [{"role": "tool", "tool_call_id": "a", "content": shown}]
say(messages, max_tokens=4)
"""
RESPONSES = """
image = {"type": "input_image", "image_url": png[0]}
items = [{"role": "user", "content": [{"type": "input_text", "text": "see"}, image]}]
items += respond(items)["output"]
cut = [{"type": "input_text", "text": "cut"}, {"type": "input_image", "image_url": png[1]}]
items += [{"type": "function_call_output", "call_id": "a", "output": cut}]
respond(items)
"""
CLAUDE = """
def block(number):
    source = {"type": "base64", "media_type": "image/png", "data": files[number]}
    return {"type": "image", "source": source}
messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, block(0)]}]
messages += [{"role": "assistant", "content": claude(messages)["content"]}]
cut = [{"type": "text", "text": "cut"}, block(1)]
messages += [{"role": "user", "content": [
    {"type": "tool_result", "tool_use_id": "a", "content": cut}]}]
found = claude(messages)
counted = post("/messages/count_tokens", {"messages": messages}, os.environ["ANTHROPIC_API_KEY"])
assert json.loads(counted[1])["input_tokens"] == found["usage"]["input_tokens"], counted
"""


@pytest.mark.parametrize("body", [CHAT, RESPONSES, CLAUDE], ids=["chat", "responses", "messages"])
def test_images_of_messages_and_tools_are_trained_with_their_sample(
    body: str, tmp_path: Path
) -> None:
    with episodes(tmp_path, PARTS + body, model=build_image_model(), attempts=1) as engine:
        begin(engine)
        (sample,) = finish(engine)
        assert sample.error == ""
        require_equal_logprobs(engine._config, sample)
    assert sample.path_lengths == ()
    assert digests_of(sample) == [[sha256(one).digest() for one in IMAGES[:2]]]
    assert [turn.role for turn in sample.turns] == ["assistant", "tool", "assistant"]


FORKS = """
messages = [{"role": "user", "content": [chat_image(0), chat_image(0)]}]
messages += [say(messages, max_tokens=4)]
say([*messages, {"role": "user", "content": [chat_image(1)]}], max_tokens=4)
say([*messages, {"role": "user", "content": [chat_image(2)]}], max_tokens=4)
say([{"role": "user", "content": [chat_image(2), {"type": "text", "text": "in short"}]}],
    max_tokens=4)
"""


def test_forks_and_compactions_keep_the_images_of_each_path(tmp_path: Path) -> None:
    with episodes(tmp_path, PARTS + FORKS, model=build_image_model(), attempts=1) as engine:
        begin(engine)
        (sample,) = finish(engine)
        assert sample.error == ""
        require_equal_logprobs(engine._config, sample)
    first, second, third = (sha256(one).digest() for one in IMAGES)
    assert digests_of(sample) == [[first, first, second], [first, first, third], [third]]
    uris = {one.digest: one.uri for path in sample.path_media for one in path}
    assert {one.uri for path in sample.path_media for one in path} == set(uris.values())


def test_audio_is_heard_and_trained(tmp_path: Path) -> None:
    body = """
sound = {"type": "input_audio", "input_audio": {"data": files[3], "format": "wav"}}
messages = [{"role": "user", "content": [sound, chat_image(0)]}]
messages += [say(messages, max_tokens=4), {"role": "tool", "tool_call_id": "a", "content": [sound]}]
say(messages, max_tokens=4)
"""
    with episodes(tmp_path, PARTS + body, model=omni_model(), attempts=1) as engine:
        begin(engine)
        (sample,) = finish(engine)
        assert sample.error == ""
        require_equal_logprobs(engine._config, sample)
    audio, image = sha256(AUDIO).digest(), sha256(IMAGES[0]).digest()
    assert digests_of(sample) == [[audio, image, audio]]


def test_the_program_receives_the_images_of_its_row_and_sends_them_back(tmp_path: Path) -> None:
    body = """
(text, image) = messages[0]["content"]
assert text == {"type": "text", "text": "What is it?"}, text
assert image["image_url"]["url"].startswith("data:image/png;base64,"), image
say(messages, max_tokens=4)
"""
    with episodes(tmp_path, PARTS + body, model=build_image_model(), attempts=1) as engine:
        reference = MediaLibrary(engine._config, folder=lambda: "rows").add(image_item(64, 48))
        parts = [
            ContentPart(Modality.TEXT, "What is it?"),
            ContentPart(Modality.IMAGE, media=reference),
        ]
        begin(engine, messages=[ChatMessage("user", parts)])
        (sample,) = finish(engine)
        assert sample.error == ""
        require_equal_logprobs(engine._config, sample)
    assert to_ready(sample).media == [reference]


def test_media_that_cannot_be_shown_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_events.packages.gateway.session_media.MAX_FILES", 2)
    body = """
def image(url):
    return [{"type": "image_url", "image_url": {"url": url}}]
refused("max_item_bytes", image("data:image/png;base64," + "A" * 60_000_000))
refused("host 'a.example'; media_hosts allows none", image("https://a.example/a.png"))
refused("must hold a data URI or a web address, got '/etc/passwd'", image("/etc/passwd"))
refused("not base64", image("data:image/png;base64,%"))
refused("image", image("data:image/png;base64,AAAA"))
refused("a part of type 'file'", [{"type": "file", "file": {}}])
refused("modality audio", [{"type": "input_audio",
                            "input_audio": {"data": files[3], "format": "wav"}}])
refused("media files; show it fewer", [chat_image(number) for number in range(3)])
system = [{"role": "system", "content": image(png[0])}, {"role": "user", "content": "a"}]
status, found = ask(system, max_tokens=4)
assert status == 400 and "of role 'system' has media" in found, found
say([{"role": "user", "content": [chat_image(0), chat_image(1)]}], max_tokens=4)
"""
    with episodes(tmp_path, PARTS + body, model=build_image_model(), attempts=1) as engine:
        begin(engine)
        (sample,) = finish(engine)
    assert sample.error == ""


def test_images_are_refused_by_a_model_that_reads_text(tmp_path: Path) -> None:
    body = 'refused("text parts only", [chat_image(0)]); say(messages, max_tokens=2)'
    with episodes(tmp_path, PARTS + body, attempts=1) as engine:
        begin(engine)
        (sample,) = finish(engine)
    assert sample.error == ""
