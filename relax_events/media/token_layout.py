"""The layout of media in the token sequence of a model family, and the rotary positions of its
tokens. Uses numpy, not torch.

An image of r rows and c columns has r * c placeholder tokens. Their rotary
positions have a common time, and count rows and columns. The text after the image continues at
max(r, c) positions further, not r * c:

    token      a  b  [ 2 x 3 ........ ]  d  e
    time       0  1  2  2  2  2  2  2    5  6
    row        0  1  2  2  2  3  3  3    5  6
    column     0  1  2  3  4  2  3  4    5  6

Qwen3-VL writes a video as one image per temporal patch, each after its time as text: `<0.2
seconds>` and a block, repeated. Qwen3-Omni writes it as one block whose first coordinate increases
with time; audio is a line of tokens there, with positions like text.

A placeholder token that the policy sampled is an ordinary token; only input tokens can be media.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Int64
from numpy.typing import NDArray

from relax_events.config.media import MediaConfig
from relax_events.errors import ConfigError, MediaError, PoisonSample
from relax_events.events.parts import MediaRef, Modality
from relax_events.media.geometry import ImageGeometry
from relax_events.media.preprocessing import (
    AudioPreprocessor,
    ImagePreprocessor,
    MediaPreprocessor,
    VideoPreprocessor,
)
from relax_events.model_folder import get_thinker_config, read_model_json


@dataclass(frozen=True, slots=True, eq=False)
class MediaBlock:
    """A run of placeholders.

    Attributes:
        ids: Their token ids.
        offsets: Time, row and column of each, relative to the start of the block.
        features: Index of the file's feature that replaces each.
        first_ending: Index of the first placeholder that determines where the text continues: one
            after the largest offset from there on.
    """

    ids: Int64[np.ndarray, " cells"]
    offsets: Int64[np.ndarray, "3 cells"]
    features: Int64[np.ndarray, " cells"]
    first_ending: int = 0

    def __len__(self) -> int:
        """Return the number of placeholders."""
        return len(self.ids)

    @property
    def extent(self) -> int:
        """Number of positions that the block advances."""
        return int(self.offsets[:, self.first_ending :].max()) + 1


def visual_block(
    token: int,
    grid: tuple[int, int, int],
    *,
    temporal_patch_positions: int = 0,
    first_feature: int = 0,
) -> MediaBlock:
    """Lay out an image or video: one temporal patch after the other, row by row.

    Args:
        token: The placeholder.
        grid: Tokens in time, in rows and in columns.
        temporal_patch_positions: Positions from one temporal patch to the next.
        first_feature: Index of the block's first feature.
    """
    num_patches, rows, columns = (index.ravel() for index in np.indices(grid, np.int64))
    size = len(num_patches)
    return MediaBlock(
        np.full(size, token),
        np.stack([num_patches * temporal_patch_positions, rows, columns]),
        first_feature + np.arange(size),
    )


def audio_block(token: int, num_tokens: int, *, first_feature: int = 0) -> MediaBlock:
    """Lay out audio: one token after the other, like text."""
    offsets = np.arange(num_tokens)
    return MediaBlock(np.full(num_tokens, token), np.tile(offsets, (3, 1)), first_feature + offsets)


def interleave_by_time(visual: MediaBlock, audio: MediaBlock) -> MediaBlock:
    """Interleave visual and audio tokens by time; visual tokens come first at equal positions.

    After one modality has ended, only the rest of the other determines where the text continues, as
    in the model's training.

    Source: `Qwen3OmniMoeProcessor` and `get_rope_index` of transformers.
    """
    ids, offsets, features = (
        np.concatenate([getattr(visual, name), getattr(audio, name)], axis=-1)
        for name in ("ids", "offsets", "features")
    )
    order = np.argsort(offsets[0], kind="stable")
    is_visual = order < len(visual)
    first_ending = int(np.flatnonzero(is_visual != is_visual[-1])[-1]) + 1
    return MediaBlock(ids[order], offsets[:, order], features[order], first_ending)


VIDEO_PLACEHOLDER = re.compile(r"<\|vision_start\|><\|video_pad\|><\|vision_end\|>|<\|video_pad\|>")
"""A video's placeholder as chat templates write it."""


