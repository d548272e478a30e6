"""Several optimizer steps in a train step, against plain loops written from the papers, and their
state after a crash.
"""

import itertools

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from small_settings import small_run
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

from relax_events.config import RunConfig
from relax_events.errors import RunFailed, StepNotFinite
from relax_events.training.backend.state import TrainerState
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.torch_critic import TorchCritic
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.batch.mini_batches import split_into_mini_batches
from relax_events.training.ranks import SingleRank
from tests.event_samples import changed
from tests.unit.trainer_samples import make_samples, run_config, tiny_model

SAMPLES = [
    changed(sample, temperature=0.8 + 0.1 * (index % 3))
    for index, sample in enumerate(make_samples(10, seed=4))
]
PARTS = [SAMPLES[:3], SAMPLES[3:4], SAMPLES[4:]]
GROUPS = [f"g{index}" for index in range(5)]
THREE_BY_TWO = {
    "num_epochs": 3,
    "num_mini_batches": 2,
    "max_grad_norm": 0.5,
    "weight_decay": 0.1,
    "eps": 1e-3,
    "learning_rate": 2e-3,
}
FAR = np.where(SAMPLES[3].loss_mask, np.float32(3e38), np.float32(0))


def config_of(algorithm=None, trainer=None, **sections):
    tree = run_config(
        algorithm=algorithm, trainer=THREE_BY_TWO if trainer is None else trainer
    ).model_dump()
    return small_run(tree | {"run": tree["run"] | {"prompts_per_step": 5, "seed": 11}} | sections)


def backend(algorithm=None, trainer=None, dtype=torch.float64):
    return TorchBackend(config_of(algorithm, trainer), ranks=SingleRank(), dtype=dtype)


def train(mine, parts=PARTS):
    for part in parts:
        mine.accumulate(part)
    return mine.step()


def snapshot(mine):
    state = mine.state()
    return TrainerState(
        policy_version=state.policy_version,
        tensors={name: tensor.clone() for name, tensor in state.tensors.items()},
    )


def assert_equal(mine, other):
    assert mine.policy_version == other.policy_version
    for name, tensor in mine.state().tensors.items():
        assert torch.equal(tensor, other.state().tensors[name]), name


def members(prompt_group_ids):
    return [
        sample
        for group in prompt_group_ids
        for sample in SAMPLES
        if sample.prompt_group_id == group
    ]


def of_mask(sample, field):
    return torch.from_numpy(
        np.asarray(getattr(sample, field))[np.asarray(sample.loss_mask, bool)].astype(np.float64)
    )


