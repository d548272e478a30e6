"""What the learning curves start from: one model for all of them, a teacher, pairs of answers. Each
is made when it is first asked for, and kept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from benchmarks import quickstart
from relax_events.config import RunConfig, load_run_config
from relax_events.data.rendering import PromptRenderer
from relax_events.data.rows import PromptRow
from relax_events.data.sources import open_stream
from relax_events.engines.protocol import GenerationRequest, SampleRequest
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.session.defaults import resolve_defaults

PLACE = "{materials}"
PREPARE_SECONDS = 900.0
NUM_PROMPTS = 4096
TEACHER = ("sft_warmup.steps=1000", "sft_warmup.target_loss=0.02")
"""A start so long that nearly all of the teacher's answers are right."""


def provide(settings: Iterable[str], folder: Path) -> list[str]:
    """Replace `{materials}` in settings by a folder, and make what they name there.

    Raises:
        CalledProcessError: A model could not be made; its output is above.
    """
    setting_list = list(settings)
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in MAKERS.items():
        if (
            any(f"{PLACE}/{name}" in setting for setting in setting_list)
            and not (folder / name).exists()
        ):
            make(folder / name)
    return [setting.replace(PLACE, str(folder)) for setting in setting_list]


def make_model(path: Path, overrides: Iterable[str] = ()) -> None:
    """Make the quickstart's model, with its supervised start."""
    command = [
        sys.executable,
        "-m",
        "relax_events.cli",
        "models",
        "prepare",
        str(quickstart.CONFIG),
        f"model.path={path}",
        *overrides,
    ]
    subprocess.run(command, check=True, timeout=PREPARE_SECONDS, stdout=subprocess.DEVNULL)


def make_teacher(path: Path) -> None:
    """Make the same model with a longer start."""
    make_model(path, TEACHER)


def make_pairs(path: Path) -> None:
    """Write prompts of the quickstart, each with the right answer and a wrong one that the starting
    model gave itself."""
    config, _ = resolve_defaults(
        load_run_config(
            quickstart.CONFIG,
            [f"model.path={path.parent / 'model'}", "model.device=cpu"],
            environment={},
        )
    )
    stream = open_stream(config.data, seed=0)
    rows = [stream[number] for number in range(NUM_PROMPTS)]
    pairs = []
    for row, response in zip(rows, sampled_responses(config, rows), strict=True):
        if response.strip() not in ("", row.answer):
            prompt = [{"role": message.role, "content": message.text} for message in row.messages]
            pairs.append({"prompt": prompt, "chosen": row.answer, "rejected": response})
    draft = path.with_suffix(".draft")
    draft.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    draft.rename(path)


def sampled_responses(config: RunConfig, rows: Sequence[PromptRow]) -> list[str]:
    """Let the model of a run file answer each prompt once, in the order of the prompts."""
    renderer = PromptRenderer.from_folder(config.model.path, config.data)
    engine = TransformersEngine(config.model.path, config=config.engine, model=config.model)
    none, no_logprobs = np.empty(0, np.int32), np.empty(0, np.float32)
    for number, row in enumerate(rows):
        sample = SampleRequest(
            sample_id=str(number), seed=number, tokens=none, logprobs=no_logprobs, segments=()
        )
        request = GenerationRequest(
            prompt_group_id=str(number),
            prompt_tokens=renderer.prompt_tokens(row.messages),
            samples=(sample,),
            sampling=config.engine.sampling,
            stop_token_ids=renderer.stop_token_ids,
        )
        engine.submit(request)
    answers: dict[int, str] = {}
    while engine.num_running:
        answers |= {
            int(sample.sample_id): renderer.completion_text(sample.tokens)
            for sample in engine.poll(timeout_seconds=1.0)
        }
    engine.close()
    return [answers[number] for number in range(len(rows))]


MAKERS: dict[str, Callable[[Path], None]] = {
    "model": make_model,
    "teacher": make_teacher,
    "pairs.jsonl": make_pairs,
}