def read_modality(media: MediaRef) -> Modality:
    """Return the modality of a media file, by its media type.

    Raises:
        MediaError: It is neither image, audio nor video.
    """
    kind = media.media_type.partition("/")[0]
    if kind not in (Modality.IMAGE, Modality.AUDIO, Modality.VIDEO):
        raise MediaError(
            (
                f"{media.uri} is of type {media.media_type!r}; supported are image/*, audio/* "
                "and video/*"
            ),
            reason="wrong_type",
        )
    return Modality(kind)


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """Media layout of a model: an image is a block, and so is each temporal patch of a video.
    `placeholders` are its token ids by modality.
    """

    MODALITIES: ClassVar[tuple[Modality, ...]] = (Modality.IMAGE, Modality.VIDEO)

    placeholders: dict[Modality, int]
    images: ImagePreprocessor
    videos: VideoPreprocessor

    @classmethod
    def from_folder(cls, path: Path, config: MediaConfig) -> MediaLayout | None:
        """Read a model folder's settings; None if the model reads text only, or does not exist yet.

        Raises:
            ConfigError: Its settings for media are missing or not supported.
        """
        settings = read_model_json(path / "config.json") if (path / "config.json").is_file() else {}
        family = MEDIA_FAMILIES.get(str(settings.get("model_type")))
        if family is None:
            return None
        processor = read_model_json(path / "preprocessor_config.json")
        try:
            return family.from_settings(settings, processor, config)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the settings for media in {path} can't be used: {error!r}; use the "
                "model's folder as it was published"
            ) from None

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], processor: Mapping[str, Any], config: MediaConfig
    ) -> MediaLayout:
        """Build the layout from `config.json`, `preprocessor_config.json` and the run file.

        Raises:
            ConfigError: They contradict each other.
            KeyError, TypeError, ValueError: A setting is missing, or of another type.
        """
        if config.use_audio_in_video:
            raise ConfigError(
                "model.media.use_audio_in_video needs a model that reads audio; use one of "
                "Qwen3-Omni's family, or remove the key"
            )
        images = ImagePreprocessor(ImageGeometry.from_settings(processor, config))
        return cls(
            _tokens(settings, cls.MODALITIES),
            images,
            VideoPreprocessor.from_settings(images, config),
        )

    @property
    def preprocessors(self) -> Mapping[Modality, MediaPreprocessor]:
        """The preprocessor of each modality."""
        return {Modality.IMAGE: self.images, Modality.VIDEO: self.videos}

    def preprocessor_for(self, media: MediaRef) -> MediaPreprocessor:
        """Return the preprocessor of a media file.

        Raises:
            MediaError: The model can't read its modality; the text names it.
        """
        modality = read_modality(media)
        if (preprocessor := self.preprocessors.get(modality)) is None:
            kinds = ", ".join(kind.value for kind in self.preprocessors)
            raise MediaError(
                f"{media.uri} is of modality {modality.value}, and the model reads {kinds}",
                reason="not_for_this_model",
            )
        return preprocessor

    def blocks(self, media: MediaRef) -> Sequence[MediaBlock]:
        """Return the runs of placeholders of a media file; there is text between them.

        Raises:
            MediaError: The model can't read it; the text names it.
        """
        num_patches, rows, columns = self.preprocessor_for(media).grid(media)
        token, size = self.placeholders[read_modality(media)], rows * columns
        return [
            visual_block(token, (1, rows, columns), first_feature=patch * size)
            for patch in range(num_patches)
        ]

    def expand_videos(self, text: str, media: Sequence[MediaRef]) -> str:
        """Replace the video placeholders of a rendered prompt by the family's text for them;
        `expand_placeholders` rejects more or fewer.
        """
        texts = iter(
            [self._video_text(piece) for piece in media if read_modality(piece) is Modality.VIDEO]
        )
        return VIDEO_PLACEHOLDER.sub(lambda match: next(texts, match[0]), text)

    def _video_text(self, video: MediaRef) -> str:
        return "".join(
            f"<{second:.1f} seconds><|vision_start|><|video_pad|><|vision_end|>"
            for second in self.videos.timestamps(video)
        )

    def expand_placeholders(
        self, tokens: NDArray[np.int32], media: Sequence[MediaRef]
    ) -> NDArray[np.int32]:
        """Repeat each placeholder by the number of its tokens.

        Args:
            tokens: A rendered prompt after `expand_videos`, with one placeholder for each block.
            media: The media files, in the order of the prompt.
        Raises:
            PoisonSample: There are more or fewer placeholders than the files need, or of other
                modalities.
        """
        blocks = list(self._list_blocks(media))
        indices = np.flatnonzero(np.isin(tokens, list(self.placeholders.values())))
        if len(indices) != len(blocks):
            raise PoisonSample(
                f"the prompt renders to {len(indices)} media placeholders, but its {len(media)} "
                f"files need {len(blocks)}; does the chat template write one for each?"
            )
        if any(
            tokens[index] not in block.ids for index, block in zip(indices, blocks, strict=True)
        ):
            raise PoisonSample(
                "the prompt's media placeholders are of other modalities than its media; does the "
                "chat template write them in order?"
            )
        counts = np.ones(len(tokens), np.int64)
        counts[indices] = [len(block) for block in blocks]
        expanded = np.repeat(tokens, counts)
        is_placeholder = np.zeros(len(tokens), bool)
        is_placeholder[indices] = True
        expanded[np.repeat(is_placeholder, counts)] = _ids(blocks)
        return expanded

    def find_media_tokens(
        self, tokens: NDArray[Any], is_input: Bool[np.ndarray, " tokens"], media: Sequence[MediaRef]
    ) -> Int64[np.ndarray, " media_tokens"]:
        """Return the indices of a sequence's media tokens, all files in order.

        Args:
            tokens: The sequence.
            is_input: True for each token that the policy did not sample.
            media: The media files, in the order of the sequence.
        Raises:
            PoisonSample: There are more or fewer placeholders than media tokens, or of other
                modalities.
        """
        if not media:
            return np.zeros(0, np.int64)
        indices = np.flatnonzero(np.isin(tokens, list(self.placeholders.values())) & is_input)
        ids = _ids(list(self._list_blocks(media)))
        if len(indices) != len(ids):
            raise PoisonSample(
                f"{len(media)} media files have {len(ids)} tokens, and the sequence "
                f"has {len(indices)} placeholders for them"
            )
        if not np.array_equal(tokens[indices], ids):
            raise PoisonSample(
                "the sequence's media placeholders are of other modalities than its media, or in "
                "another order"
            )
        return indices

    def rotary_positions(
        self,
        num_tokens: int,
        media_tokens: Int64[np.ndarray, " media_tokens"],
        media: Sequence[MediaRef],
    ) -> Int64[np.ndarray, "3 tokens"]:
        """Return the rotary positions of a sequence.

        Args:
            num_tokens: Length of the whole sequence.
            media_tokens: The result of `find_media_tokens`.
            media: The media files, in the order of the sequence.
        """
        positions = np.tile(np.arange(num_tokens, dtype=np.int64), (3, 1))
        first = 0
        for block in self._list_blocks(media):
            indices = media_tokens[first : first + len(block)]
            begin = positions[:, indices[0]].copy()
            positions[:, indices[-1] + 1 :] += block.extent - len(block)
            positions[:, indices] = begin[:, None] + block.offsets
            first += len(block)
        return positions

    def _list_blocks(self, media: Sequence[MediaRef]) -> Iterator[MediaBlock]:
        return (block for piece in media for block in self.blocks(piece))


