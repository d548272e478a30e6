"""The run files of the paper's tasks read rows with the columns of the real datasets, and reward
their answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet
import pytest

from relax_events.config import RunConfig, load_run_config
from relax_events.data.rows import PromptRow
from relax_events.data.sources import open_source
from relax_events.events.parts import ChatMessage, Modality
from relax_events.rewards.registry import load_reward
from tests.unit.image_model import image_file
from tests.unit.video_and_audio import audio_file

CONFIGS = Path(__file__).parents[3] / "configs"
DAPO: dict[str, Any] = {
    "prompt": [
        {
            "content": "Solve it. The last line is Answer: $Answer. What is 6 times 7?",
            "role": "user",
        }
    ],
    "label": "42",
}
OPEN_R1 = {
    "problem": "In the image, what is the angle at A?\nChoices:\n(A) 30\n(B) 60",
    "solution": "<think>The triangle is equilateral.</think>\n\n<answer>B</answer>",
    "original_question": "what is the angle at A?",
    "original_answer": "The answer is B",
}
AVQA = {
    "problem_id": 3,
    "problem": "What is the sound in the video?",
    "data_type": "image_audio",
    "problem_type": "multiple choice",
    "options": ["A. rain", "B. a motorboat", "C. a train", "D. wind"],
    "solution": "<answer>B</answer>",
    "path": {"image": "images/sample_3.jpg", "audio": "audios/sample_3.wav"},
    "data_source": "OmniInstruct_v1-AVQA",
}


def config_of(name: str, *overrides: str) -> RunConfig:
    return load_run_config(CONFIGS / f"{name}.toml", overrides, environment={})


def first_row(config: RunConfig) -> PromptRow:
    source = open_source(config.data, seed=0)
    assert source.num_rows == 1
    return source.row(0)


def layout(message: ChatMessage) -> list[Modality | str]:
    """Return a message's parts in order: texts, and the modalities of the media between them."""
    return [part.text or "" if part.kind is Modality.TEXT else part.kind for part in message.parts]


def reward_of(config: RunConfig, row: PromptRow, completion: str) -> Any:
    function: Any = load_reward(config.reward.function).function
    return function(completion, answer=row.answer, metadata=orjson.loads(row.metadata), prompt="")


def test_dapo_math_takes_messages_and_the_label(tmp_path: Path) -> None:
    (tmp_path / "dapo.jsonl").write_bytes(orjson.dumps(DAPO) + b"\n")
    config = config_of("dapo-math", f"data.source=jsonl:{tmp_path / 'dapo.jsonl'}")
    row = first_row(config)
    assert [(message.role, message.text) for message in row.messages] == [
        ("user", DAPO["prompt"][0]["content"])
    ]
    assert (row.answer, orjson.loads(row.metadata)) == ("42", {})
    assert [
        reward_of(config, row, f"So it is.\nAnswer: {given}")["reward"] for given in ("42", "41")
    ] == [1.0, -1.0]


def test_open_r1_puts_the_image_before_the_question(tmp_path: Path) -> None:
    image = image_file(64, 48)
    rows = [OPEN_R1 | {"image": {"bytes": image, "path": None}}]
    (tmp_path / "data").mkdir()
    pa.parquet.write_table(
        pa.Table.from_pylist(rows), tmp_path / "data" / "train-00000-of-00001.parquet"
    )
    config = config_of("open-r1-vl", f"data.source=parquet:{tmp_path}")
    row = first_row(config)
    system, asked = row.messages
    assert (system.role, asked.role, layout(asked)) == (
        "system",
        "user",
        [Modality.IMAGE, OPEN_R1["problem"]],
    )
    assert [item.read(config.model.media) for item in row.media] == [image]
    assert orjson.loads(row.metadata) == {"original_answer": "The answer is B"}
    rewards = {
        completion: reward_of(config, row, completion)
        for completion in (
            "<think>equal sides</think><answer>B</answer>",
            "<think>equal sides</think><answer>A</answer>",
            "it is <answer>B</answer>",
            "B",
        )
    }
    assert [(one["accuracy"], one["format"]) for one in rewards.values()] == [
        (1.0, 1.0),
        (0.0, 1.0),
        (1.0, 0.0),
        (0.0, 0.0),
    ]


def test_avqa_puts_image_and_audio_before_question_and_options(tmp_path: Path) -> None:
    files = {
        "images/sample_3.jpg": image_file(64, 48, kind="JPEG"),
        "audios/sample_3.wav": audio_file(0.5),
    }
    for name, data in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(data)
    (tmp_path / "train.jsonl").write_bytes(orjson.dumps(AVQA) + b"\n")
    config = config_of(
        "avqa-omni", f"data.source=jsonl:{tmp_path / 'train.jsonl'}", f"data.media_root={tmp_path}"
    )
    row = first_row(config)
    asked = f"{AVQA['problem']}\nOptions:\nA. rain\nB. a motorboat\nC. a train\nD. wind"
    assert layout(row.messages[1]) == [Modality.IMAGE, Modality.AUDIO, asked]
    assert [item.read(config.model.media) for item in row.media] == list(files.values())
    assert orjson.loads(row.metadata) == {"data_source": "OmniInstruct_v1-AVQA"}
    given = ("<answer>B</answer>", "<answer>C</answer>", "B")
    assert [reward_of(config, row, f"<think>an engine</think>{one}") for one in given] == [1, 0, 0]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (
            {"problem": None},
            r"problem is null; data.prompt_template accepts strings, numbers and lists of strings",
        ),
        ({"options": [1, 2]}, r"options is a list; data.prompt_template accepts"),
        ({"problem": "is <image> there?"}, r"the prompt has 2 <image> and the row has 1"),
    ],
)
def test_row_that_the_prompt_template_rejects_is_invalid(
    tmp_path: Path, changes: dict[str, Any], error: str
) -> None:
    (tmp_path / "train.jsonl").write_bytes(orjson.dumps(AVQA | changes) + b"\n")
    config = config_of(
        "avqa-omni",
        f"data.source=jsonl:{tmp_path / 'train.jsonl'}",
        f"data.media_root={tmp_path}",
        "data.max_invalid_rows=0",
    )
    with pytest.raises(Exception, match=error):
        open_source(config.data, seed=0)
