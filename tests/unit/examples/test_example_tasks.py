"""The tasks of the examples: games, searches, repairs, tools and their rewards."""

from __future__ import annotations

import math
from io import BytesIO
from typing import Any

import numpy as np
import orjson
import pytest
from PIL import Image

from relax_events.config import DataConfig
from relax_events.data.sources import open_source
from relax_events.environments.tool_calls import read_tool_calls
from relax_events.errors import ConfigError
from relax_events.packages.examples.deepeyes import deepeyes, score, zoom_in
from relax_events.packages.examples.nim import best_move, score_game, take
from relax_events.packages.examples.repair import BODIES, passes, write_test
from relax_events.packages.examples.retrieval import BM25, read_corpus, search, write_call

TASK = {"answer": "", "prompt": ""}


def play(stones: int, *moves: str) -> dict[str, Any]:
    turns: list[dict[str, str]] = []
    for move in moves:
        turns += [{"role": "assistant", "content": move}, {"role": "user", "content": "left"}]
    metadata = {"options": {"stones": stones}}
    return score_game(moves[-1], metadata=metadata, turns=turns[:-1], **TASK)


def wins(stones: int) -> bool:
    """Whether the player to move can win, by trying every game."""
    return any(not wins(stones - taken) for taken in (1, 2, 3) if taken <= stones)


def test_best_move_of_nim_is_that_of_an_exhaustive_search() -> None:
    for stones in range(1, 20):
        move = best_move(stones)
        assert bool(move) == wins(stones)
        assert not move or not wins(stones - move)


def test_reward_of_each_turn_of_nim_adds_up_to_its_players_result() -> None:
    won = play(5, "1", "2", "2")  # the first player takes the last stone
    assert won["turn_rewards"] == [2.0, -2.0, 1.0]
    assert np.cumsum(won["turn_rewards"][::-1]).tolist() == [1.0, -1.0, 1.0]
    assert won["best_moves"] == 1.0
    assert play(5, "1", "9")["turn_rewards"] == [2.0, -1.0]
    assert play(5, "2", "3")["best_moves"] == 0.5
    assert take(2, "3") == (2, True, False)


def test_bm25_score_is_that_of_the_formula_by_hand() -> None:
    index = BM25(["a b", "a a c", "d"])
    norm = 1.2 * (1 - 0.75 + 0.75 * 3 / 2)
    rarity = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    assert index.score("A!", 1) == pytest.approx(rarity * 2 * 2.2 / (2 + norm))
    assert index.search("d") == "d"
    assert index.search("x") is None


def test_two_searches_answer_every_question_of_the_retrieval_task() -> None:
    source = open_source(DataConfig(source="synthetic_text:multi_hop", num_problems=40), seed=3)
    corpus = read_corpus()
    for index in range(source.num_rows):
        row = source.row(index)
        person = row.messages[-1].text.split()[-1].rstrip("?")
        city = search(write_call(person))
        assert city is not None
        assert city.role == "tool"
        country = search(write_call(city.text.rstrip(".").split()[-1]))
        assert country is not None
        assert country.text.endswith(f"is in {row.answer}.")
        assert row.answer not in city.text
        assert {city.text, country.text} <= set(corpus)
    assert search("peru") is None
    assert search("<tool_call>{</tool_call>") is not None


def test_hidden_tests_of_a_repair_pass_for_the_right_body_alone() -> None:
    source = open_source(DataConfig(source="synthetic_text:repair", num_problems=30), seed=1)
    for index in range(source.num_rows):
        row = source.row(index)
        wanted = row.messages[-1].text.removeprefix("f must return ").partition(":")[0]
        tests = orjson.loads(row.answer)["tests"]
        metadata = orjson.loads(row.metadata)
        assert len(tests) == 2
        assert all(passes(BODIES[wanted], call) for test in tests for call in test.splitlines())
        assert "tests" not in metadata
        broken = row.messages[-1].text.partition("```python\n")[2].removesuffix("```")
        assert metadata["files"] == {"f.py": broken}
        assert len(metadata["turns"]) == len(metadata["replies"]) + 1


