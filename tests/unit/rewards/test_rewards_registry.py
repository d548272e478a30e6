"""The reward registry: built-in functions, functions of a user's file, and valid return values."""

import asyncio
import hashlib
import json
import math
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_events.errors import ConfigError
from relax_events.packages import verifiers
from relax_events.rewards.registry import describe_reward, load_reward, reward_names
from relax_events.rewards.scores import Score, parse_score


def call(function: Any, completion: str, answer: str) -> float:
    return function(completion, answer=answer, metadata={}, prompt="")


def digest_of(function: str, files: dict[str, str], **settings: Any) -> str:
    """Compute a version as the documentation says it is made."""
    facts = {
        "files": files,
        "function": function,
        "options": {},
        "packages": {},
        "weights": {},
    } | settings
    return hashlib.sha256(
        json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


SCORE = (
    "def score(completion, *, answer, metadata, prompt, scale: float = 1.0):\n    return "
    "len(completion) * scale\n"
)


def test_reward_registry_loads_a_function_with_its_options(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SCORE)
    assert call(load_reward(f"{file}:score").function, "four", "") == 4
    assert call(load_reward(f"{file}:score", options={"scale": 0.5}).function, "four", "") == 2


def test_reward_digest_covers_the_functions_files_and_settings(tmp_path: Path) -> None:
    file, sibling = tmp_path / "versioned.py", tmp_path / "used_sibling.py"
    sibling.write_text("def length(text):\n    return len(text)\n")
    file.write_text("import json\nfrom used_sibling import length\n" + SCORE)
    files = {"used_sibling.py": sha256(sibling), "versioned.py": sha256(file)}
    plain = load_reward(f"{file}:score")
    assert plain.digest == digest_of("score", files)
    assert load_reward(f"{file}:score", options={"scale": 2}).digest == digest_of(
        "score", files, options={"scale": 2.0}
    )
    assert load_reward(f"{file}:score", weights={"a": 0.5}).digest == digest_of(
        "score", files, weights={"a": 0.5}
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    file.rename(elsewhere / "versioned.py")
    assert load_reward(f"{elsewhere / 'versioned.py'}:score").digest == digest_of(
        "score", {"versioned.py": files["versioned.py"]}
    )


def test_built_in_reward_digest_covers_the_packages_it_depends_on() -> None:
    folder = Path(verifiers.__path__[0])
    names = (
        "answer_extraction",
        "ifbench_forms",
        "ifbench_words",
        "ifeval",
        "ifeval_instructions",
    )
    packages = {
        "langdetect": version("langdetect"),
        **{name: version(name) if find_spec(name) else "" for name in ("syllapy", "textblob")},
    }
    files = {f"{name}.py": sha256(folder / f"{name}.py") for name in names}
    assert load_reward("ifeval").digest == digest_of("ifeval", files, packages=packages)


@pytest.mark.parametrize("name", reward_names())
def test_each_failure_that_a_page_shows_is_a_whole_sentence(name: str) -> None:
    for failure in describe_reward(name).failures:
        assert re.fullmatch(r"[A-Z].*\.", failure), failure
        assert not re.search(r"  |\b\w+(Error|Problem): ", failure), failure


def test_failures_of_a_user_defined_reward_keep_their_further_lines(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def score(completion, *, answer):\n"
        '    """Score.\n\n    Raises:\n        ValueError: It is too long,\n            or too short.\n'
        '        KeyError: There is none.\n\n    Source: none.\n    """\n'
    )
    assert describe_reward(f"{file}:score").failures == [
        "It is too long, or too short.",
        "There is none.",
    ]


def test_reward_registry_lists_its_built_in_functions() -> None:
    wanted = {
        "exact_match",
        "gsm8k",
        "math",
        "deepscaler",
        "dapo_math",
        "gpqa",
        "multiple_choice",
        "f1",
        "ifeval",
        "openr1_multimodal",
        "code",
    }
    assert wanted <= set(reward_names())
    assert call(load_reward("exact_match").function, " cat", "cat") == 1.0
    assert load_reward("remote_group", options={"url": "http://localhost:1"}).takes_prompt_group


@pytest.mark.parametrize(
    ("definition", "named"),
    [
        ("def score(completion): return 1.0", ()),
        ("def score(completion, *, metadata): return 1.0", ("metadata",)),
        ("def score(completion, prompt, answer): return 1.0", ("answer", "prompt")),
        ("def score(completion, **given): return 1.0", ("answer", "metadata", "prompt")),
    ],
)
def test_reward_function_takes_only_the_arguments_that_it_names(
    tmp_path: Path, definition: str, named: tuple[str, ...]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(definition)
    assert load_reward(f"{file}:score").named_arguments == named


def test_function_of_trl_gets_lists_and_columns_by_their_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(prompts, completions, ground_truth, scale: float = 1.0, **columns):\n"
        "    return [prompts, completions, ground_truth, scale, columns]\n"
        "def only(completions, **columns): return [len(one) for one in completions]\n"
        "def column(completions, metadata, **_): return [one['a'] for one in metadata]\n"
        "async def later(completions, answer, **_): return answer\n"
    )
    loaded = load_reward(f"{file}:score", options={"scale": 2})
    assert (loaded.takes_prompt_group, loaded.optional_arguments) == (True, ("token_ids",))
    call = {
        "answer": "4",
        "metadata": {"ground_truth": 4, "level": None},
        "prompt": "2 + 2",
        "token_ids": [[1], [2, 3]],
    }
    assert set(loaded.named_arguments) | {"token_ids"} == set(call)
    assert loaded.function(["4", "5"], **call) == [
        ["2 + 2", "2 + 2"],
        ["4", "5"],
        [4, 4],
        2.0,
        {"answer": ["4", "4"], "level": [None, None], "completion_ids": [[1], [2, 3]]},
    ]
    assert load_reward(f"{file}:only").function(["", "abc"], **call) == [0, 3]
    assert load_reward(f"{file}:column").function(
        ["4"], **call | {"metadata": {"metadata": {"a": 1}}}
    ) == [1]
    later = load_reward(f"{file}:later")
    assert later.is_async
    assert asyncio.run(later.function(["a", "b"], **call)) == ["4", "4"]


@pytest.mark.parametrize(
    ("definition", "options", "text"),
    [
        (
            "def score(completion, *, anwser): pass",
            {},
            r"score needs anwser, which no call gives and reward.options does not set; .* as far as the function names them, answer, metadata, prompt, turns, token_ids, environment_rewards",
        ),
        (
            SCORE,
            {"scale": "much"},
            r"reward.options.scale: Input should be a valid number.* got 'much'; .*:score takes scale; set reward.options",
        ),
        (
            SCORE,
            {"scales": 1},
            r"reward.options.scales: Extra inputs are not permitted, got 1; .*:score takes scale",
        ),
        (SCORE.replace(" = 1.0", ""), {}, r"score needs scale, which no call gives"),
        (
            "def score(completions, ground_truth): pass",
            {},
            r"score needs ground_truth, .* read metadata\['ground_truth'\], or set data.answer_key",
        ),
        (
            "def score(prompts, completions): pass",
            {},
            "needs completions, .* the completion is the first parameter, of any name",
        ),
        (
            "def score(completions, scale: float = 1.0, **columns): pass",
            {"scale": "much"},
            r"reward.options.scale: Input should be a valid number",
        ),
        (
            "def score(completions, *, metadata, **columns): pass",
            {},
            r"score has a \*\* parameter, .* TRL's convention, which has no metadata; remove the",
        ),
        (
            "score = type('Score', (), {'__call__': lambda *a, **k: 1})()",
            {},
            "is a Score; it must be a function",
        ),
    ],
)
def test_reward_registry_explains_an_invalid_signature_or_option(
    tmp_path: Path, definition: str, options: dict[str, Any], text: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(definition)
    with pytest.raises(ConfigError, match=text):
        load_reward(f"{file}:score", options=options)


@pytest.mark.parametrize(
    ("source", "function", "text"),
    [
        (None, "score", "file .*mine.py does not exist; give path/to/file.py:function"),
        ("def other(): pass\n", "score", "has no function 'score', only other"),
        ("score = 3\n", "score", "has no function 'score', only none"),
        ("def score(:\n", "score", "mine.py has a syntax error in line 1"),
        (
            "import not_a_module\n",
            "score",
            "mine.py failed to load: ModuleNotFoundError: No module named 'not_a_module'",
        ),
        ("1 / 0\n", "score", "mine.py failed to load: ZeroDivisionError"),
    ],
)
def test_reward_registry_explains_why_a_file_cannot_be_loaded(
    tmp_path: Path, source: str | None, function: str, text: str
) -> None:
    file = tmp_path / "mine.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(ConfigError, match=text):
        load_reward(f"{file}:{function}")


@pytest.mark.parametrize("name", ["exact_mach", "mine.py", "mine.txt:score", "mine.py:"])
def test_reward_registry_lists_installed_rewards_for_an_unknown_name(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"reward.function = .* is not installed; installed are code, .*exact_match, f1, .*gsm8k",
    ):
        load_reward(name)


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (0.5, Score(0.5, {})),
        (True, Score(1.0, {})),
        (np.float32(0.25), Score(0.25, {})),
        ({"form": 0.25, "content": 0.5}, Score(0.75, {"form": 0.25, "content": 0.5})),
        ({"reward": 2, "content": 0.5}, Score(2.0, {"content": 0.5})),
    ],
)
def test_score_takes_numbers_and_components(value: Any, score: Score) -> None:
    assert parse_score(value) == score


@pytest.mark.parametrize("value", [None, "1", [1.0], {}, {"a": "1"}, {1: 1.0}, 1j])
def test_score_rejects_other_types(value: Any) -> None:
    with pytest.raises(TypeError, match=r"it must return a number or a dict of numbers"):
        parse_score(value)


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, -math.inf, 1e308, -1e308, 3.5e38, 10**400, np.float16("inf")),
        *({"a": math.nan}, {"reward": 1.0, "a": 1e308}, {"turn_rewards": [1e308, -1e308]}),
        {"a": 3e38, "b": 3e38},
    ],
)
def test_score_rejects_values_beyond_the_range_of_float32(value: Any) -> None:
    with pytest.raises(ValueError, match=r"rewards must be within \+-3.4e38"):
        parse_score(value)
    assert parse_score(-3.4e38) == Score(-3.4e38, {})


def test_score_weighs_components_when_weights_are_given() -> None:
    weights = {"form": 0.5, "content": 2.0}
    assert parse_score({"form": 1, "content": 0.25, "length": 9}, weights=weights) == Score(
        1.0, {"form": 1.0, "content": 0.25, "length": 9.0}
    )
    assert parse_score({"reward": 7, "form": 1, "content": 0}, weights=weights) == Score(
        0.5, {"form": 1.0, "content": 0.0}
    )
    with pytest.raises(ValueError, match=r"returned form, but reward.weights also names content"):
        parse_score({"form": 1}, weights=weights)
