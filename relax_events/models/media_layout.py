"""How a model family writes media into a token sequence, and which rotary positions its tokens have. Numpy alone, without torch.

A picture of r rows and c columns stands in the sequence as r * c placeholder tokens. Its tokens share the first coordinate of their
position, and count rows and columns in the two others; the text behind it goes on max(r, c) further, not r * c:

    token      a  b  [ 2 x 3 ........ ]  d  e
    time       0  1  2  2  2  2  2  2    5  6
    row        0  1  2  2  2  3  3  3    5  6
    column     0  1  2  3  4  2  3  4    5  6

Placeholders that the policy wrote itself are tokens like any other: only those that it was given stand for something.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from jaxtyping import Bool, Int64
from numpy.typing import NDArray

from relax_events.config import MediaConfig
from relax_events.errors import ConfigError, MediaError, PoisonSample
from relax_events.events.parts import MediaRef, Modality
from relax_events.models.geometry import PictureGeometry

PICTURE_FAMILIES = ("qwen3_vl",)
"""Model types, as a checkpoint's `config.json` names them, whose pictures are laid out so."""


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """Of one model. `placeholders` are its token ids by modality."""

    placeholders: dict[Modality, int]
    geometry: PictureGeometry

    @classmethod
    def from_folder(cls, path: Path, config: MediaConfig) -> Self | None:
        """Read a model folder's settings; None where the model reads text alone, or is not there yet.

        Raises:
            ConfigError: Its settings for pictures are missing or not known.
        """
        settings = _json(path / "config.json") if (path / "config.json").is_file() else {}
        if settings.get("model_type") not in PICTURE_FAMILIES:
            return None
        processor = _json(path / "preprocessor_config.json")
        try:
            return cls({Modality.IMAGE: int(settings["image_token_id"])}, PictureGeometry.of(processor, config))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the settings for pictures in {path} can't be used: {error!r}; take the model's folder as it was published") from None

    def expanded(self, tokens: NDArray[np.int32], media: Sequence[MediaRef]) -> NDArray[np.int32]:
        """Repeat each placeholder as often as its piece of media has tokens.

        Args:
            tokens: A rendered prompt, with one placeholder for each piece.
            media: In the order of the prompt.
        Raises:
            PoisonSample: There are more or fewer placeholders than pieces.
        """
        places = np.flatnonzero(np.isin(tokens, list(self.placeholders.values())))
        if len(places) != len(media):
            raise PoisonSample(
                f"the prompt renders to {len(places)} media placeholders and brings {len(media)} pieces; does its text hold one by itself?"
            )
        counts = np.ones(len(tokens), np.int64)
        counts[places] = [rows * columns for rows, columns in map(self.grid, media)]
        return np.repeat(tokens, counts)

    def grid(self, media: MediaRef) -> tuple[int, int]:
        """Return rows and columns of tokens of a picture.

        Raises:
            MediaError: It can't be shown to the model; the text names it.
        """
        if media.width is None or media.height is None or min(media.width, media.height) < 1:
            raise MediaError(f"{media.uri} says no width and height, which its tokens follow from", reason="no_size")
        try:
            return self.geometry.grid(media.width, media.height)
        except ValueError as error:
            raise MediaError(f"{media.uri} can't be shown to the model: {error}", reason="bad_shape") from None

    def cells(self, tokens: NDArray[Any], given: Bool[np.ndarray, " tokens"], media: Sequence[MediaRef]) -> Int64[np.ndarray, " media_tokens"]:
        """Return where in a sequence its media stand, all pieces one after the other.

        Args:
            tokens: The sequence.
            given: Which of them the policy did not choose.
            media: In the order of the sequence.
        Raises:
            PoisonSample: There are more or fewer placeholders than the pieces have tokens.
        """
        cells = np.flatnonzero(np.isin(tokens, list(self.placeholders.values())) & given)
        wanted = sum(rows * columns for rows, columns in map(self.grid, media))
        if media and len(cells) != wanted:
            raise PoisonSample(f"{len(media)} pieces of media have {wanted} tokens, and the sequence holds {len(cells)} placeholders for them")
        return cells if media else cells[:0]

    def positions(self, num_tokens: int, cells: Int64[np.ndarray, " media_tokens"], media: Sequence[MediaRef]) -> Int64[np.ndarray, "3 tokens"]:
        """Return the rotary positions of a sequence.

        Args:
            num_tokens: Of the whole sequence.
            cells: From `cells`.
            media: In the order of the sequence.
        """
        positions = np.tile(np.arange(num_tokens, dtype=np.int64), (3, 1))
        first = 0
        for rows, columns in map(self.grid, media):
            size = rows * columns
            here = cells[first : first + size]
            begin = positions[:, here[0]].copy()
            offsets = np.stack([np.zeros(size, np.int64), np.repeat(np.arange(rows), columns), np.tile(np.arange(columns), rows)])
            positions[:, here[-1] + 1 :] += max(rows, columns) - size
            positions[:, here] = begin[:, None] + offsets
            first += size
        return positions


def _json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} can't be read: {error}; take the model's folder as it was published, or have `relax models prepare` make one"
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no JSON object; take the model's folder as it was published")
    return tree
