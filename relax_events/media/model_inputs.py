"""Media inputs of a forward pass: the features that replace placeholder embeddings, and all rotary
positions. Uses only numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int64, UInt8
from numpy.typing import NDArray

from relax_events.errors import PoisonSample
from relax_events.events.parts import MediaRef
from relax_events.media.token_layout import MediaLayout


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedMedia:
    """A preprocessed media file.

    Attributes:
        reference: Reference with URI and facts.
        pixels: Pixels of an image, or of the selected frames of a video, at their final size.
        samples: Samples of audio, or of a video's audio, from -1 to 1 at the model's rate.
    """

    reference: MediaRef
    pixels: UInt8[np.ndarray, "*frames height width 3"] | None = None
    samples: Float32[np.ndarray, " samples"] | None = None

    @property
    def nbytes(self) -> int:
        """Size of its arrays."""
        return sum(array.nbytes for array in (self.pixels, self.samples) if array is not None)


@dataclass(frozen=True, slots=True, eq=False)
class MediaSequence:
    """A token sequence in a forward.

    Attributes:
        name: Name of the sequence, for errors.
        tokens: Prompt and completion.
        is_input: True for each token that the policy did not sample; only these can be media
            placeholders.
        media: The media files, in the order of the sequence.
        cells: Index of each token in all rows of the forward pass, concatenated.
    """

    name: str
    tokens: NDArray[Any]
    is_input: Bool[np.ndarray, " tokens"]
    media: Sequence[ProcessedMedia]
    cells: Int64[np.ndarray, " tokens"]

    @property
    def references(self) -> list[MediaRef]:
        """References of its media."""
        return [piece.reference for piece in self.media]

    def find_media_tokens(self, layout: MediaLayout) -> Int64[np.ndarray, " media_tokens"]:
        """Return the indices of the sequence's media tokens.

        Raises:
            PoisonSample: The numbers of placeholders and of media tokens differ; the text names the
                sequence.
        """
        try:
            return layout.find_media_tokens(self.tokens, self.is_input, self.references)
        except PoisonSample as error:
            raise PoisonSample(f"{self.name}: {error}") from None


@dataclass(frozen=True, slots=True, eq=False)
class MediaInputs:
    """Inputs of a forward pass in addition to token ids.

    Attributes:
        positions: Rotary positions: time, row and column of every cell.
        cells: Indices of the cells whose embeddings are replaced by features, ascending.
        features: Index of the feature for each of those cells, in the concatenated features of
            `media`.
        media: Every file once, even if it occurs several times.
    """

    positions: Int64[np.ndarray, "3 rows length"]
    cells: Int64[np.ndarray, " media_cells"]
    features: Int64[np.ndarray, " media_cells"]
    media: tuple[ProcessedMedia, ...]


def build_media_inputs(
    sequences: Sequence[MediaSequence],
    *,
    layout: MediaLayout,
    position_ids: Int64[np.ndarray, "rows length"],
) -> MediaInputs:
    """Build the media inputs of one forward pass.

    A cell that several sequences share, such as a common prompt, is filled once.

    Args:
        sequences: The token sequences, with their cells.
        layout: The model's media layout.
        position_ids: Positions of the rows without media; cells outside all sequences keep them.
    Raises:
        PoisonSample: The numbers of placeholders and of media tokens differ in a sequence; the text
            names it.
    """
    positions = np.tile(position_ids.reshape(-1), (3, 1))
    first_rows: dict[tuple[bytes, str], int] = {}  # a file may occur as video and as audio
    pieces: list[ProcessedMedia] = []
    num_rows = 0
    cells, features = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for sequence in sequences:
        indices = sequence.find_media_tokens(layout)
        positions[:, sequence.cells] = layout.rotary_positions(
            len(sequence.tokens), indices, sequence.references
        )
        cells.append(sequence.cells[indices])
        for piece in sequence.media:
            blocks, key = (
                layout.blocks(piece.reference),
                (piece.reference.digest, piece.reference.media_type),
            )
            if key not in first_rows:
                first_rows[key] = num_rows
                num_rows += sum(map(len, blocks))
                pieces.append(piece)
            features += [first_rows[key] + block.features for block in blocks]
    unique, index = np.unique(np.concatenate(cells), return_index=True)
    return MediaInputs(
        positions.reshape(3, *position_ids.shape),
        unique,
        np.concatenate(features)[index],
        tuple(pieces),
    )
