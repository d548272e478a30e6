"""The decoder process: its responses, and the effect of a file that hangs it, grows it or crashes
it.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from relax_events.config import MediaConfig
from relax_events.errors import MediaError
from relax_events.events.parts import Modality
from relax_events.media.decoder import Decoder
from relax_events.media.facts import MediaFacts
from relax_events.media.preprocessing import DecodePlan
from relax_events.media.videos import decode_video
from tests.unit.image_model import image_file
from tests.unit.video_and_audio import audio_file, frames_of, video_file, written

PLAN = DecodePlan((4, 32, 48, 3), "uint8", frames=(0, 1, 2, 3))


def process_of(decoder: Decoder) -> int:
    assert decoder.pid is not None
    return decoder.pid


def test_decoder_inspects_and_decodes_all_media_types() -> None:
    decoder, limits = Decoder(MediaConfig()), MediaConfig()
    video = video_file(48, 32)
    assert decoder.inspect(image_file(48, 32), Modality.IMAGE, location="a") == MediaFacts(
        "image/png", 48, 32
    )
    assert decoder.inspect(audio_file(0.4), Modality.AUDIO, location="b") == MediaFacts(
        "audio/x-wav", num_frames=6_400, rate_hertz=16_000.0
    )
    assert decoder.inspect(video, Modality.VIDEO, location="c") == MediaFacts(
        "video/mp4", 48, 32, num_frames=4, rate_hertz=2.0
    )
    assert (
        decoder.decode(video, Modality.VIDEO, PLAN, location="c")
        == decode_video(video, plan=PLAN, limits=limits, location="c").tobytes()
    )


def test_rejected_file_leaves_the_decoder_process_running() -> None:
    decoder = Decoder(MediaConfig())
    decoder.inspect(audio_file(), Modality.AUDIO, location="a")
    before = process_of(decoder)
    with pytest.raises(MediaError, match="b begins with b'no audio', which is not audio") as caught:
        decoder.inspect(b"no audio at all", Modality.AUDIO, location="b")
    assert caught.value.reason == "wrong_type"
    assert process_of(decoder) == before


def test_decoding_timeout_affects_only_its_own_file() -> None:
    decoder = Decoder(MediaConfig())
    decoder.inspect(audio_file(), Modality.AUDIO, location="a")
    before = process_of(decoder)
    os.kill(before, signal.SIGSTOP)
    decoder._limits = MediaConfig(decode_seconds=0.5)
    with pytest.raises(
        MediaError, match=r"b was not decoded within model.media.decode_seconds = 0.5"
    ) as caught:
        decoder.inspect(audio_file(), Modality.AUDIO, location="b")
    assert caught.value.reason == "too_slow"
    decoder._limits = MediaConfig()
    assert decoder.inspect(audio_file(), Modality.AUDIO, location="c").num_frames == 6_400
    assert process_of(decoder) != before


def test_decoder_crash_affects_only_the_file_that_caused_it() -> None:
    decoder = Decoder(MediaConfig())
    decoder.inspect(audio_file(), Modality.AUDIO, location="a")
    os.kill(process_of(decoder), signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        crashed = threads.submit(decoder.inspect, audio_file(), Modality.AUDIO, location="b")
        (slot,) = decoder._children._state.slots
        while slot.child is None or not slot.child.requests:
            time.sleep(0.01)
        os.kill(process_of(decoder), signal.SIGKILL)
        with pytest.raises(
            MediaError, match=r"b ended the process that decoded it \(signal SIGKILL\)"
        ) as caught:
            crashed.result()
    assert caught.value.reason == "crashed_decoder"
    assert decoder.inspect(audio_file(), Modality.AUDIO, location="c").num_frames == 6_400


def test_unexpected_decoder_error_is_reported_with_its_message() -> None:
    decoder = Decoder(MediaConfig())
    with pytest.raises(
        MediaError,
        match=r"a ended the process that decoded it \(IndexError: .* index out of range; exit code 1\)",
    ) as caught:
        decoder.decode(image_file(32, 32), Modality.IMAGE, DecodePlan((3,), "uint8"), location="a")
    assert caught.value.reason == "crashed_decoder"
    assert decoder.inspect(audio_file(), Modality.AUDIO, location="b").num_frames == 6_400


def test_error_names_file_that_needs_too_much_memory_to_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relax_events.media.decoder.DECODER_MEMORY_BYTES", 512 * 1024**2)
    decoder = Decoder(MediaConfig())
    video = written("mpeg4", "mp4", frames=frames_of(48, 32, 4))
    huge = DecodePlan((768, 1024, 1024, 3), "uint8", frames=(0, 1) * 384)
    with pytest.raises(MediaError, match=r"a needs more than 536870912 bytes to decode") as caught:
        decoder.decode(video, Modality.VIDEO, huge, location="a")
    assert caught.value.reason == "too_much_memory"
    assert (
        np.frombuffer(decoder.decode(video, Modality.VIDEO, PLAN, location="b"), np.uint8).size
        == 4 * 32 * 48 * 3
    )


def test_decoder_process_ends_with_its_owner() -> None:
    decoder = Decoder(MediaConfig())
    decoder.inspect(audio_file(), Modality.AUDIO, location="a")
    process = psutil.Process(process_of(decoder))
    del decoder
    process.wait(timeout=60)