@dataclass(frozen=True, slots=True)
class OmniLayout(MediaLayout):
    """Media layout of a model that reads audio: a video is one block, with its audio if
    `use_audio_in_video` is set.

    `temporal_patch_positions` is the number of rotary positions between two temporal patches of a
    video.
    """

    MODALITIES: ClassVar[tuple[Modality, ...]] = (Modality.IMAGE, Modality.AUDIO, Modality.VIDEO)

    audio: AudioPreprocessor
    temporal_patch_positions: int

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], processor: Mapping[str, Any], config: MediaConfig
    ) -> MediaLayout:
        """See `MediaLayout`; a complete Qwen3-Omni has the thinker's settings in a section of their
        own.
        """
        thinker = get_thinker_config(settings)
        images, audio = (
            ImagePreprocessor(ImageGeometry.from_settings(processor, config)),
            AudioPreprocessor.from_settings(processor, thinker["audio_config"]),
        )
        videos = VideoPreprocessor.from_settings(
            images, config, audio=audio if config.use_audio_in_video else None
        )
        temporal_patch_positions = videos.temporal_patch_seconds * float(
            thinker["position_id_per_seconds"]
        )
        if temporal_patch_positions != int(temporal_patch_positions):
            raise ConfigError(
                f"model.media.video_fps = {config.video_fps} would place the temporal patches of a "
                f"video {temporal_patch_positions:g} positions apart, which must be an integer; "
                "set it to 1, 2 or another value with an integer result"
            )
        return cls(
            _tokens(thinker, cls.MODALITIES), images, videos, audio, int(temporal_patch_positions)
        )

    @property
    def preprocessors(self) -> Mapping[Modality, MediaPreprocessor]:
        """See `MediaLayout`."""
        return {
            Modality.IMAGE: self.images,
            Modality.AUDIO: self.audio,
            Modality.VIDEO: self.videos,
        }

    def blocks(self, media: MediaRef) -> Sequence[MediaBlock]:
        """See `MediaLayout`."""
        modality, grid = read_modality(media), self.preprocessor_for(media).grid(media)
        if modality is Modality.AUDIO:
            return [audio_block(self.placeholders[modality], grid[0])]
        visual = visual_block(
            self.placeholders[modality],
            grid,
            temporal_patch_positions=self.temporal_patch_positions,
        )
        if modality is Modality.IMAGE or not (num_audio := self.videos.num_audio_tokens(media)):
            return [visual]
        return [
            interleave_by_time(
                visual,
                audio_block(
                    self.placeholders[Modality.AUDIO], num_audio, first_feature=len(visual)
                ),
            )
        ]

    def _video_text(self, video: MediaRef) -> str:
        inner = (
            "<|audio_start|><|video_pad|><|audio_end|>" if self.videos.audio else "<|video_pad|>"
        )
        return f"<|vision_start|>{inner}<|vision_end|>"


MEDIA_FAMILIES: dict[str, type[MediaLayout]] = {
    "qwen3_vl": MediaLayout,
    "qwen3_vl_moe": MediaLayout,
    "qwen3_5": MediaLayout,
    "qwen3_5_moe": MediaLayout,
    "qwen3_omni_moe_thinker": OmniLayout,
    "qwen3_omni_moe": OmniLayout,
}
"""Model types, as a checkpoint's `config.json` names them, that read media."""


def _tokens(settings: Mapping[str, Any], modalities: Sequence[Modality]) -> dict[Modality, int]:
    return {modality: int(settings[f"{modality.value}_token_id"]) for modality in modalities}


def _ids(blocks: Sequence[MediaBlock]) -> Int64[np.ndarray, " media_tokens"]:
    return np.concatenate([np.zeros(0, np.int64), *(block.ids for block in blocks)])
