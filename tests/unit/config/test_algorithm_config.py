"""Settings of algorithms: their defaults, rejected values, and algorithms from a file."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from pydantic import ValidationError

from relax_events.algorithms.description import describe_algorithm, installed_algorithms
from relax_events.config import AlgorithmConfig, RunConfig, load_run_config
from relax_events.config.algorithm import NOT_SHARED
from relax_events.config.algorithm_spec import find_algorithm, resolve
from relax_events.errors import ConfigError, PoisonSample
from relax_events.runtime.run_description import build_run_description as describe_run
from relax_events.runtime.run_description import read_described_config
from relax_events.runtime.validation import check_trainable
from relax_events.training.replay.relabel import needs_new_advantages

MINE = """
from relax_events.config.algorithm_spec import AlgorithmSpec

def best_of(rewards, *, bonus):
    return (rewards.total == rewards.total.max()) * bonus

def loss(tokens, *, clip_high):
    return -tokens.log_ratio.exp().clamp(max=1 + clip_high) * tokens.advantages

MINE = AlgorithmSpec(
    name="mine", summary="Train the best.", formula="A = bonus where R is the best", source="this file",
    advantage=best_of, advantage_settings=("bonus",), policy_loss=loss, loss_settings=("clip_high",),
    settings={"clip_high": 0.5}, options={"bonus": 2.0},
)
OTHER = 7
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return f"{file}:MINE"


def test_algorithm_section_defaults_equal_those_of_grpo() -> None:
    stated = {
        name: field.get_default(call_default_factory=True)
        for name, field in AlgorithmConfig.model_fields.items()
    }
    assert AlgorithmConfig().model_dump() == AlgorithmConfig(name="grpo").model_dump() == stated


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (
            "dapo",
            {
                "clip_low": 0.2,
                "clip_high": 0.28,
                "aggregation": "token_mean",
                "filter_uniform_rewards": True,
                "overlong_ratio": 0.2,
            },
        ),
        ("dr_grpo", {"normalise_std": False, "aggregation": "constant_length", "clip_high": 0.2}),
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sample_mean"}),
        ("gspo_token", {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sample_mean"}),
        (
            "sapo",
            {
                "gate_positive": 1.0,
                "gate_negative": 1.05,
                "clip_low": None,
                "dual_clip": None,
                "aggregation": "sample_mean",
            },
        ),
        (
            "cispo",
            {"clip_low": 1.0, "clip_high": 4.0, "dual_clip": None, "aggregation": "token_mean"},
        ),
        (
            "gmpo",
            {"clip_low": 0.4, "clip_high": 0.4, "dual_clip": None, "aggregation": "sample_mean"},
        ),
        (
            "dppo_tv",
            {
                "trust_radius": 0.15,
                "ratio_cap": 20.0,
                "clip_low": None,
                "aggregation": "token_mean",
            },
        ),
        (
            "dppo_kl",
            {
                "trust_radius": 0.05,
                "ratio_cap": 20.0,
                "clip_low": None,
                "aggregation": "token_mean",
            },
        ),
        (
            "rloo",
            {
                "clip_low": None,
                "normalise_std": False,
                "aggregation": "constant_length",
                "kl_placement": "reward",
            },
        ),
        (
            "opo",
            {
                "clip_low": None,
                "normalise_std": None,
                "aggregation": "token_mean",
                "kl_placement": "loss",
            },
        ),
        ("maxrl", {"clip_low": 0.2, "normalise_std": None, "aggregation": "token_mean"}),
        (
            "reinforce_plus_plus",
            {
                "whiten_advantages": "tokens",
                "kl_placement": "reward",
                "kl_estimator": "k1",
                "normalise_std": None,
            },
        ),
        (
            "reinforce_plus_plus_baseline",
            {"whiten_advantages": "tokens", "kl_placement": "loss", "kl_estimator": "k2"},
        ),
        ("gdpo", {"whiten_advantages": "samples", "reward_weights": {}, "normalise_std": True}),
        (
            "opd",
            {
                "distill_coefficient": 1.0,
                "distill_placement": "advantage",
                "distill_divergence": "reverse_kl",
                "normalise_std": None,
            },
        ),
    ],
)
def test_algorithm_name_sets_the_defaults_of_its_paper(name: str, settings: dict[str, Any]) -> None:
    algorithm = AlgorithmConfig(name=name)
    assert {key: getattr(algorithm, key) for key in settings} == settings


