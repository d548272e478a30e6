"""Sample pages contain their media, load nothing, stay within their size bounds,
and run no script.
"""

from __future__ import annotations

import wave
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from event_samples import changed, ended, rolled_out, scored
from PIL import Image

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage, ContentPart, MediaRef, Modality, Outcome
from relax_events.history.run_log import RunLog
from relax_events.history.samples.view import SampleView
from relax_events.media.items import MediaItem
from relax_events.media.library import MediaLibrary
from relax_events.reports import sample_page as pages
from relax_events.reports.sample_export import open_export
from relax_events.reports.sample_media import MAX_FRAMES, MAX_SECONDS, MAX_SIDE, MediaRenderer
from relax_events.reports.sample_page import MAX_CHARACTERS, SamplePage
from tests.unit.html_page import Page
from tests.unit.image_model import image_file
from tests.unit.video_and_audio import audio_file, media_run, omni_model, video_file

HOSTILE = "</span></td><script>alert(1)</script><img src=x onerror=alert(2)> & 'so' \"on\""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return media_run(tmp_path, omni_model())


def log_of(config: RunConfig) -> RunLog:
    """Return a fake of the run's log with what a page needs."""
    return cast("RunLog", SimpleNamespace(config=config, newest_version=3))


@pytest.fixture
def library(config: RunConfig) -> MediaLibrary:
    return MediaLibrary(config)


def put(library: MediaLibrary, modality: Modality, file: bytes) -> MediaRef:
    return library.add(MediaItem(modality, file, "rows:1"))


def view(
    *media: MediaRef,
    text: str = "what is it?",
    index: int = 0,
    group: str = "000000-0000-0",
    reward: float = 0.5,
    **changes: Any,
) -> SampleView:
    parts = [
        *(ContentPart(Modality.IMAGE, media=piece) for piece in media),
        ContentPart(Modality.TEXT, text),
    ]
    sample = rolled_out(group, index, version=1, messages=[ChatMessage("user", parts)], **changes)
    return SampleView(
        sample,
        "samples[0]@0",
        1,
        scored(group, index, version=1, reward=reward),
        ended(group, outcome=Outcome.TRAINED, version=1),
    )


def page_of(config: RunConfig, *views: SampleView) -> Page:
    path = config.run.directory / "out" / "page.html"
    with open_export(log_of(config), path) as page:
        for one in views:
            page.add(one)
    return Page(path.read_text())


def test_sample_page_shows_media_next_to_response_and_reward(
    config: RunConfig, library: MediaLibrary
) -> None:
    files = {
        Modality.IMAGE: image_file(64, 48),
        Modality.VIDEO: video_file(32, 32, 4),
        Modality.AUDIO: audio_file(0.4),
    }
    media = [put(library, modality, file) for modality, file in files.items()]
    page = page_of(config, view(*media, completion="red", answer="blue", reward=0.25))
    displayed = [np.asarray(Image.open(BytesIO(source))) for source in page.sources("img")]
    image, video, audio = (library.load(piece) for piece in media)
    assert video.pixels is not None
    assert audio.samples is not None
    np.testing.assert_array_equal(displayed[0], image.pixels)
    np.testing.assert_array_equal(np.stack(displayed[1:]), video.pixels)
    with wave.open(BytesIO(page.sources("audio")[0])) as played:
        played_samples = np.frombuffer(played.readframes(played.getnframes()), "<i2") / (2**15 - 1)
        assert played.getframerate() == 16_000
    np.testing.assert_allclose(played_samples, audio.samples.clip(-1, 1), atol=1e-4)
    for word in ("what is it?", "red", "blue", "0.25", "trained in step 1", "image/png, 64 x 48"):
        assert word in page.text


