"""The media of samples on their way into a packed forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from relax_events.errors import PoisonSample
from relax_events.media.library import MediaLibrary
from relax_events.media.model_inputs import MediaSequence
from relax_events.models.families import Family
from relax_events.objects.roots import media_of
from relax_events.training.batch.packing import PackedBatch
from relax_events.training.batch.token_sequence import TokenSequence, plain


class SampleMedia:
    """Adds to packed samples what their placeholders stand for, with rotary positions to match;
    text stays as it is.
    """

    def __init__(self, family: Family, library: MediaLibrary) -> None:
        """Take over what knows the model, and what has the media.

        Args:
            family: Of the model.
            library: Of the run.
        """
        self._family, self._library = family, library

    def added(self, batch: PackedBatch, samples: Sequence[TokenSequence]) -> PackedBatch:
        """Return a packed batch with the media of its samples.

        Args:
            batch: Packed from these samples.
            samples: In packed order.
        Raises:
            PoisonSample: A piece can't be had, or a sample's tokens and media don't fit; the text
                names the sample.
        """
        if not any(media_of(sample) for sample in samples):
            return batch
        lengths = [len(plain(sample, "tokens")) for sample in samples]
        places = np.split(batch.places, np.cumsum(lengths)[:-1])
        sequences = [
            self._sequence(sample, cells) for sample, cells in zip(samples, places, strict=True)
        ]
        return replace(batch, media=self._family.inputs(sequences, position_ids=batch.position_ids))

    def _sequence(self, sample: TokenSequence, places: np.ndarray) -> MediaSequence:
        name, given = f"sample {sample.sample_id}", ~plain(sample, "loss_mask").astype(bool)
        try:
            media = [self._library.processed(reference) for reference in media_of(sample)]
        except PoisonSample as error:
            raise PoisonSample(f"{name}: {error}") from None
        return MediaSequence(name, plain(sample, "tokens"), given, media, places)