def test_every_installed_algorithm_has_a_complete_spec() -> None:
    for spec in installed_algorithms():
        algorithm = AlgorithmConfig(name=spec.name)
        used = {key for key in NOT_SHARED if getattr(algorithm, key) is not None}
        assert used == set(spec.settings) & set(NOT_SHARED)
        assert {
            *spec.advantage_settings,
            *spec.loss_settings,
        } >= used  # whatever a run file may set has an effect
        assert callable(resolve(spec.advantage))
        assert callable(resolve(spec.policy_loss))
        assert AlgorithmConfig.model_validate(algorithm.model_dump()) == algorithm
        assert "arXiv" in spec.source


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"name": "sapo", "clip_low": 0.2},
            (
                "clip_low = 0.2 is not used by sapo, which has baseline, normalise_std, gate_positive, "
                "gate_negative; leave"
            ),
        ),
        (
            {"name": "opo", "normalise_std": True},
            "normalise_std = True is not used by opo, which has none of its kind",
        ),
        ({"name": "cispo", "dual_clip": 3.0}, "dual_clip = 3.0 is not used by cispo"),
        ({"gate_positive": 1.0}, "gate_positive = 1.0 is not used by grpo"),
        (
            {"name": "gdpo", "overlong_ratio": 0.2},
            "overlong_ratio = 0.2 is not for gdpo: a penalty is not one of",
        ),
        (
            {"name": "gdpo", "kl_placement": "reward"},
            "kl_placement = 'reward' is not for gdpo: there is no one reward",
        ),
        ({"options": {"bonus": 1}}, "options.bonus is not an option of grpo, which has none"),
        (
            {"correction": "tis"},
            (
                "correction = 'tis' weighs the old policy against the engine's, but old_logprobs "
                "= 'rollout' makes them the same"
            ),
        ),
        (
            {"correction_high": 2.0},
            "correction_high = 2.0 is not used by correction = 'none', which has no range",
        ),
        (
            {"correction": "decoupled", "old_logprobs": "actor", "correction_low": 0.5},
            "correction_low = 0.5 is not used by correction = 'decoupled'",
        ),
        (
            {"correction": "tis", "old_logprobs": "actor", "correction_low": 3.0},
            "correction_low must be at most correction_high = 2.0, got 3.0",
        ),
        (
            {"rejection": "k2", "rejection_high": 0.1},
            (
                "compare the old policy with the engine's, but old_logprobs = 'rollout' makes "
                "them the same"
            ),
        ),
        ({"veto_low": 1e-4}, "set old_logprobs to actor or trainer"),
        (
            {"veto_high": 1.0, "old_logprobs": "actor"},
            "veto_high must be above 1, or 0 for none, got 1.0",
        ),
        ({"veto_low": 1.5, "old_logprobs": "actor"}, "less than 1"),
        (
            {"rejection": "k3", "old_logprobs": "actor"},
            "needs the bound that it rejects beyond; set rejection_high, for example 1.001 with",
        ),
        ({"rejection_high": 2.0}, "rejection_high = 2.0 is not used by rejection = 'none'"),
        (
            {
                "rejection": "k2",
                "rejection_low": 0.1,
                "rejection_high": 1.0,
                "old_logprobs": "actor",
            },
            "rejection_low = 0.1 is not used by",
        ),
        (
            {
                "rejection": "k1",
                "rejection_over": "max",
                "rejection_high": 2.0,
                "old_logprobs": "actor",
            },
            "'max' is not defined for k1",
        ),
        (
            {"rejection": "k1", "rejection_high": 0.9, "old_logprobs": "actor"},
            "rejection_high above it, got None and 0.9",
        ),
        (
            {"name": "sft", "veto_low": 1e-4},
            "veto_low = 0.0001 is not for sft: the tokens are from the data, not from a policy",
        ),
        (
            {"name": "maxrl", "overlong_ratio": 0.2},
            "overlong_ratio = 0.2 is not for maxrl: a penalty makes rewards negative",
        ),
        (
            {"name": "dr_grpo", "whiten_advantages": "rewards", "overlong_ratio": 0.2},
            (
                "whiten_advantages = 'rewards' takes the deviation of rewards as they were "
                "scored, but overlong_ratio, KL"
            ),
        ),
        (
            {"name": "rloo", "whiten_advantages": "rewards", "kl_coefficient": 0.1},
            "whiten_advantages = 'rewards' takes the deviation of rewards as they were scored",
        ),
        (
            {"whiten_advantages": "rewards"},
            (
                "whiten_advantages = 'rewards' divides by the step's deviation instead of the "
                "prompt group's; also set normalise_std = false"
            ),
        ),
        (
            {"name": "dr_grpo", "std_correction": 0},
            (
                "std_correction = 0 is not used where nothing is divided by a deviation; set "
                "normalise_std"
            ),
        ),
        ({"name": "opo", "std_correction": 1}, "std_correction = 1 is not used"),
        ({"name": "opo", "baseline": "group"}, "baseline = 'group' is not used by opo"),
        (
            {"name": "dr_grpo", "whiten_advantages": "mean", "std_correction": 0},
            "std_correction = 0 is not used where nothing is divided by a deviation",
        ),
        (
            {"baseline": "none"},
            "normalise_std divides by 1e-6 where the rewards of a prompt group are equal, and",
        ),
        ({"std_correction": 2}, "Input should be 0 or 1"),
        (
            {"critic_gae_lambda": 1.0},
            "critic_gae_lambda = 1.0 is not used by grpo, which has no critic; leave it out",
        ),
        ({"bootstrap_truncated": True}, "bootstrap_truncated = True is not used by grpo"),
        ({"turn_gamma": 0.9}, "turn_gamma = 0.9 is not used by grpo"),
        (
            {"name": "ppo", "turn_gamma": 0.9, "length_adaptive_alpha": 0.05},
            "one lambda for all lengths, gae_lambda; leave length_ada",
        ),
        ({"name": "ppo", "length_adaptive_alpha": -1.0}, "greater than or equal to 0"),
        ({"dual_clip": 0.5}, "dual_clip must be above 1, or 0 for none, got 0.5"),
        (
            {"name": "ppo", "distill_coefficient": 0.1, "distill_placement": "advantage"},
            "set distill_placement = 'loss' with ppo",
        ),
        (
            {"kl_base": "rollout", "kl_placement": "reward"},
            "kl_base = 'rollout' holds the trained policy near the one that sampled, which a",
        ),
        (
            {"kl_estimator": "k3+", "kl_placement": "reward"},
            "kl_estimator = 'k3+' is a value with another gradient, and a reward has none",
        ),
        (
            {"kl_unbiased": True, "kl_placement": "reward"},
            "kl_unbiased = true corrects the gradient of a KL estimate in the loss",
        ),
        (
            {"name": "gspo", "distill_placement": "advantage"},
            (
                "distill_placement = 'advantage' is not for gspo: as an advantage it is each "
                "token's own"
            ),
        ),
        ({"trust_radius": 0.1}, "trust_radius = 0.1 is not used by grpo"),
        (
            {"name": "dppo_tv", "clip_high": 0.2},
            (
                "clip_high = 0.2 is not used by dppo_tv, which has baseline, normalise_std, trust_radius, "
                "ratio_cap"
            ),
        ),
        ({"name": "dppo_kl", "trust_radius": 0.0}, "greater than 0"),
        ({"name": "dppo_kl", "ratio_cap": 0.5}, "greater than or equal to 1"),
        ({"name": "gmpo", "dual_clip": 3.0}, "dual_clip = 3.0 is not used by gmpo"),
        (
            {"name": "gmpo", "distill_placement": "advantage"},
            "distill_placement = 'advantage' is not for gmpo",
        ),
        (
            {"name": "ipo", "label_smoothing": 0.1},
            (
                "label_smoothing = 0.1 is not used by ipo, which has dpo_beta, "
                "length_normalised; leave"
            ),
        ),
        ({"name": "dpo", "nll_coefficient": -1.0}, "greater than or equal to 0"),
        ({"length_normalised": True}, "length_normalised = True is not used by grpo"),
        (
            {"name": "opd", "filter_uniform_rewards": True},
            "filter_uniform_rewards = True is not for opd: no reward counts",
        ),
        (
            {"distill_tokens": "teacher_topk"},
            "distill_top_k must be at least 1 with distill_tokens = 'teacher_topk', got 0",
        ),
        ({"distill_top_k": 4}, "distill_top_k must be 0 with distill_tokens = 'sampled', got 4"),
        (
            {"name": "opd", "distill_divergence": "jsd"},
            (
                "distill_placement = 'advantage' takes the reverse KL of the sampled tokens, got "
                "jsd of sampled; set distill_placement = 'loss'"
            ),
        ),
        ({"distill_mixture": 1.5}, "less than or equal to 1"),
        (
            {"name": "gpro"},
            (
                "algorithm.name = 'gpro' is not installed; installed are cispo, dapo, dpo, "
                "dppo_kl, dppo_tv, dr_grpo, gdpo, gmpo, grpo,"
            ),
        ),
        ({"name": "gppo"}, "; did you mean "),
        ({"clip_lo": 0.1}, "Extra inputs are not permitted"),
        ({"name": "nowhere/mine.py:MINE"}, "file nowhere/mine.py does not exist"),
        ({"name": 7}, "should be a valid string"),
    ],
)
def test_invalid_algorithm_settings_are_rejected(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError) as refused:
        AlgorithmConfig.model_validate(settings)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("tis", (0.0, 2.0)),
        ("icepop", (0.5, 5.0)),
        ("mask", (0.5, 2.0)),
        ("decoupled", (None, None)),
    ],
)
def test_correction_kind_sets_its_default_range(
    kind: str, expected: tuple[float | None, float | None]
) -> None:
    algorithm = AlgorithmConfig.model_validate({"correction": kind, "old_logprobs": "trainer"})
    assert (algorithm.correction_low, algorithm.correction_high) == expected
    if kind == "tis":
        assert (
            AlgorithmConfig.model_validate(
                algorithm.model_dump() | {"correction_high": 5.0}
            ).correction_high
            == 5.0
        )


