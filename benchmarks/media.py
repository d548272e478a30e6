"""How many pictures, seconds of sound and frames of clips reach all roles in a second; and what new
media cost the engine that answers about others.

python -m benchmarks.media
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

from benchmarks import report
from relax_events.config import EngineConfig, MediaConfig, ModelConfig, RunConfig, SamplingConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import GenerationRequest, SampleRequest
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.events.parts import ChatMessage, ContentPart, MediaRef, Modality
from relax_events.examples.audio import encode_wav
from relax_events.examples.tiny_models import make_tiny
from relax_events.media.decoder_child import decode
from relax_events.media.items import MediaItem
from relax_events.media.library import MediaLibrary
from relax_events.media.token_layout import MediaLayout

NUM_ROLES, SAMPLES_PER_PROMPT = 4, 8
"""Engine, reference, actor-forward and trainer are shown each piece; the prompter checks it
before."""
NUM_PICTURES, NUM_SOUNDS, NUM_CLIPS = 48, 24, 12
PICTURE_SIZE, CLIP_SIZE = (640, 480), (320, 240)
SECONDS, CLIP_RATE, SOUND_RATE = 10, 24, 48_000
NUM_ROUNDS = 3
NUM_GROUPS, NEW_TOKENS = 10, 32
MEDIA = MediaConfig(image_max_token_num=256, video_min_token_num=16, video_max_token_num=64)
UNITS = {
    Modality.IMAGE: "pictures",
    Modality.AUDIO: "seconds of sound",
    Modality.VIDEO: "frames of clips",
}
WAIT_SECONDS = 60.0
QUESTION = f"""\
{NUM_PICTURES} pictures (JPEG, {PICTURE_SIZE[0]} x {PICTURE_SIZE[1]}), {NUM_SOUNDS} sounds (WAV, {SECONDS} s at {SOUND_RATE // 1000} kHz) and
{NUM_CLIPS} clips (MPEG-4, {CLIP_SIZE[0]} x {CLIP_SIZE[1]}, {SECONDS} s at {CLIP_RATE} a second, of which the model is shown 20 frames), each
asked about in one prompt group of {SAMPLES_PER_PROMPT} samples. Ours: the prompter inspects a file, decodes it in a process that can be ended, and
stores it; {NUM_ROLES} roles read the machine's cache, each once for all samples. Naive: each of the roles decodes the file for each sample, in its
own process, by the same functions, unchecked. Seconds are of processor time, that of child processes included; medians of {NUM_ROUNDS}
rounds, sides in turn.

Then the engine answers {NUM_GROUPS} prompt groups about a clip each ({SAMPLES_PER_PROMPT} samples of {NEW_TOKENS} tokens, Qwen3-Omni's thinker of
width 64): once all clips are in its memory, and once a prompter in another process checks and decodes them meanwhile. Seconds are those of the
clock."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A file of the benchmark; `amount` is in the units of its modality."""

    modality: Modality
    data: bytes
    amount: float

    def item(self, number: int) -> MediaItem:
        """Name it as a row does."""
        return MediaItem(self.modality, self.data, f"rows:{self.modality.value}/{number}")


def picture(generator: np.random.Generator) -> Piece:
    """Draw coarse noise."""
    file = BytesIO()
    Image.fromarray(generator.integers(0, 255, (15, 20, 3)).astype(np.uint8)).resize(
        PICTURE_SIZE
    ).save(file, "JPEG")
    return Piece(Modality.IMAGE, file.getvalue(), 1)


def sound(generator: np.random.Generator) -> Piece:
    """Make noise."""
    return Piece(
        Modality.AUDIO,
        encode_wav(0.1 * generator.standard_normal(SECONDS * SOUND_RATE), rate_hertz=SOUND_RATE),
        SECONDS,
    )


def clip(generator: np.random.Generator) -> Piece:
    """Let a coarse pattern move."""
    import av

    file, still = BytesIO(), generator.integers(0, 255, (30, 40, 3)).astype(np.uint8)
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=CLIP_RATE)
        stream.width, stream.height, stream.pix_fmt = *CLIP_SIZE, "yuv420p"
        for number in range(SECONDS * CLIP_RATE):
            frame = np.asarray(
                Image.fromarray(np.roll(still, number // 6, axis=1)).resize(CLIP_SIZE)
            )
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return Piece(Modality.VIDEO, file.getvalue(), MEDIA.video_fps * SECONDS)


def pieces_of(modality: Modality, seed: int) -> list[Piece]:
    """Make all files of a kind."""
    make, count = {
        Modality.IMAGE: (picture, NUM_PICTURES),
        Modality.AUDIO: (sound, NUM_SOUNDS),
        Modality.VIDEO: (clip, NUM_CLIPS),
    }[modality]
    generator = np.random.default_rng(seed)
    return [make(generator) for _ in range(count)]


def run_in(folder: Path, model: Path) -> RunConfig:
    """Return the run file of a run in a folder of its own: nothing is cached yet."""
    tree = {
        "run": {"id": "media", "directory": folder},
        "model": {"path": model, "dtype": "float32", "device": "cpu", "media": MEDIA.model_dump()},
    }
    return RunConfig.model_validate({**tree, "data": {"source": "synthetic_images:colour"}})


def processor_seconds() -> float:
    """Return what this process and its living children have used."""
    used = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        times = process.cpu_times()
        used += times.user + times.system
    return used


def spent(work: Callable[[], object]) -> float:
    """Return the processor seconds of a call whose child processes were there before and live
    on."""
    began = processor_seconds()
    work()
    return processor_seconds() - began


def ours(pieces: Sequence[Piece], folder: Path, model: Path) -> float:
    """Return the seconds until all roles have all pieces; the decoding child has started before."""
    config = run_in(folder, model)
    prompter, roles = MediaLibrary(config), [MediaLibrary(config) for _ in range(NUM_ROLES)]
    prompter.add(picture(np.random.default_rng(1)).item(-1))

    def serve() -> None:
        for number, piece in enumerate(pieces):
            reference = prompter.add(piece.item(number))
            for role in roles:
                role.load(reference)

    return spent(serve)


def naive(pieces: Sequence[Piece], folder: Path, model: Path) -> float:
    """Return the seconds of decoding every piece for every sample in every role, reckoned from one
    sample in one role."""
    config, layout = run_in(folder, model), MediaLayout.from_folder(model, MEDIA)
    library = MediaLibrary(config)
    references = [library.add(piece.item(number)) for number, piece in enumerate(pieces)]
    assert layout is not None
    plans = [layout.preprocessor_for(reference).plan(reference) for reference in references]

    def decode_all() -> None:
        for piece, plan in zip(pieces, plans, strict=True):
            decode(piece.data, piece.modality, plan=plan, limits=MEDIA, location="a file")

    return spent(decode_all) * NUM_ROLES * SAMPLES_PER_PROMPT


def rates(modality: Modality, model: Path) -> dict[str, list[float]]:
    """Return the rates of both sides by round."""
    pieces = pieces_of(modality, seed=0)
    amount = sum(piece.amount for piece in pieces)
    found: dict[str, list[float]] = {"ours": [], "naive": []}
    for _ in range(NUM_ROUNDS):
        for name, side in (("ours", ours), ("naive", naive)):
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(amount / side(pieces, Path(folder), model))
    return found


def prompt(folder: Path, model: Path, files: Sequence[bytes], out: Queue[MediaRef]) -> None:
    """Be the prompter: check, decode and store clips, one after the other."""
    library = MediaLibrary(run_in(folder, model))
    for number, data in enumerate(files):
        out.put(library.add(Piece(Modality.VIDEO, data, 0).item(number)))


def references_of(pieces: Sequence[Piece], folder: Path, model: Path) -> Iterator[MediaRef]:
    """Give clips as a prompter in another process has them ready."""
    context = multiprocessing.get_context("spawn")
    ready: Queue[MediaRef] = context.Queue()
    prompter = context.Process(
        target=prompt, args=(folder, model, [piece.data for piece in pieces], ready)
    )
    prompter.start()
    try:
        yield from (ready.get(timeout=WAIT_SECONDS) for _ in pieces)
        prompter.join(WAIT_SECONDS)
    finally:
        prompter.kill()


def answered(
    engine: TransformersEngine,
    references: Iterator[MediaRef],
    library: MediaLibrary,
    renderer: PromptRenderer,
) -> float:
    """Let the engine answer about clips, at most four prompt groups at a time; return tokens per
    second from the first clip on."""
    began, num_tokens, number = 0.0, 0, 0
    waiting = iter(references)
    more = True
    while more or engine.num_running:
        while more and engine.num_running < 4 * SAMPLES_PER_PROMPT:
            reference = next(waiting, None)
            began = began or time.perf_counter()
            if more := reference is not None:
                engine.submit(request(number, reference, library, renderer))
                number += 1
        num_tokens += sum(
            len(sample.tokens) for sample in engine.poll(timeout_seconds=WAIT_SECONDS)
        )
    return num_tokens / (time.perf_counter() - began)


def request(
    number: int, reference: MediaRef, library: MediaLibrary, renderer: PromptRenderer
) -> GenerationRequest:
    """Ask about a clip."""
    message = ChatMessage(
        "user",
        [ContentPart(Modality.VIDEO, media=reference), ContentPart(Modality.TEXT, "What is it?")],
    )
    nothing: dict[str, Any] = {
        "tokens": np.empty(0, np.int32),
        "logprobs": np.empty(0, np.float32),
        "segments": (),
    }
    return GenerationRequest(
        prompt_group_id=f"g{number}",
        prompt_tokens=renderer.prompt_tokens([message]),
        samples=tuple(
            SampleRequest(sample_id=f"g{number}/{index}", seed=index, **nothing)
            for index in range(SAMPLES_PER_PROMPT)
        ),
        sampling=SamplingConfig(max_new_tokens=NEW_TOKENS),
        stop_token_ids=(),
        media=(library.load(reference),),
    )


def engine_rates(model: Path) -> dict[str, list[float]]:
    """Return the engine's tokens per second by round, beside a prompter at work and without one."""
    engine = TransformersEngine(
        model,
        config=EngineConfig(threads=1, max_context_tokens=2048),
        model=ModelConfig(dtype="float32", path=model, device="cpu", media=MEDIA),
    )
    found: dict[str, list[float]] = {
        "clips in memory": [],
        "clips checked and decoded meanwhile": [],
    }
    for seed in range(NUM_ROUNDS):
        pieces = [clip(np.random.default_rng((seed, number))) for number in range(NUM_GROUPS)]
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            config = run_in(folder, model)
            library, renderer = (
                MediaLibrary(config),
                PromptRenderer.from_folder(model, config.data, media=MEDIA),
            )
            beside = answered(engine, references_of(pieces, folder, model), library, renderer)
            known = [library.add(piece.item(number)) for number, piece in enumerate(pieces)]
            found["clips in memory"].append(answered(engine, iter(known), library, renderer))
            found["clips checked and decoded meanwhile"].append(beside)
    engine.close()
    return found


def decoding_row(modality: Modality, found: dict[str, list[float]]) -> dict[str, str]:
    """Lay out the rates of a kind."""
    ratio = statistics.median(
        one / other for one, other in zip(found["ours"], found["naive"], strict=True)
    )
    medians = {name: f"{statistics.median(values):,.0f}" for name, values in found.items()}
    return {"a second of one core": UNITS[modality], **medians, "ours over naive": f"{ratio:.1f}"}


def main() -> None:
    """Measure and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny(
            Path(folder) / "model",
            corpus=["What is it?"],
            family="qwen3_omni_moe_thinker",
            hidden_size=64,
        )
        found = {modality: rates(modality, model) for modality in UNITS}
        tokens = engine_rates(model)
    alone, beside = tokens.values()
    kept = statistics.median(one / other for one, other in zip(beside, alone, strict=True))
    report.write(
        "media",
        title="Decoding pictures, sounds and clips",
        question=QUESTION,
        command="python -m benchmarks.media",
        tables={
            "To all roles and samples": [
                decoding_row(modality, one) for modality, one in found.items()
            ],
            "The engine": [
                {"side": name, "tokens/s": f"{statistics.median(values):,.0f}"}
                for name, values in tokens.items()
            ],
        },
        conclusion=f"While new clips are checked and decoded the engine keeps {kept:.0%} of its rate "
        "(median of the paired ratios; "
        f"{', '.join(f'{one / other:.2f}' for one, other in zip(beside, alone, strict=True))}).",
        data={"rates": found, "tokens_per_second": tokens},
    )


if __name__ == "__main__":
    main()
