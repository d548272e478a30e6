"""Renders media of samples as parts of an HTML page: re-encoded from the model's inputs, never the
original file of an untrusted producer.
"""

from __future__ import annotations

import base64
from html import escape
from io import BytesIO

import numpy as np
from jaxtyping import UInt8

from relax_events.config import RunConfig
from relax_events.errors import ConfigError, EnvironmentProblem, MediaError, ObjectError
from relax_events.events.parts import MediaRef
from relax_events.media.audio import encode_wav
from relax_events.media.library import MediaLibrary
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.objects import ObjectStore

MAX_SIDE = 320
MAX_FRAMES = 8
MAX_SECONDS = 10
Frame = UInt8[np.ndarray, "height width 3"]


class MediaRenderer:
    """Renders media into a page, until the page reaches its size limit; further media are only
    named. Used by one thread.
    """

    def __init__(
        self, config: RunConfig, *, max_bytes: int, store: ObjectStore | None = None
    ) -> None:
        """Read the model's media preprocessing.

        Args:
            config: The run.
            max_bytes: Size limit of all media in the page.
            store: The run's object store, where it is open already.
        """
        self._config, self._left = config, max_bytes
        self._store = store
        self._library: MediaLibrary | None = None
        self.num_rendered = 0

    def render(self, media: MediaRef) -> str:
        """Return media as HTML; where it can't be shown, its name and the reason."""
        name = caption(media)
        try:
            media_input = self._opened().load(media)
            body = "".join(
                [
                    *(render_image(frame) for frame in select_frames(media_input)),
                    *render_audio(media_input, self._config.model.media.audio_sample_rate),
                ]
            )
        except (MediaError, ObjectError, EnvironmentProblem, ConfigError) as error:
            return (
                f'<figure class="media"><figcaption>{name}: not shown, '
                f"{escape(str(error))}</figcaption></figure>"
            )
        if len(body) > self._left:
            return (
                f'<figure class="media"><figcaption>{name}: not shown, the page is '
                "full</figcaption></figure>"
            )
        self._left -= len(body)
        self.num_rendered += 1
        return f'<figure class="media">{body}<figcaption>{name}</figcaption></figure>'

    def _opened(self) -> MediaLibrary:
        if self._library is None:
            self._library = MediaLibrary(self._config, store=self._store)
        return self._library


def caption(media: MediaRef) -> str:
    """Describe media by type and size, with its URI as tooltip."""
    extent = f"{media.extent}, " if media.extent else ""
    return (
        "<span "
        f'title="{escape(media.uri)}">'
        f"{escape(f'{media.media_type}, {extent}{media.num_bytes} bytes')}</span>"
    )


def select_frames(media_input: ProcessedMedia) -> list[Frame]:
    """Return the image, or frames of the video: all that the model gets, or an even selection of
    many.
    """
    if media_input.pixels is None:
        return []
    frames = media_input.pixels if media_input.pixels.ndim == 4 else media_input.pixels[None]
    chosen = np.linspace(0, len(frames) - 1, min(len(frames), MAX_FRAMES)).round().astype(int)
    return [frames[index] for index in chosen]


def render_image(frame: Frame) -> str:
    """Render a frame as PNG, reduced where it is large."""
    file = BytesIO()
    encode_png(frame, file)
    return f'<img alt="" src="{data_uri("image/png", file.getvalue())}">'


def encode_png(frame: Frame, file: BytesIO) -> None:
    """Write a frame as PNG, reduced where it is large.

    Raises:
        EnvironmentProblem: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentProblem(
            f"images in a page need the package pillow ({error}); install relax-events[media]"
        ) from None
    image = Image.fromarray(frame)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    image.save(file, "PNG")


def render_audio(media_input: ProcessedMedia, rate_hertz: int) -> list[str]:
    """Render audio as WAV, truncated to its start."""
    if media_input.samples is None:
        return []
    begin = media_input.samples[: MAX_SECONDS * rate_hertz].astype(np.float64)
    return [
        (
            "<audio controls "
            f'src="{data_uri("audio/wav", encode_wav(begin, rate_hertz=rate_hertz))}"></audio>'
        )
    ]


def data_uri(kind: str, data: bytes) -> str:
    """Return bytes as a data URI."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
