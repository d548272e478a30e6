"""Adds the media of samples to packed micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from relax_events.errors import PoisonSample
from relax_events.media.library import MediaLibrary
from relax_events.media.model_inputs import MediaSequence
from relax_events.models.families import Family
from relax_events.objects.roots import list_media
from relax_events.training.batch.packing import PackedBatch
from relax_events.training.batch.token_sequence import TokenSequence, read_array


class SampleMedia:
    """Adds the media inputs for placeholders and the matching rotary positions to packed samples;
    text samples do not change.
    """

    def __init__(self, family: Family, library: MediaLibrary) -> None:
        """Use a model family and a media library.

        Args:
            family: Of the model.
            library: Of the run.
        """
        self._family, self._library = family, library

    def add_to(self, batch: PackedBatch, samples: Sequence[TokenSequence]) -> PackedBatch:
        """Return a packed batch with the media of its samples.

        Args:
            batch: Packed from these samples.
            samples: In packed order.
        Raises:
            PoisonSample: A media item can't be read, or a sample's tokens and media don't match;
                the text names the sample.
        """
        if not any(list_media(sample) for sample in samples):
            return batch
        lengths = [len(read_array(sample, "tokens")) for sample in samples]
        cells_by_sample = np.split(batch.cells, np.cumsum(lengths)[:-1])
        sequences = [
            self._sequence(sample, cells)
            for sample, cells in zip(samples, cells_by_sample, strict=True)
        ]
        return replace(
            batch, media=self._family.build_inputs(sequences, position_ids=batch.position_ids)
        )

    def _sequence(self, sample: TokenSequence, cells: np.ndarray) -> MediaSequence:
        name, given = f"sample {sample.sample_id}", ~read_array(sample, "loss_mask").astype(bool)
        try:
            media = [self._library.load(reference) for reference in list_media(sample)]
        except PoisonSample as error:
            raise PoisonSample(f"{name}: {error}") from None
        return MediaSequence(name, read_array(sample, "tokens"), given, media, cells)
