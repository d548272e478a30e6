"""Generated problems of reasoning-gym and their verifier."""

import json
import sys

import pytest

from relax_events.config import DataConfig
from relax_events.data.sources import open_source
from relax_events.errors import ConfigError, EnvironmentProblem, RewardError
from relax_events.packages.verifiers.reasoning_gym import reasoning_gym

SPELL = DataConfig(
    source="reasoning_gym:spell_backward",
    num_problems=50,
    options={"min_word_len": 3, "max_word_len": 4},
)


def test_generated_rows_follow_the_seed() -> None:
    first, again, other = (open_source(SPELL, seed=seed) for seed in (1, 1, 2))
    assert first.num_rows == 50
    assert [first.row(index) for index in range(50)] == [again.row(index) for index in range(50)]
    assert first.row(0) != other.row(0)


def test_generated_rows_of_neighbouring_seeds_do_not_overlap() -> None:
    one, two = (open_source(SPELL, seed=seed) for seed in (1, 2))
    questions = [
        {source.row(index).messages[0].text for index in range(50)} for source in (one, two)
    ]
    assert len(questions[0] & questions[1]) < 5


def test_generated_row_holds_question_answer_and_what_the_verifier_needs() -> None:
    row = open_source(SPELL, seed=0).row(7)
    word = row.messages[0].text.rsplit(" ", 1)[-1]
    assert 3 <= len(word) <= 4
    assert row.answer == word[::-1]
    assert json.loads(row.metadata)["task"] == "spell_backward"


def test_verifier_scores_with_the_metadata_alone() -> None:
    row = open_source(SPELL, seed=0).row(7)
    metadata = json.loads(row.metadata)
    assert reasoning_gym(row.answer, answer="", metadata=metadata, prompt="") == 1.0
    assert reasoning_gym(f"  {row.answer}\n", answer="", metadata=metadata, prompt="") == 1.0
    assert reasoning_gym("", answer="", metadata=metadata, prompt="") == 0.0


def test_verifier_rejects_metadata_from_elsewhere() -> None:
    with pytest.raises(
        ValueError,
        match=r"metadata lacks entry, options, task; this reward needs data.source = 'reasoning_gym:<task>'",
    ):
        reasoning_gym("x", answer="x", metadata={}, prompt="")


@pytest.mark.parametrize("key", ["task", "options", "entry"])
def test_verifier_rejects_metadata_of_another_type(key: str) -> None:
    metadata = json.loads(open_source(SPELL, seed=0).row(7).metadata)
    with pytest.raises(ValueError, match=f"list as {key}, and a 'reasoning_gym:' source writes"):
        reasoning_gym("x", answer="x", metadata=metadata | {key: []}, prompt="")


def test_verifier_rejects_a_completion_beyond_its_bound() -> None:
    metadata = json.loads(open_source(SPELL, seed=0).row(7).metadata)
    with pytest.raises(RewardError, match=r"has 1048577 characters.*at most 1048576"):
        reasoning_gym("x" * ((1 << 20) + 1), answer="x", metadata=metadata, prompt="")


@pytest.mark.parametrize(
    "task",
    [
        "chain_sum",
        "number_sorting",
        "spiral_matrix",
        "calendar_arithmetic",
        "time_intervals",
        "countdown",
        "zebra_puzzles",
    ],
)
def test_verifier_gives_full_reward_to_reference_answer_and_json_metadata(task: str) -> None:
    source = open_source(DataConfig(source=f"reasoning_gym:{task}", num_problems=3), seed=5)
    for index in range(source.num_rows):
        row = source.row(index)
        assert (
            reasoning_gym(
                row.answer, answer=row.answer, metadata=json.loads(row.metadata), prompt=""
            )
            == 1.0
        )


def test_generated_source_names_the_tasks_when_one_is_unknown() -> None:
    with pytest.raises(
        ConfigError, match=r"reasoning-gym has no task 'spel'; .* one of .*spell_backward"
    ):
        open_source(DataConfig(source="reasoning_gym:spel"), seed=0)


@pytest.mark.parametrize("options", [{"min_len": 3}, {"min_word_len": 5, "max_word_len": 4}])
def test_generated_source_names_options_that_the_task_rejects(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"task 'spell_backward' rejects data.options"):
        open_source(DataConfig(source="reasoning_gym:spell_backward", options=options), seed=0)


def test_generated_source_has_no_rows_beyond_its_size() -> None:
    with pytest.raises(IndexError, match=r"data.num_problems is 50"):
        open_source(SPELL, seed=0).row(50)


def test_generated_source_names_the_extra_when_the_package_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        EnvironmentProblem,
        match=r"need the package reasoning-gym .*; install relax-events\[tasks\]",
    ):
        open_source(SPELL, seed=0)
