"""Media of samples as pieces of an HTML page: drawn anew from what the model was shown, never the
file as it came from a stranger.
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
from relax_events.media.library import MediaLibrary
from relax_events.media.model_inputs import ProcessedMedia
from relax_events.media.wav import encode_wav
from relax_events.objects import ObjectStore

MAX_SIDE = 320
MAX_FRAMES = 8
MAX_SECONDS = 10
Frame = UInt8[np.ndarray, "height width 3"]


class MediaRenderer:
    """Draws media into a page, until the page holds as much as it may: what comes then is named
    only. Used by one thread.
    """

    def __init__(
        self, config: RunConfig, *, max_bytes: int, store: ObjectStore | None = None
    ) -> None:
        """Read how the model is shown media.

        Args:
            config: The run.
            max_bytes: Of all that is drawn, as it stands in the page.
            store: The run's object store, where it is open already.
        """
        self._config, self._left = config, max_bytes
        self._store = store
        self._library: MediaLibrary | None = None
        self.num_rendered = 0

    def render(self, media: MediaRef) -> str:
        """Return a piece as HTML; of one that can't be shown its name, and why."""
        name = caption(media)
        try:
            piece = self._opened().load(media)
            body = "".join(
                [
                    *(render_image(frame) for frame in select_frames(piece)),
                    *render_audio(piece, self._config.model.media.audio_sample_rate),
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
    """Name a piece by its type and extent, and under the pointer by its address."""
    extent = f"{media.extent}, " if media.extent else ""
    return (
        "<span "
        f'title="{escape(media.uri)}">{escape(f"{media.media_type}, {extent}{media.num_bytes} bytes")}</span>'
    )


def select_frames(piece: ProcessedMedia) -> list[Frame]:
    """Return the picture, or frames of the clip: all that are shown to the model, or of many some
    that are spread over it.
    """
    if piece.pixels is None:
        return []
    frames = piece.pixels if piece.pixels.ndim == 4 else piece.pixels[None]
    chosen = np.linspace(0, len(frames) - 1, min(len(frames), MAX_FRAMES)).round().astype(int)
    return [frames[place] for place in chosen]


def render_image(frame: Frame) -> str:
    """Draw a frame as PNG, reduced where it is large."""
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentProblem(
            f"pictures in a page need the package pillow ({error}); install relax-events[media]"
        ) from None
    image, file = Image.fromarray(frame), BytesIO()
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    image.save(file, "PNG")
    return f'<img alt="" src="{data_uri("image/png", file.getvalue())}">'


def render_audio(piece: ProcessedMedia, rate_hertz: int) -> list[str]:
    """Return what is heard, as WAV, or its begin."""
    if piece.samples is None:
        return []
    begin = piece.samples[: MAX_SECONDS * rate_hertz].astype(np.float64)
    return [
        (
            "<audio controls "
            f'src="{data_uri("audio/wav", encode_wav(begin, rate_hertz=rate_hertz))}"></audio>'
        )
    ]


def data_uri(kind: str, data: bytes) -> str:
    """Write bytes into an address."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