class PlainModel:
    """A model, one forward pass for each sample, torch's own AdamW and clipping."""

    def __init__(self):
        self.model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float64).eval()
        decayed = [value for value in self.model.parameters() if value.ndim >= 2]
        others = [value for value in self.model.parameters() if value.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), eps=1e-3)

    def logprobs(self, sample):
        ids = torch.from_numpy(np.array(sample.tokens)).long()
        logits = self.model(input_ids=ids[None]).logits[0, :-1] / float(
            np.float32(sample.temperature)
        )
        chosen = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        return chosen[torch.from_numpy(np.array(sample.loss_mask[1:], bool))]

    def update(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return float(norm)


def ppo_step(plain, *, step, advantages, old_is_trainers, correction_high):
    """Train the samples as PPO's inner loop does; return what the step reports."""
    with torch.no_grad():
        before = {sample.sample_id: plain.logprobs(sample) for sample in SAMPLES}
    old = (
        before
        if old_is_trainers
        else {sample.sample_id: of_mask(sample, "rollout_logprobs") for sample in SAMPLES}
    )
    losses, norms, lengths, far, kls = [], [], [], [], []
    for epoch in range(3):
        for group_ids in split_into_mini_batches(
            GROUPS, num_mini_batches=2, seed=11, train_step=step, epoch=epoch
        ):
            batch = members(group_ids)
            lp = torch.cat([plain.logprobs(sample) for sample in batch])
            lo = torch.cat([old[sample.sample_id] for sample in batch])
            sampled = torch.cat([of_mask(sample, "rollout_logprobs") for sample in batch])
            a = torch.cat([advantages[sample.sample_id] for sample in batch])
            ratio = torch.exp(lp - lo)
            w = torch.exp(lo - sampled).clamp(max=correction_high) if correction_high else 1.0
            loss = -(w * torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)).mean()
            losses.append(loss.item())
            norms.append(plain.update(loss))
            lengths.append(len(lp))
            ratio = ratio.detach()
            far.append(float((((ratio < 0.8) & (a < 0)) | ((ratio > 1.2) & (a > 0))).sum()))
            kls.append(float((ratio - 1 - torch.log(ratio)).sum()))
    return {
        "loss": float(np.average(losses, weights=lengths)),
        "grad_norm": float(np.mean(norms)),
        "clip_fraction": sum(far) / sum(lengths),
        "last_epoch_clip_fraction": sum(far[-2:]) / sum(lengths[-2:]),
        "first_epoch_policy_kl": sum(kls[:2]) / sum(lengths[:2]),
        "last_epoch_policy_kl": sum(kls[-2:]) / sum(lengths[-2:]),
        "num_optimizer_steps": 6,
        "num_loss_tokens": sum(lengths[:2]),
        "num_samples": len(SAMPLES),
    }


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "grpo", "old_logprobs": "rollout"},
        {
            "name": "reinforce_plus_plus_baseline",
            "old_logprobs": "trainer",
            "correction": "tis",
            "correction_high": 1.1,
        },
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_train_steps_match_a_plain_loop_of_epochs_over_mini_batches(algorithm):
    mine, plain = backend(algorithm), PlainModel()
    advantages = {sample.sample_id: of_mask(sample, "advantages") for sample in SAMPLES}
    if algorithm["name"] != "grpo":  # whitened over the whole train batch, not over a mini-batch
        everyone = torch.cat(list(advantages.values()))
        advantages = {
            name: (values - everyone.mean()) / (everyone.std(correction=0) + 1e-8)
            for name, values in advantages.items()
        }
    for step in range(2):
        metrics = train(mine).to_metrics()
        is_trainers = algorithm["old_logprobs"] == "trainer"
        expected = ppo_step(
            plain,
            step=step,
            advantages=advantages,
            old_is_trainers=is_trainers,
            correction_high=algorithm.get("correction_high"),
        )
        assert {name: metrics[name] for name in expected} == pytest.approx(
            expected, rel=1e-4, abs=1e-6
        )
        assert metrics["learning_rate"] == 2e-3
        assert metrics["last_epoch_policy_kl"] > metrics["first_epoch_policy_kl"]
        assert 0 < metrics["clip_fraction"] < 1
    assert mine.policy_version == 2
    for name, value in collect_weights(mine).items():
        # RMSNorm works in float32 in any model; a large eps keeps AdamW from blowing up gradients
        # that are nearly zero.
        torch.testing.assert_close(
            value, plain.model.get_parameter(name).detach(), rtol=0, atol=1e-6
        )


def test_prompt_groups_are_split_whole_evenly_and_reshuffled_in_each_epoch():
    dealt = [
        split_into_mini_batches(GROUPS, num_mini_batches=2, seed=11, train_step=3, epoch=epoch)
        for epoch in range(4)
    ]
    for mini_batches in dealt:
        assert [len(one) for one in mini_batches] == [3, 2]
        assert sorted(itertools.chain(*mini_batches)) == GROUPS
    assert len({str(one) for one in dealt}) == 4
    assert (
        split_into_mini_batches(
            reversed(GROUPS), num_mini_batches=2, seed=11, train_step=3, epoch=1
        )
        == dealt[1]
    )
    assert split_into_mini_batches(
        GROUPS, num_mini_batches=9, seed=1, train_step=3, epoch=0
    ) != split_into_mini_batches(GROUPS, num_mini_batches=9, seed=2, train_step=3, epoch=0)
    assert [
        len(one)
        for one in split_into_mini_batches(
            GROUPS, num_mini_batches=9, seed=0, train_step=0, epoch=0
        )
    ] == [1] * 5
    assert split_into_mini_batches([], num_mini_batches=2, seed=0, train_step=0, epoch=0) == []


def test_mini_batch_order_is_stable_across_releases():
    # By `printf "11 3 0 g0" | b2sum -l 64`, and so on, in ascending order.
    assert split_into_mini_batches(GROUPS, num_mini_batches=1, seed=11, train_step=3, epoch=0) == [
        ["g4", "g2", "g1", "g0", "g3"]
    ]