def test_written_tests_of_repairs_hold_in_python() -> None:
    tests = [
        f"def f(a, b):\n    return {body}\n{write_test(body, 7, 3)}" for body in BODIES.values()
    ]
    exec("\n".join(tests), {})


def test_text_source_is_the_same_for_the_same_seed_and_rejects_what_it_does_not_know() -> None:
    config = DataConfig(source="synthetic_text:nim", num_problems=5)
    rows = [open_source(config, seed=2).row(3) for _ in range(2)]
    assert rows[0] == rows[1]
    assert rows[0] != open_source(config, seed=3).row(3)
    with pytest.raises(ConfigError, match="has no task 'chess'"):
        open_source(DataConfig(source="synthetic_text:chess"), seed=0)
    with pytest.raises(ConfigError, match=r"takes no data\.options"):
        open_source(config.model_copy(update={"options": {"a": 1}}), seed=0)


def image_file() -> bytes:
    pixels = np.arange(100 * 80 * 3, dtype=np.uint32).reshape(80, 100, 3) % 251
    file = BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def test_zoom_of_deepeyes_cuts_the_box_and_widens_small_ones() -> None:
    whole = np.asarray(Image.open(BytesIO(image_file())))
    cut = np.asarray(Image.open(BytesIO(zoom_in(image_file(), [500, 0, 1000, 500]))))
    np.testing.assert_array_equal(cut, whole[:40, 50:])
    assert Image.open(BytesIO(zoom_in(image_file(), [0, 0, 10, 10]))).size == (28, 28)
    assert Image.open(BytesIO(zoom_in(image_file(), [490, 0, 510, 1000]))).size == (28, 80)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ('{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [9, 0, 1, 5]}}', "bbox_2d must"),
        ('{"name": "image_rotate_tool", "arguments": {"angle": "up"}}', "angle must be"),
        ('{"name": "image_sharpen_tool", "arguments": {}}', "there is no tool"),
        ("{", "is not JSON"),
        ("[]", "has no name"),
        ('{"name": "a", "arguments": 3}', "are no object"),
    ],
)
def test_wrong_tool_call_of_deepeyes_is_answered(call: str, said: str) -> None:
    reply = deepeyes(f"<tool_call>{call}</tool_call>", metadata={}, files=[image_file()])
    assert reply is not None
    assert said in reply.text
    assert not reply.media


def test_last_tool_call_of_deepeyes_is_run_and_an_answer_ends_the_sample() -> None:
    zoom = '{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0, 0, 500, 500]}}'
    turn = '{"name": "image_rotate_tool", "arguments": {"angle": 90}}'
    calls = f"<tool_call>{zoom}</tool_call> <tool_call>{turn}</tool_call>"
    reply = deepeyes(calls, metadata={}, files=[image_file()])
    assert reply is not None
    image = reply.media["image"][0]
    assert isinstance(image, bytes)
    assert Image.open(BytesIO(image)).size == (80, 100)
    assert deepeyes("<answer>red</answer>", metadata={}, files=[image_file()]) is None
    assert len(read_tool_calls(calls)) == 2


@pytest.mark.parametrize(
    ("completion", "uses_tool", "reward"),
    [
        ("<answer>Red</answer>", True, 2.0),
        ("<answer>red</answer>", False, 0.8),
        ("<answer>blue</answer>", True, 0.0),
        ("red", True, -0.2),
        (f"<answer>{'x' * 300}</answer>", False, -0.2),
    ],
)
def test_reward_of_deepeyes_has_the_papers_weights(
    completion: str, uses_tool: bool, reward: float
) -> None:
    call = {"role": "assistant", "content": "<tool_call>...</tool_call>"}
    shown = [call, {"role": "user", "content": ""}] if uses_tool else []
    turns = [*shown, {"role": "assistant", "content": completion}]
    given = score(completion, answer="red", metadata={}, prompt="", turns=turns)
    assert given["reward"] == pytest.approx(reward)
