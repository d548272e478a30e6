"""Which version `relax models export` takes."""

from __future__ import annotations

import pytest

from relax_events.cli.model_export import parse_size
from relax_events.errors import ConfigError
from relax_events.events.parts import ObjectRef
from relax_events.events.types import PolicyEvaluated
from relax_events.ops.model_export.versions import (
    PublishedVersions,
    choose_version,
    format_versions,
    list_metrics,
)

ARTIFACT = ObjectRef("file:///weights", b"", 1)


def evaluated(version: int, dataset: str, reward: float | None, **passes: float) -> PolicyEvaluated:
    return PolicyEvaluated(
        policy_version=version,
        dataset=dataset,
        num_prompts=4,
        samples_per_prompt=1,
        reward_mean=reward,
        pass_at_k={name.removeprefix("k"): value for name, value in passes.items()},
        weights_digest=b"",
    )


EVALUATIONS = (
    evaluated(0, "gsm8k", 0.2, k1=0.1, k4=0.9),
    evaluated(0, "math", 0.1),
    evaluated(5, "gsm8k", 0.9, k1=0.5, k4=0.6),
    evaluated(5, "math", 0.3),
    evaluated(10, "gsm8k", 0.7, k1=0.5, k4=0.5),
    evaluated(10, "math", 0.5),
    evaluated(15, "gsm8k", 1.0, k1=0.4),
)


def versions(
    *published: int, evaluations: tuple[PolicyEvaluated, ...] = EVALUATIONS
) -> PublishedVersions:
    return PublishedVersions("run", dict.fromkeys(published, ARTIFACT), evaluations=evaluations)


def chosen(*, version: int | None = None, best: str = "") -> int:
    return choose_version(versions(0, 5, 10, 15, 16), version=version, best=best)


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ("reward_mean", 10),  # 0.6 on both, as version 5 has; 15 lacks one of the datasets
        ("gsm8k/reward_mean", 15),
        ("math/reward_mean", 10),
        ("pass_at_1", 10),  # as good as 5, and newer
        ("gsm8k/pass_at_4", 0),
    ],
)
def test_best_version_has_the_highest_metric(best: str, expected: int) -> None:
    assert chosen(best=best) == expected


def test_newest_version_is_the_default_and_any_can_be_named() -> None:
    assert chosen() == 16
    assert chosen(version=5) == 5


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"version": 17}, "run run has no version 17; it has published versions 0 to 16"),
        ({"version": 3, "best": "reward_mean"}, "name a version each; give one"),
        (
            {"best": "accuracy"},
            (
                "no evaluation metric 'accuracy'; it has pass_at_1, pass_at_4, reward_mean, "
                "gsm8k/pass_at_1, gsm8k/pass_at_4, gsm8k/reward_mean, math/reward_mean"
            ),
        ),
        ({"best": "math/pass_at_1"}, "no evaluation metric 'math/pass_at_1'; it has pass_at_1"),
    ],
)
def test_unknown_version_or_metric_lists_what_there_is(asked: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        chosen(**asked)  # type: ignore[arg-type]
    assert text in str(refused.value)


def test_run_without_versions_or_evaluations_says_so() -> None:
    with pytest.raises(ConfigError, match="has not published a version yet"):
        choose_version(versions(), version=None, best="")
    with pytest.raises(ConfigError, match=r"has no evaluation, .* set evaluation\.datasets"):
        choose_version(versions(0, evaluations=()), version=None, best="reward_mean")


def test_metric_that_no_version_has_on_all_datasets_asks_for_one() -> None:
    partly = (evaluated(0, "a", 0.1), evaluated(1, "b", 0.2))
    with pytest.raises(ConfigError, match=r"evaluated on all of a, b; .* --best DATASET/reward"):
        choose_version(versions(0, 1, evaluations=partly), version=None, best="reward_mean")


def test_evaluation_without_rewards_has_no_metric() -> None:
    assert list_metrics([evaluated(0, "a", None)]) == []


def test_long_lists_of_versions_are_cut_at_their_begin() -> None:
    assert format_versions([]) == "none"
    assert format_versions([3, 1]) == "1, 3"
    assert format_versions(range(30)).startswith("..., 10, 11")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5GB", 5_000_000_000), ("500MB", 500_000_000), ("2GiB", 2**31), ("0.5 kb", 500), ("7B", 7)],
)
def test_size_is_read_with_its_unit(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["5", "GB", "-1GB", "0GB", "1XB", "5GB more"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-shard-size must be a size such as 5GB"):
        parse_size(text)