@pytest.mark.parametrize(
    "parts",
    [
        [SAMPLES],
        [SAMPLES[6:], SAMPLES[:1], SAMPLES[1:6]],
        [[sample] for sample in reversed(SAMPLES)],
    ],
)
def test_train_step_is_bitwise_independent_of_sample_arrival_order(parts):
    mine, other = backend(dtype=None), backend(dtype=None)
    assert train(mine, parts) == train(other)
    assert_equal(mine, other)


class Crash(Exception):
    """Simulates a kill."""


@pytest.mark.parametrize("num_done", [1, 4])
@pytest.mark.parametrize(
    "algorithm",
    [{"old_logprobs": "trainer"}, {"name": "reinforce_plus_plus_baseline", "m2_threshold": 0.1}],
)
def test_step_interrupted_between_optimizer_steps_is_retrained_bit_for_bit(algorithm, num_done):
    undisturbed, killed = backend(algorithm, dtype=None), backend(algorithm, dtype=None)
    train(undisturbed)
    train(killed)
    checkpoint = snapshot(killed)
    left = itertools.count(num_done, -1)

    def crash():
        if not next(left):
            raise Crash

    killed.on_progress(crash)
    with pytest.raises(Crash):
        train(killed)
    assert any(
        not torch.equal(tensor, checkpoint.tensors[name])
        for name, tensor in killed.state().tensors.items()
    ), "weights had moved"
    restarted = backend(algorithm, dtype=None)
    restarted.load_state(checkpoint)
    assert train(restarted) == train(undisturbed)
    assert_equal(restarted, undisturbed)


def test_discarded_or_skipped_step_does_not_affect_the_next_step():
    mine, clean = backend(dtype=None), backend(dtype=None)
    mine.accumulate(SAMPLES[:4])
    mine.discard()
    assert train(mine) == train(clean)
    mine.accumulate(SAMPLES[:4])
    for trainer in (mine, clean):
        trainer.skip_step()
    assert train(mine) == train(clean)
    assert_equal(mine, clean)


def test_non_finite_mini_batch_is_skipped_and_the_others_are_trained():
    broken = [
        changed(sample, advantages=FAR) if sample.sample_id == "s3" else sample
        for sample in SAMPLES
    ]
    mine, calm = (backend(trainer={"num_mini_batches": 5}, dtype=torch.float32) for _ in range(2))
    metrics, expected = (
        train(mine, [broken]),
        train(calm, [[sample for sample in SAMPLES if sample.prompt_group_id != "g1"]]),
    )
    assert metrics.algorithm_metrics["num_mini_batches_not_finite"] == 1
    assert (
        metrics.algorithm_metrics["num_optimizer_steps"]
        == expected.algorithm_metrics["num_optimizer_steps"]
        == 4
    )
    assert metrics.loss == pytest.approx(expected.loss)
    assert_equal(mine, calm)


def test_step_without_a_finite_mini_batch_keeps_the_weights():
    mine, clean = backend(dtype=torch.float32), backend(dtype=torch.float32)
    broken = [
        changed(sample, advantages=np.where(sample.loss_mask, np.float32(3e38), np.float32(0)))
        for sample in SAMPLES
    ]
    with pytest.raises(
        StepNotFinite, match=r"train step 0, optimizer step \d: loss and gradients must be finite"
    ):
        train(mine, [broken])
    assert_equal(mine, clean)
    assert train(mine) == train(clean)


def test_step_without_a_loss_token_fails():
    mine = backend()
    mine.accumulate(
        [changed(sample, loss_mask=np.zeros_like(sample.loss_mask)) for sample in SAMPLES]
    )
    with pytest.raises(
        RunFailed, match="train step 0, optimizer step 0 holds no loss token on any rank"
    ):
        mine.step()


def test_prompt_group_without_a_loss_token_is_left_out_of_mini_batches():
    empty = [
        changed(sample, loss_mask=np.zeros_like(sample.loss_mask))
        if sample.prompt_group_id == "g2"
        else sample
        for sample in SAMPLES
    ]
    mine, clean = backend(trainer={"num_mini_batches": 5}), backend(trainer={"num_mini_batches": 5})
    metrics = train(mine, [empty])
    train(clean, [[sample for sample in SAMPLES if sample.prompt_group_id != "g2"]])
    assert metrics.algorithm_metrics["num_optimizer_steps"] == 4
    assert_equal(mine, clean)


