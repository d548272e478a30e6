"""Media beside the token ids of a forward: which rows of features go to which cells, and all rotary
positions. Numpy alone.
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
    """A piece of media as a model is shown it.

    Attributes:
        reference: Where it came from, and what it is.
        pixels: Of a picture, or of the chosen frames of a clip, at their final size.
        samples: Of a sound, or of what is heard of a clip, from -1 to 1 at the model's rate.
    """

    reference: MediaRef
    pixels: UInt8[np.ndarray, "*frames height width 3"] | None = None
    samples: Float32[np.ndarray, " samples"] | None = None

    @property
    def nbytes(self) -> int:
        """Memory that its arrays take."""
        return sum(array.nbytes for array in (self.pixels, self.samples) if array is not None)


@dataclass(frozen=True, slots=True, eq=False)
class MediaSequence:
    """A token sequence in a forward.

    Attributes:
        name: For errors.
        tokens: Prompt and completion.
        given: Which of them the policy did not choose.
        media: In the order of the sequence.
        places: Cell of each token, counted through all rows laid end to end.
    """

    name: str
    tokens: NDArray[Any]
    is_given: Bool[np.ndarray, " tokens"]
    media: Sequence[ProcessedMedia]
    cells: Int64[np.ndarray, " tokens"]

    @property
    def references(self) -> list[MediaRef]:
        """Of its media."""
        return [piece.reference for piece in self.media]

    def find_media_tokens(self, layout: MediaLayout) -> Int64[np.ndarray, " media_tokens"]:
        """Return where in the sequence its media stand.

        Raises:
            PoisonSample: It holds more or fewer placeholders than its media have tokens; the text
                names the sequence.
        """
        try:
            return layout.find_media_tokens(self.tokens, self.is_given, self.references)
        except PoisonSample as error:
            raise PoisonSample(f"{self.name}: {error}") from None


@dataclass(frozen=True, slots=True, eq=False)
class MediaInputs:
    """What a forward takes besides token ids.

    Attributes:
        positions: Rotary positions: time, row and column of every cell.
        cells: Where features stand in for embeddings, ascending.
        features: Which row of the features takes each of those cells; the rows of all of `media`
            are counted one after the other.
        media: Every piece once, however often it stands in the forward.
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
    """Lay the media of sequences out for one forward.

    A cell that several sequences share, as where they have one prompt, is filled once.

    Args:
        sequences: Each with its places in the rows.
        layout: Of the model.
        position_ids: Of the rows without media; cells of no sequence keep them.
    Raises:
        PoisonSample: A sequence holds more or fewer placeholders than its media have tokens; the
            text names it.
    """
    positions = np.tile(position_ids.reshape(-1), (3, 1))
    first_rows: dict[tuple[bytes, str], int] = {}  # a file may be there as a clip and as a sound
    pieces: list[ProcessedMedia] = []
    num_rows = 0
    cells, features = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for sequence in sequences:
        here = sequence.find_media_tokens(layout)
        positions[:, sequence.cells] = layout.rotary_positions(
            len(sequence.tokens), here, sequence.references
        )
        cells.append(sequence.cells[here])
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