def test_run_file_error_names_the_unused_algorithm_key(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nid = "a"\n[model]\npath = "m"\n[data]\nsource = "jsonl:x"\n[algorithm]\nname '
        '= "sapo"\n'
    )
    assert load_run_config(path, environment={}).algorithm.gate_negative == 1.05
    with pytest.raises(
        ConfigError, match=r"run.toml: algorithm: clip_high = 0.3 is not used by sapo"
    ):
        load_run_config(path, ["algorithm.clip_high=0.3"], environment={})


def test_algorithm_from_a_file_has_its_defaults_and_options(mine: str) -> None:
    algorithm = AlgorithmConfig(name=mine)
    assert (algorithm.clip_high, algorithm.clip_low, algorithm.options) == (
        0.5,
        None,
        {"bonus": 2.0},
    )
    other = AlgorithmConfig.model_validate(
        {"name": mine, "options": {"bonus": 3.0}, "clip_high": 0.25}
    )
    assert other.keywords(("bonus", "clip_high")) == {"bonus": 3.0, "clip_high": 0.25}
    assert describe_algorithm(mine)["options"] == {"bonus": "2"}
    with pytest.raises(
        ValidationError, match=r"options.bonsu is not an option of mine, which has bonus"
    ):
        AlgorithmConfig.model_validate({"name": mine, "options": {"bonsu": 3.0}})
    with pytest.raises(ConfigError, match=r"mine.py has no AlgorithmSpec 'OTHER', only MINE"):
        find_algorithm(mine.replace(":MINE", ":OTHER"))