def test_epochs_stop_before_the_mini_batch_whose_kl_exceeds_the_limit():
    whole, bounded = backend(), backend(trainer=THREE_BY_TWO | {"max_kl": 1e-9})
    metrics, free = train(bounded), train(whole)
    assert (
        metrics.algorithm_metrics["is_stopped_by_kl"],
        metrics.algorithm_metrics["num_optimizer_steps"],
    ) == (1, 1)
    assert (
        free.algorithm_metrics["is_stopped_by_kl"],
        free.algorithm_metrics["num_optimizer_steps"],
    ) == (0, 6)
    (first, _) = split_into_mini_batches(GROUPS, num_mini_batches=2, seed=11, train_step=0, epoch=0)
    alone = backend(trainer=THREE_BY_TWO | {"num_epochs": 1, "num_mini_batches": 1})
    train(alone, [members(first)])
    assert_equal(bounded, alone)
    assert metrics.num_samples == len(members(first))
    assert not bounded._parameters.gradients.any()


def test_second_moment_threshold_applies_to_each_mini_batch():
    mine, apart = (
        backend({"m2_threshold": 0.05}, trainer=trainer)
        for trainer in ({"num_mini_batches": 2}, {})
    )
    metrics = train(mine)
    for number, group_ids in enumerate(
        split_into_mini_batches(GROUPS, num_mini_batches=2, seed=11, train_step=0, epoch=0)
    ):
        apart.policy_version = 0
        assert 0 < train(apart, [members(group_ids)]).masked_fraction < 1, number
    assert 0 < metrics.masked_fraction < 1
    torch.testing.assert_close(collect_weights(mine), collect_weights(apart), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["dpo", "sft"])
def test_sft_and_dpo_train_in_mini_batches(name):
    data = {"chosen_key": "chosen", "rejected_key": "rejected"} if name == "dpo" else {}
    group_size = {"dpo": 2, "sft": 1}[name]
    tree = run_config(algorithm={"name": "grpo"}).model_dump()
    tree |= {
        "algorithm": {"name": name},
        "trainer": tree["trainer"] | {"num_epochs": 2, "num_mini_batches": 2},
    }
    tree["run"] |= {"samples_per_prompt": group_size, "prompts_per_step": 5, "seed": 11}
    tree["data"] |= data
    mine = TorchBackend(small_run(tree), ranks=SingleRank(), dtype=torch.float64)
    metrics = [train(mine, [SAMPLES]).to_metrics(of_engine=False) for _ in range(3)]
    assert metrics[0]["num_optimizer_steps"] == 4
    assert metrics[2]["loss"] < metrics[1]["loss"] < metrics[0]["loss"]
    assert "last_epoch_policy_kl" not in metrics[0]


def with_values(samples):
    generator = np.random.default_rng(3)
    values = [
        np.where(sample.loss_mask, generator.normal(0, 0.1, len(sample.tokens)), 0).astype(
            np.float32
        )
        for sample in samples
    ]
    return [changed(sample, values=one) for sample, one in zip(samples, values, strict=True)]


def critic(section=None, dtype=torch.float64):
    own = {"learning_rate": 1e-2, "value_clip": 0.05} | (
        {"num_epochs": 3, "num_mini_batches": 2} if section is None else section
    )
    return TorchCritic(config_of({"name": "ppo"}, {"max_grad_norm": 0.5}, critic=own), dtype=dtype)