def test_sample_page_escapes_hostile_texts(config: RunConfig, library: MediaLibrary) -> None:
    media = replace(
        put(library, Modality.IMAGE, image_file(32, 32)),
        uri=f"file:///{HOSTILE}",
        media_type=f"image/{HOSTILE}",
    )
    hostile = view(media, text=HOSTILE, completion=HOSTILE, answer=HOSTILE)
    score = scored(index=0, version=1)
    failed = replace(hostile, score=replace(score, reward=None, error=HOSTILE))
    page = page_of(
        config, replace(hostile, sample=changed(hostile.sample, prompt_group_id=HOSTILE)), failed
    )
    assert not [
        tag
        for tag, attributes in page.tags
        if tag == "script" or any(name.startswith("on") for name in attributes)
    ]
    assert len(page.sources("img")) == 2  # and none of them from elsewhere
    assert page.text.count(HOSTILE) >= 8
    assert any(attributes.get("title") == media.uri for _, attributes in page.tags)
    policy = next(
        attributes["content"]
        for tag, attributes in page.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"


def test_sample_page_names_media_that_cannot_be_displayed_and_the_reason(
    config: RunConfig, library: MediaLibrary
) -> None:
    gone = replace(
        put(library, Modality.IMAGE, image_file(32, 32)),
        digest=bytes(32),
        uri=f"{config.objects_uri}/sha256/00/{64 * '0'}.png",
    )
    strange = replace(gone, media_type="text/html")
    page = page_of(config, view(gone, strange))
    assert page.sources("img") == []
    assert "not shown, can't read file://" in page.text
    assert "is of type 'text/html'" in page.text


def test_page_of_a_text_model_displays_a_note_in_place_of_media(
    config: RunConfig, library: MediaLibrary, tmp_path: Path
) -> None:
    media = put(library, Modality.IMAGE, image_file(32, 32))
    without = config.model_copy(
        update={"model": config.model.model_copy(update={"path": tmp_path / "none"})}
    )
    assert "not shown, the model reads text only" in page_of(without, view(media)).text


def test_sample_page_truncates_long_media_and_downsizes_large_images(
    config: RunConfig, library: MediaLibrary
) -> None:
    gallery = MediaRenderer(config, max_bytes=10**8)
    large = put(library, Modality.IMAGE, image_file(960, 480))
    (source,) = Page(gallery.render(large)).sources("img")
    assert Image.open(BytesIO(source)).size == (MAX_SIDE, MAX_SIDE // 2)
    assert (
        len(
            Page(gallery.render(put(library, Modality.VIDEO, video_file(32, 32, 40)))).sources(
                "img"
            )
        )
        == MAX_FRAMES
    )
    (played,) = Page(
        gallery.render(put(library, Modality.AUDIO, audio_file(MAX_SECONDS + 2)))
    ).sources("audio")
    with wave.open(BytesIO(played)) as begin:
        assert begin.getnframes() == MAX_SECONDS * 16_000


def test_full_sample_page_lists_the_media_not_shown(
    config: RunConfig, library: MediaLibrary
) -> None:
    first, second = (put(library, Modality.IMAGE, image_file(48, 48, seed=seed)) for seed in (1, 2))
    gallery = MediaRenderer(
        config, max_bytes=len(MediaRenderer(config, max_bytes=10**6).render(first))
    )
    assert "<img" in gallery.render(first)
    assert "not shown, the page is full" in gallery.render(second)
    assert gallery.num_rendered == 1


def test_sample_page_truncates_long_texts(config: RunConfig) -> None:
    page = page_of(config, view(completion="x" * (MAX_CHARACTERS + 1)))
    assert f"{'x' * MAX_CHARACTERS} ... (4,001 characters)" in page.text


def test_samples_of_a_prompt_group_share_one_card(config: RunConfig, library: MediaLibrary) -> None:
    media = put(library, Modality.IMAGE, image_file(32, 32))
    page = page_of(
        config,
        view(media, index=0),
        view(group="000000-0001-0"),
        view(media, index=1, completion="green"),
    )
    assert [tag for tag, _ in page.tags].count("article") == 2
    assert len(page.sources("img")) == 1
    assert "3 samples of 2 prompt groups" in page.text


def test_sample_page_with_too_many_samples_is_rejected_and_leaves_no_file(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MAX_SAMPLES", 2)
    with pytest.raises(ConfigError, match="a page holds at most 2 samples"):
        page_of(config, *(view(index=index) for index in range(3)))
    assert list((config.run.directory).glob("out/*")) == []


def test_sample_page_rejects_the_media_and_tokens_flags(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match="leave out --media, --tokens and --layout"):
        open_export(log_of(config), Path("page.html"), tokens=True)
    assert isinstance(open_export(log_of(config), Path("page.html")), SamplePage)