def test_spec_that_names_an_unknown_setting_is_rejected(mine: str) -> None:
    file = Path(mine.removesuffix(":MINE"))
    file.write_text(MINE.replace('loss_settings=("clip_high",)', 'loss_settings=("clip_hihg",)'))
    with pytest.raises(
        ValidationError,
        match=r"the spec of mine names 'clip_hihg', which is neither a setting nor one of its options",
    ):
        AlgorithmConfig(name=mine)


def test_algorithm_file_is_reloaded_when_it_changes(mine: str) -> None:
    assert find_algorithm(mine).options == {"bonus": 2.0}
    file = Path(mine.removesuffix(":MINE"))
    file.unlink()
    file.write_text(MINE.replace("2.0}", "5.0}"))
    assert find_algorithm(mine).options == {"bonus": 5.0}


def test_run_description_can_be_read_without_its_algorithm_file(
    mine: str, make_run_config: Any
) -> None:
    config: RunConfig = make_run_config(algorithm={"name": mine})
    described = describe_run(config)
    Path(mine.removesuffix(":MINE")).unlink()
    assert (
        read_described_config(described, run_id=config.run.id).algorithm.model_dump()
        == config.algorithm.model_dump()
    )


def test_run_description_of_the_first_release_keeps_its_meaning(make_run_config: Any) -> None:
    recorded = {
        "name": "gspo",
        "clip_low": 0.1,
        "clip_high": 0.3,
        "normalise_std": True,
        "aggregation": "token_mean",
        "kl_coefficient": 0.5,
        "kl_estimator": "k2",
        "old_logprobs": "actor",
        "filter_uniform_rewards": True,
    }
    described = describe_run(make_run_config())
    tree = orjson.loads(described.config) | {"algorithm": recorded}
    read = AlgorithmConfig.model_validate(tree["algorithm"])
    assert read.model_dump() | recorded == read.model_dump()
    assert (read.correction, read.kl_placement, read.whiten_advantages) == ("none", "loss", "none")