def test_critic_uses_its_own_epochs_and_mini_batches():
    valued, mine = with_values(SAMPLES), critic()
    plain = (
        AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float64).eval().base_model
    )
    head = torch.nn.Linear(32, 1, dtype=torch.float64)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    parameters = [*plain.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )

    def value_of(sample):
        hidden = plain(
            input_ids=torch.from_numpy(np.array(sample.tokens)).long()[None]
        ).last_hidden_state[0]
        return head(hidden)[:-1, 0][torch.from_numpy(np.array(sample.loss_mask[1:], bool))]

    for step in range(2):
        losses, norms, lengths = [], [], []
        for epoch in range(3):
            for group_ids in split_into_mini_batches(
                GROUPS, num_mini_batches=2, seed=11, train_step=step, epoch=epoch
            ):
                batch = [
                    sample
                    for group in group_ids
                    for sample in valued
                    if sample.prompt_group_id == group
                ]
                values, old = (
                    torch.cat([value_of(sample) for sample in batch]),
                    torch.cat([of_mask(sample, "values") for sample in batch]),
                )
                returns = old + torch.cat([of_mask(sample, "advantages") for sample in batch])
                bounded = old + (values - old).clamp(-0.05, 0.05)
                loss = 0.5 * torch.maximum((values - returns) ** 2, (bounded - returns) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                norms.append(float(clip_grad_norm_(parameters, 0.5)))
                optimizer.step()
                losses.append(loss.item())
                lengths.append(len(values))
        metrics = train(mine, [valued[:4], valued[4:]])
        assert metrics.value_loss == pytest.approx(np.average(losses, weights=lengths), rel=1e-4)
        assert metrics.value_grad_norm == pytest.approx(np.mean(norms), rel=1e-4)
    with torch.no_grad():
        for sample, scored in zip(valued, mine.score(valued), strict=True):
            np.testing.assert_allclose(
                scored[np.asarray(sample.loss_mask, bool)], value_of(sample).numpy(), atol=1e-3
            )


def test_critic_that_crashed_during_a_step_retrains_it_bit_for_bit():
    valued = with_values(SAMPLES)
    undisturbed, killed = critic(dtype=None), critic(dtype=None)
    checkpoint = snapshot(killed)
    left = itertools.count(3, -1)

    def crash():
        if not next(left):
            raise Crash

    killed.on_progress(crash)
    with pytest.raises(Crash):
        train(killed, [valued])
    restarted = critic(dtype=None)
    restarted.load_state(checkpoint)
    assert train(restarted, [valued[:2], valued[2:]]) == train(undisturbed, [valued])
    assert_equal(restarted, undisturbed)


def test_critic_defaults_to_the_trainer_epochs_and_mini_batches():
    valued, reported = (
        with_values(SAMPLES),
        config_of({"name": "ppo"}, THREE_BY_TWO, critic={"learning_rate": 1e-2}),
    )
    mine, other = (
        TorchCritic(reported),
        TorchCritic(
            config_of(
                {"name": "ppo"}, THREE_BY_TWO, critic={"learning_rate": 1e-2, "num_epochs": 1}
            )
        ),
    )
    train(mine, [valued])
    train(other, [valued])
    assert [int(one.state().tensors["optimizer.step.0"]) for one in (mine, other)] == [6, 2]


@pytest.mark.parametrize(
    ("algorithm", "trainer", "critic_section", "text"),
    [
        (
            "grpo",
            {"num_mini_batches": 6},
            {},
            (
                "trainer.num_mini_batches must be at most run.prompts_per_step = 5, got 6: prompt "
                "groups are dealt"
            ),
        ),
        (
            "ppo",
            {},
            {"num_mini_batches": 6},
            "critic.num_mini_batches must be at most run.prompts_per_step = 5, got 6",
        ),
        (
            "rloo",
            {"num_epochs": 2},
            {},
            (
                "trainer.num_epochs = 2 and trainer.num_mini_batches = 1 are not for rloo: its "
                "loss has no ratio"
            ),
        ),
        ("rloo", {"num_mini_batches": 2}, {}, "are not for rloo"),
        (
            "grpo",
            {"max_kl": 0.1},
            {},
            "trainer.max_kl = 0.1 has nothing to end: a train step is one optimizer step",
        ),
        ("grpo", {"num_epochs": 0}, {}, "num_epochs"),
    ],
)
def test_run_file_with_incompatible_mini_batch_settings_is_rejected(
    algorithm, trainer, critic_section, text
):
    with pytest.raises(ValidationError, match=text):
        config_of({"name": algorithm}, trainer, critic=critic_section)


def test_max_kl_is_rejected_for_algorithms_without_policy_samples():
    tree = config_of().model_dump()
    tree |= {
        "algorithm": {"name": "sft"},
        "trainer": tree["trainer"] | {"max_kl": 0.1},
        "run": tree["run"] | {"samples_per_prompt": 1},
    }
    with pytest.raises(
        ValidationError,
        match=r"trainer.max_kl = 0.1 compares with the policy that drew the samples, and sft has none",
    ):
        RunConfig.model_validate(tree)