def test_run_has_reference_and_critic_roles_when_the_algorithm_needs_them(
    make_run_config: Any,
) -> None:
    in_reward = make_run_config(algorithm={"name": "rloo", "kl_coefficient": 0.1})
    assert "reference" in in_reward.roles()
    assert (in_reward.algorithm.has_reward_kl, in_reward.algorithm.has_loss_kl) == (True, False)
    assert "actor-forward" not in make_run_config(algorithm={"old_logprobs": "trainer"}).roles()
    assert "critic" not in make_run_config().roles()
    assert make_run_config(algorithm={"name": "ppo"}).roles()["critic"] == 1


def test_run_has_a_teacher_role_when_the_policy_distils(make_run_config: Any) -> None:
    assert "teacher" not in make_run_config(teacher={"model_path": "elsewhere"}).roles()
    config = make_run_config(
        algorithm={"name": "opd"}, teacher={"model_path": "elsewhere"}, workers={"teacher": 2}
    )
    assert config.roles()["teacher"] == 2
    assert (config.algorithm.has_distill_advantage, config.algorithm.has_distill_loss) == (
        True,
        False,
    )
    with pytest.raises(
        ValidationError, match=r"distill_coefficient = 1 needs a teacher; set teacher.model_path"
    ):
        make_run_config(algorithm={"name": "opd"})
    assert (
        "teacher" not in make_run_config(algorithm={"name": "opd"}, parent={"run": "old"}).roles()
    )


@pytest.mark.parametrize(
    ("tokens", "num_wanted"), [("student_topk", 5), ("teacher_topk", 0), ("union", 5)]
)
def test_rollout_top_tokens_are_requested_only_when_distillation_uses_them(
    tokens: str, num_wanted: int
) -> None:
    settings = {"distill_tokens": tokens, "distill_top_k": 5}
    assert (
        AlgorithmConfig.model_validate(
            settings | {"distill_coefficient": 0.5}
        ).num_rollout_top_tokens
        == num_wanted
    )
    assert AlgorithmConfig.model_validate(settings).num_rollout_top_tokens == 0


def test_recorded_advantages_are_reused_unless_their_settings_differ() -> None:
    def settings_of(**settings: Any) -> AlgorithmConfig:
        return AlgorithmConfig.model_validate(settings)

    assert not needs_new_advantages(
        settings_of(),
        settings_of(
            correction="tis",
            old_logprobs="trainer",
            whiten_advantages="tokens",
            overlong_penalty=2.0,
        ),
    )
    assert needs_new_advantages(settings_of(), settings_of(overlong_ratio=0.1))
    assert needs_new_advantages(
        settings_of(name="rloo"), settings_of(name="rloo", kl_coefficient=0.1)
    )
    assert needs_new_advantages(settings_of(name="ppo"), settings_of(name="ppo", gae_lambda=0.9))
    assert needs_new_advantages(
        settings_of(name="ppo"), settings_of(name="ppo", length_adaptive_alpha=0.05)
    )
    assert needs_new_advantages(settings_of(name="ppo"), settings_of(name="ppo", turn_gamma=1.0))
    assert needs_new_advantages(
        settings_of(name="ppo"), settings_of(name="ppo", bootstrap_truncated=True)
    )
    assert not needs_new_advantages(
        settings_of(name="ppo"), settings_of(name="ppo", critic_gae_lambda=1.0)
    )
    assert needs_new_advantages(settings_of(), settings_of(baseline="leave_one_out"))
    assert needs_new_advantages(settings_of(), settings_of(normalise_std="leave_one_out"))
    assert not needs_new_advantages(settings_of(), settings_of(whiten_advantages="mean"))
    assert needs_new_advantages(settings_of(), settings_of(truncated_samples="drop"))
    assert not needs_new_advantages(settings_of(), settings_of(truncated_samples="mask"))
    assert needs_new_advantages(
        settings_of(name="reinforce_plus_plus"), settings_of(name="reinforce_plus_plus", gamma=0.9)
    )
    assert needs_new_advantages(
        settings_of(name="opd"), settings_of(name="opd", distill_coefficient=0.5)
    )
    assert needs_new_advantages(
        settings_of(name="opd"), settings_of(name="opd", distill_placement="loss")
    )
    assert not needs_new_advantages(settings_of(), settings_of(distill_coefficient=0.5))
    assert needs_new_advantages(
        settings_of(name="gdpo"), settings_of(name="gdpo", reward_weights={"a": 2.0})
    )


def test_sample_needs_reference_logprobs_only_if_the_loss_uses_them() -> None:
    from event_samples import ready

    sample = ready()
    with pytest.raises(PoisonSample, match="the algorithm needs values, got none"):
        check_trainable(sample, algorithm=AlgorithmConfig(name="ppo"), vocab_size=100)
    check_trainable(
        sample,
        algorithm=AlgorithmConfig.model_validate({"name": "rloo", "kl_coefficient": 0.1}),
        vocab_size=100,
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"topk_ids": np.array([[100, 2, 3, 1]], np.int32)},
            "topk_ids must be 0 to 99, got 2 to 100; do policy and teacher share a vocabulary",
        ),
        (
            {"topk_ids": np.array([[-1, 2, 3, 4]], np.int32)},
            "topk_ids must be 0 to 99, got -1 to 3",
        ),
        (
            {
                "topk_ids": np.array([[1, 2]], np.int32),
                "topk_teacher_logprobs": np.full((1, 2), -1.0, np.float32),
            },
            (
                "topk_ids must have at least the 3 ids of algorithm.distill_top_k for each loss "
                "token, got 2"
            ),
        ),
        (
            {"topk_teacher_logprobs": np.array([[-1, -2, -np.inf, -3]], np.float32)},
            "topk_teacher_logprobs must be finite, got -inf",
        ),
    ],
)
def test_sample_with_invalid_distillation_token_sets_is_rejected(
    changes: dict[str, Any], text: str
) -> None:
    from event_samples import ready

    fit = {
        "topk_ids": np.array([[1, 2, 3, 4]], np.int32),
        "topk_teacher_logprobs": np.full((1, 4), -1.0, np.float32),
    }
    settings = {
        "name": "grpo",
        "distill_coefficient": 0.5,
        "distill_tokens": "teacher_topk",
        "distill_top_k": 3,
    }
    algorithm = AlgorithmConfig.model_validate(settings)
    whole = ready(teacher_logprobs=np.zeros(ready().tokens.shape, np.float32), **fit)
    check_trainable(whole, algorithm=algorithm, vocab_size=100)
    unused = np.array([[-1, -2, -3, -np.inf]], np.float32)
    check_trainable(
        dataclasses.replace(whole, topk_teacher_logprobs=unused),
        algorithm=algorithm,
        vocab_size=100,
    )
    with pytest.raises(PoisonSample, match=re.escape(text)):
        check_trainable(dataclasses.replace(whole, **changes), algorithm=algorithm, vocab_size=100)


@pytest.mark.parametrize(
    ("settings", "changes", "missing"),
    [
        ({"name": "opd"}, {}, "teacher_logprobs"),
        (
            {"distill_coefficient": 1.0, "distill_tokens": "teacher_topk", "distill_top_k": 2},
            {"teacher_logprobs": np.zeros(4)},
            "topk_ids",
        ),
    ],
)
def test_sample_without_required_teacher_logprobs_is_rejected(
    settings: dict[str, Any], changes: dict[str, Any], missing: str
) -> None:
    from event_samples import ready

    with pytest.raises(PoisonSample, match=f"the algorithm needs {missing}, got none"):
        check_trainable(
            ready(**changes), algorithm=AlgorithmConfig.model_validate(settings), vocab_size=100
        )


def test_kl_to_the_sampling_policy_needs_no_reference() -> None:
    algorithm = AlgorithmConfig(kl_coefficient=0.1, kl_base="rollout", kl_estimator="k2")
    assert algorithm.has_loss_kl
    assert not algorithm.needs_reference
    assert not algorithm.has_reference_in_loss
    other = AlgorithmConfig(kl_coefficient=0.1)
    assert other.needs_reference
    assert other.has_reference_in_loss
    in_reward = AlgorithmConfig(kl_coefficient=0.1, kl_placement="reward")
    assert in_reward.needs_reference
    assert not in_reward.has_reference_in_loss


@pytest.mark.parametrize(
    ("name", "setting", "size", "count"),
    [
        ("grpo", 0, 2, 2),
        ("grpo", 0, 8, 4),
        ("grpo", 0, 9, 5),
        ("grpo", 7, 8, 7),
        ("sft", 0, 1, 1),
        ("dpo", 0, 2, 2),
    ],
)
def test_samples_that_a_prompt_group_needs_are_half_of_it_by_default(
    name: str, setting: int, size: int, count: int
) -> None:
    config = AlgorithmConfig(name=name, min_samples_per_group=setting)
    assert config.count_needed_samples(size) == count
