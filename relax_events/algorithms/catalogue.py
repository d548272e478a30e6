"""The algorithms that are installed, each as one spec. What an algorithm of your own looks like is
in docs/how-to/extensions.md#algorithms.
"""

from __future__ import annotations

from typing import Any

from relax_events.config.algorithm_spec import AlgorithmSpec

ADVANTAGES = "relax_events.algorithms.advantages"
LOSSES = "relax_events.algorithms.losses"
PREFERENCES = "relax_events.algorithms.preferences"
CLIP = ("clip_low", "clip_high", "dual_clip")
USUAL_CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}
NORMALISED: dict[str, Any] = {"baseline": "group", "normalise_std": True}
SEQUENCE_RATIO: dict[str, Any] = {
    **NORMALISED,
    "clip_low": 3e-4,
    "clip_high": 4e-4,
    "dual_clip": 0.0,
    "aggregation": "sample_mean",
}
WITHIN_GROUP: dict[str, Any] = {
    "advantage": f"{ADVANTAGES}:grpo_advantages",
    "advantage_settings": ("baseline", "normalise_std", "std_correction"),
}
GROUP_ADVANTAGE = "A = (R - mean(R)) / (std(R) + 1e-6) within the prompt group, std with n - 1"
CLIPPED = "loss_t = max(-r_t A, -clip(r_t, 1 - clip_low, 1 + clip_high) A),  r_t = exp(lp_t - lo_t)"

GRPO = AlgorithmSpec(
    name="grpo",
    summary="Group-relative advantages with PPO's clipped ratio of each token.",
    formula=f"{GROUP_ADVANTAGE}\n{CLIPPED}\nL = mean over the step's tokens",
    source=(
        "DeepSeekMath (arXiv 2402.03300), equations 3 and 4 and section 4.1.2; clipping: PPO "
        "(arXiv 1707.06347), equation 7."
    ),
    **WITHIN_GROUP,
    policy_loss=f"{LOSSES}:ppo_clip_loss",
    loss_settings=CLIP,
    settings={**NORMALISED, **USUAL_CLIP},
    notes='The paper takes the mean over a sample first (`aggregation = "sample_mean"`) and '
    "`kl_coefficient = 0.04`; token mean without KL "
    "is what has come to be used.",
)

DAPO = AlgorithmSpec(
    name="dapo",
    summary=(
        "GRPO with a higher upper clip, token mean, no prompt groups of equal rewards, and a "
        "soft penalty on overlong completions."
    ),
    formula="R' = R - overlong_penalty * clip((|y| - (1 - overlong_ratio) Lmax) / (overlong_ratio "
    "Lmax), 0, 1),  Lmax = max_new_tokens\n"
    f"{GROUP_ADVANTAGE}, of R'\n{CLIPPED}\nL = mean over the step's tokens",
    source=(
        "DAPO (arXiv 2503.14476), sections 3.1 to 3.4, penalty: equation 13. Dynamic sampling "
        "looks at the rewards before the penalty."
    ),
    **WITHIN_GROUP,
    policy_loss=f"{LOSSES}:ppo_clip_loss",
    loss_settings=CLIP,
    settings={
        **NORMALISED,
        **USUAL_CLIP,
        "clip_high": 0.28,
        "filter_uniform_rewards": True,
        "overlong_ratio": 0.2,
    },
    notes="The paper's 4,096 of 20,480 tokens are the overlong_ratio of 0.2.",
)

DR_GRPO = AlgorithmSpec(
    name="dr_grpo",
    summary=(
        "GRPO without its biases: rewards are centred only, and a sample's loss is divided by a "
        "constant, not by its length."
    ),
    formula=(
        f"A = R - mean(R) within the prompt group\n{CLIPPED}\nL = mean over samples of (sum over "
        "tokens of loss_t) / length_normaliser"
    ),
    source="Dr. GRPO: Understanding R1-Zero-like training (arXiv 2503.20783), section 3.",
    **WITHIN_GROUP,
    policy_loss=f"{LOSSES}:ppo_clip_loss",
    loss_settings=CLIP,
    settings={
        "baseline": "group",
        "normalise_std": False,
        **USUAL_CLIP,
        "aggregation": "constant_length",
    },
)

GSPO = AlgorithmSpec(
    name="gspo",
    summary="One ratio for a whole sample, the geometric mean of its tokens', clipped as a whole.",
    formula=f"{GROUP_ADVANTAGE}\ns = exp(mean over the sample's tokens of lp_t - lo_t)\n"
    "loss_t = max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A)\nL = mean over samples of "
    "the mean over tokens",
    source="GSPO (arXiv 2507.18071), equations 5 to 7; clip ranges: section 5.1.",
    **WITHIN_GROUP,
    policy_loss=f"{LOSSES}:gspo_loss",
    loss_settings=CLIP,
    settings=SEQUENCE_RATIO,
    excluded={
        "distill_placement": (
            "as an advantage it is each token's own, and all tokens of a sample share one; "
            "gspo_token has one for each"
        )
    },
)

GSPO_TOKEN = AlgorithmSpec(
    name="gspo_token",
    summary=(
        "GSPO's ratio with the gradient of each token for itself, so that advantages may differ "
        "within a sample."
    ),
    formula=f"{GROUP_ADVANTAGE}\ns_t = sg(s) exp(lp_t) / sg(exp(lp_t)),  s as in gspo, "
    "sg stops the gradient\n"
    "loss_t = max(-s_t A_t, -clip(s_t, 1 - clip_low, 1 + clip_high) A_t)\nL = mean over "
    "samples of the mean over tokens",
    source="GSPO (arXiv 2507.18071), section 4.3.",
    **WITHIN_GROUP,
    policy_loss=f"{LOSSES}:gspo_token_loss",
    loss_settings=CLIP,
    settings=SEQUENCE_RATIO,
)

SAPO = AlgorithmSpec(
    name="sapo",
    summary=(
        "A soft gate in place of clipping: a token's gradient fades as its ratio leaves 1, "
        "faster where the advantage is negative."
    ),
    formula=f"{GROUP_ADVANTAGE}\nloss_t = -(4 / tau) sigmoid(tau (r_t - 1)) A,  r_t = exp(lp_t - "
    "lo_t)\n"
    "tau = gate_positive where A > 0, else gate_negative\nL = mean over samples of the mean "
    "over tokens",
    source=(
        "SAPO (arXiv 2511.20347), section 3. Counted as clipped are tokens whose gate passes "
        "less than half."
    ),
    **WITHIN_GROUP,
    policy_loss=f"{LOSSES}:sapo_loss",
    loss_settings=("gate_positive", "gate_negative"),
    settings={
        **NORMALISED,
        "gate_positive": 1.0,
        "gate_negative": 1.05,
        "aggregation": "sample_mean",
    },
)

CISPO = AlgorithmSpec(
    name="cispo",
    summary=(
        "REINFORCE with a clipped importance weight: every token keeps its gradient, none weighs "
        "too much."
    ),
    formula=f"{GROUP_ADVANTAGE}\nloss_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A lp_t,  "
    "r_t = exp(lp_t - lo_t), sg stops the gradient\n"
    "L = mean over the step's tokens",
    source="MiniMax-M1 (arXiv 2506.13585), equations 4 and 5, for either sign of the advantage; "
    "upper bound of 5: "
    "The art of scaling RL compute (arXiv 2510.13786).",
    **WITHIN_GROUP,
    policy_loss=f"{LOSSES}:cispo_loss",
    loss_settings=("clip_low", "clip_high"),
    settings={**NORMALISED, "clip_low": 1.0, "clip_high": 4.0},
    notes=(
        "With clip_low = 1 the weight has no lower bound, as in the paper, which names no number "
        "for the upper one."
    ),
)

GMPO = AlgorithmSpec(
    name="gmpo",
    summary=(
        "One ratio for a whole sample, the geometric mean of its tokens', each clipped by itself "
        "beforehand."
    ),
    formula=f"{GROUP_ADVANTAGE}\n"
    "g = exp(mean over the sample's tokens of x_t),  x_t = min(lp_t - lo_t, clip_high) where "
    "A > 0, else max(lp_t - lo_t, -clip_low)\n"
    "loss_t = -g A\nL = mean over samples of the mean over tokens",
    source=(
        "GMPO: Geometric-Mean Policy Optimization (arXiv 2507.20673), section 3; clip range of "
        "e^-0.4 to e^0.4: section 4."
    ),
    **WITHIN_GROUP,
    policy_loss=f"{LOSSES}:gmpo_loss",
    loss_settings=("clip_low", "clip_high"),
    settings={
        **NORMALISED,
        "clip_low": 0.4,
        "clip_high": 0.4,
        "aggregation": "sample_mean",
    },
    excluded={
        "distill_placement": "as an advantage it is each token's own, and all tokens of a sample "
        "share one"
    },
    notes="Its clip range is one of the ratio's logarithm.",
)

TRUST_REGION = (
    "loss_t = -sg(min(p / q, ratio_cap)) A lp_t,  p = exp(lp_t), q = exp(lo_t), sg stops the "
    "gradient\n"
    "loss_t = 0 where D > trust_radius, and p > q with A > 0, or p < q with A < 0"
)
DPPO_NOTES = (
    "The trust region is around the policy that drew the tokens, as in the paper: leave "
    "`old_logprobs` at `rollout`. It is the binary "
    "approximation; that over the most probable tokens is not offered."
)

DPPO: dict[str, Any] = {
    **WITHIN_GROUP,
    "loss_settings": ("trust_radius", "ratio_cap"),
    "notes": DPPO_NOTES,
}
DPPO_SUMMARY = (
    "A trust region in place of the clipped ratio: a token whose probability has moved too far, "
    "by {}, is left out."
)
DPPO_SOURCE = (
    "DPPO: Rethinking the trust region in LLM reinforcement learning (arXiv 2602.04879), Binary-"
    "{}; cap of 20: verl's `{}`."
)

DPPO_TV = AlgorithmSpec(
    name="dppo_tv",
    summary=DPPO_SUMMARY.format("total variation"),
    formula=f"{GROUP_ADVANTAGE}\n{TRUST_REGION},  D = |p - q|\nL = mean over the step's tokens",
    source=DPPO_SOURCE.format("TV", "dppo_tv"),
    **DPPO,
    policy_loss=f"{LOSSES}:dppo_tv_loss",
    settings={**NORMALISED, "trust_radius": 0.15, "ratio_cap": 20.0},
)

DPPO_KL = AlgorithmSpec(
    name="dppo_kl",
    summary=DPPO_SUMMARY.format("KL divergence"),
    formula=(
        f"{GROUP_ADVANTAGE}\n{TRUST_REGION},  D = q log(q / p) + (1 - q) log((1 - q) / (1 - "
        "p))\nL = mean over the step's tokens"
    ),
    source=DPPO_SOURCE.format("KL", "dppo_kl"),
    **DPPO,
    policy_loss=f"{LOSSES}:dppo_kl_loss",
    settings={**NORMALISED, "trust_radius": 0.05, "ratio_cap": 20.0},
)

RLOO = AlgorithmSpec(
    name="rloo",
    summary="REINFORCE with the mean reward of the prompt group's other samples as baseline.",
    formula="A_i = R_i - mean over j != i of R_j, with normalise_std divided by std(R) + 1e-6 "
    "within the prompt group, std with n - 1\n"
    "loss_t = -A lp_t\nL = mean over samples of (sum over tokens of loss_t) / length_normaliser",
    source=(
        "Back to basics (arXiv 2402.14740), the RLOO estimator, divided by a constant; the KL is "
        "in its reward, too."
    ),
    **WITHIN_GROUP,
    one_update="its loss has no ratio, so that what later optimizer steps do would count as "
    "on-policy",
    policy_loss=f"{LOSSES}:reinforce_loss",
    settings={
        "baseline": "leave_one_out",
        "normalise_std": False,
        "aggregation": "constant_length",
        "kl_placement": "reward",
        "kl_estimator": "k1",
    },
    notes="The paper has no deviation. With `normalise_std` it is the whole prompt group's around "
    "its mean; AReaL's is around the means of the "
    "others, n / (n - 1) times as large; NeMo-RL leaves the sample out of its deviation, "
    "too, which is 0 for the one success of a group: "
    '`normalise_std = "leave_one_out"`. '
    "TRL's RLOOTrainer normalises over the batch instead: "
    '`whiten_advantages = "samples"`. There is no ratio in the loss: with samples of older '
    'policies set `old_logprobs = "trainer"` and a correction.',
)

OPO = AlgorithmSpec(
    name="opo",
    summary=(
        "REINFORCE on samples of the newest policy, with the prompt group's mean reward weighted "
        "by length as baseline."
    ),
    formula="A_i = R_i - (sum over j of l_j R_j) / (sum over j of l_j),  l_j the loss tokens of "
    "sample j of the prompt group\n"
    "loss_t = -r_t A,  r_t = exp(lp_t - lo_t)\nL = mean over the step's tokens",
    source="OPO: On-policy RL with optimal reward baseline (arXiv 2505.23585): the baseline of "
    "least variance where a gradient's squared norm "
    "grows with length; neither KL nor entropy.",
    advantage=f"{ADVANTAGES}:opo_advantages",
    policy_loss=f"{LOSSES}:importance_sampling_loss",
    notes="The paper trains each batch once, exactly on-policy: `max_staleness = 0` is its "
    "setting, where the ratio is 1. A lone sample gets 0 "
    "here; in verl it keeps its reward.",
)

MAXRL = AlgorithmSpec(
    name="maxrl",
    summary=(
        "Group-relative advantages divided by the prompt group's mean reward: towards maximum "
        "likelihood, hard prompts weigh more."
    ),
    formula=(
        f"A = (R - mean(R)) / mean(R) within the prompt group, 0 where mean(R) = 0\n{CLIPPED}\nL "
        "= mean over the step's tokens"
    ),
    source=(
        "MaxRL: Maximum likelihood reinforcement learning (arXiv 2602.02710), algorithm 1, with "
        "PPO's clipped ratio as in its authors' code."
    ),
    advantage=f"{ADVANTAGES}:maxrl_advantages",
    policy_loss=f"{LOSSES}:ppo_clip_loss",
    loss_settings=CLIP,
    settings=USUAL_CLIP,
    excluded={
        "overlong_ratio": "a penalty makes rewards negative, and the mean no pass rate",
        "kl_placement": "KL in the reward makes it negative, and the mean no pass rate",
    },
    notes="Rewards are at least 0, 1 for right and 0 for wrong in the paper; a prompt group with a "
    "negative one fails. A lone sample gets 0 here; "
    "in the authors' code its mean is taken for 0, and its reward is divided by 1e-6.",
)

REINFORCE_PLUS_PLUS = AlgorithmSpec(
    name="reinforce_plus_plus",
    summary=(
        "Rewards as they are, less the KL of the tokens to come, normalised over the whole step; "
        "PPO's clipped ratio."
    ),
    formula="G_t = sum over u >= t of gamma^(u - t) r_u,  r_u = -kl_coefficient KL_u, and what was "
    "earned at u besides\n"
    "A_t = (G_t - mean) / (std + 1e-8) over all tokens of the step\n"
    f"{CLIPPED}, with A_t\nL = mean over the step's tokens",
    source="REINFORCE++ (arXiv 2501.03262), for any number of samples of a prompt.",
    advantage="relax_events.algorithms.gae:discounted_returns",
    advantage_settings=("gamma",),
    by_token=True,
    policy_loss=f"{LOSSES}:ppo_clip_loss",
    loss_settings=CLIP,
    settings={
        "gamma": 1.0,
        **USUAL_CLIP,
        "whiten_advantages": "tokens",
        "kl_placement": "reward",
        "kl_estimator": "k1",
    },
    reward_kl="token",
)

REINFORCE_PLUS_PLUS_BASELINE = AlgorithmSpec(
    name="reinforce_plus_plus_baseline",
    summary=(
        "Rewards centred in the prompt group, then normalised over the whole step; PPO's clipped "
        "ratio."
    ),
    formula="A = R - mean(R) within the prompt group\nA' = (A - mean) / (std + 1e-8) "
    "over all tokens of the step\n"
    f"{CLIPPED}, with A'\nL = mean over the step's tokens",
    source=(
        "REINFORCE++ (arXiv 2501.03262), the variant with baseline; its KL is a k2 term of the "
        "loss."
    ),
    advantage=f"{ADVANTAGES}:centred_advantages",
    policy_loss=f"{LOSSES}:ppo_clip_loss",
    loss_settings=CLIP,
    settings={
        **USUAL_CLIP,
        "whiten_advantages": "tokens",
        "kl_estimator": "k2",
    },
)

PPO = AlgorithmSpec(
    name="ppo",
    summary=(
        "A critic predicts the return from each token; the advantage is the return minus that "
        "prediction, and PPO's ratio is clipped."
    ),
    formula="d_t = r_t + gamma V_t+1 - V_t,  r_t = -kl_coefficient KL_t, plus the reward at t; "
    " V = 0 behind the last token\n"
    "A_t = sum over u >= t of (gamma gae_lambda)^(u - t) d_u\nA'_t = (A_t - mean) / (std + "
    "1e-8) over all tokens of the step\n"
    f"{CLIPPED}, with A'_t\nL = mean over the step's tokens\n"
    "critic: L_V = mean, as L, of max((V - G)^2, (clip(V, Vo - value_clip, Vo + value_clip) - "
    "G)^2) / 2,  G_t = A_t + Vo_t, Vo as recorded",
    source="PPO (arXiv 1707.06347), equations 7 and 11; GAE (arXiv 1506.02438); gamma, gae_lambda, "
    "whitening, value clipping: "
    "the N+ implementation details of RLHF with PPO (arXiv 2403.17031).",
    advantage="relax_events.algorithms.gae:gae_advantages",
    advantage_settings=(
        "gamma",
        "gae_lambda",
        "bootstrap_truncated",
        "length_adaptive_alpha",
        "turn_gamma",
    ),
    policy_loss=f"{LOSSES}:ppo_clip_loss",
    loss_settings=CLIP,
    settings={
        "gamma": 1.0,
        "gae_lambda": 0.95,
        "turn_gamma": 0.0,
        "length_adaptive_alpha": 0.0,
        "bootstrap_truncated": False,
        **USUAL_CLIP,
        "whiten_advantages": "tokens",
        "kl_placement": "reward",
        "kl_estimator": "k1",
    },
    reward_kl="token",
    notes="The critic's own settings are in `[critic]`. For the KL in the reward the last of "
    "these papers takes `kl_coefficient = 0.05`. "
    "A sample that was cut off by its length ends like any other, unless "
    "`bootstrap_truncated` puts the value at its last loss token in the "
    "place of the return after it. VAPO (arXiv 2504.05118) has `critic_gae_lambda = 1`, "
    "`length_adaptive_alpha = 0.05` and `clip_high = 0.28`; "
    "its loss on right answers besides is not built. With `turn_gamma` above 0 it is the "
    "bi-level GAE of VAGEN (arXiv 2510.16907): at the last "
    "token of a turn A = d + turn_gamma gae_lambda A of the next turn's, d = r + turn_gamma "
    "V of the next turn's - V; the other tokens of the turn "
    "continue from there, by gamma. A token's reward before its turn's end counts within "
    "that turn alone.",
)

GDPO = AlgorithmSpec(
    name="gdpo",
    summary=(
        "Several rewards: each component is normalised in the prompt group by itself, then they "
        "are summed and normalised over the step."
    ),
    formula="A_k = (R_k - mean(R_k)) / (std(R_k) + 1e-6) within the prompt group, "
    "for each component k\n"
    "A = sum over k of reward_weights_k A_k\nA' = (A - mean) / (std + 1e-8) over all "
    f"samples of the step\n{CLIPPED}, with A'\n"
    "L = mean over the step's tokens",
    source="GDPO (arXiv 2601.05242), section 3.",
    advantage=f"{ADVANTAGES}:gdpo_advantages",
    advantage_settings=("normalise_std", "std_correction", "reward_weights"),
    policy_loss=f"{LOSSES}:ppo_clip_loss",
    loss_settings=CLIP,
    settings={
        "normalise_std": True,
        "reward_weights": {},
        **USUAL_CLIP,
        "whiten_advantages": "samples",
    },
    excluded={
        "overlong_ratio": "a penalty is not one of the components that are normalised separately",
        "kl_placement": "there is no one reward to take the KL off",
    },
    components=True,
)

OPD = AlgorithmSpec(
    name="opd",
    summary=(
        "On-policy distillation: the teacher's log-probability of each token that the policy "
        "sampled, instead of a reward."
    ),
    formula="A_t = -distill_coefficient * (lo_t - lq_t),  lq the teacher's log-probability of the "
    "token\n"
    "loss_t = -r_t A_t,  r_t = exp(lp_t - lo_t)\nL = mean over the step's tokens",
    source="On-Policy Distillation (thinkingmachines.ai/blog/on-policy-distillation, 2025): "
    "reverse KL of each token by itself, without "
    "those to come. The same divergence: MiniLLM (arXiv 2306.08543); others on the policy's "
    "own samples: GKD (arXiv 2306.13649).",
    advantage=f"{ADVANTAGES}:zeros",
    policy_loss=f"{LOSSES}:importance_sampling_loss",
    settings={"distill_coefficient": 1.0, "distill_placement": "advantage"},
    excluded={
        "filter_uniform_rewards": "no reward counts",
        "overlong_ratio": "there is no reward to take a penalty off",
        "kl_placement": "there is no reward to take the KL off",
    },
    notes='With `distill_placement = "loss"` it is GKD on the policy\'s own samples: any '
    "divergence, over a set of tokens. Rewards are still "
    "scored and reported.",
)

NOT_REWARDED = dict.fromkeys(
    (
        "overlong_ratio",
        "overlong_penalty",
        "truncated_samples",
        "min_samples_per_group",
        "filter_uniform_rewards",
        "whiten_advantages",
        "kl_placement",
    ),
    "there are no rewards",
)
NOT_SAMPLED = dict.fromkeys(
    (
        "old_logprobs",
        "correction",
        "rejection",
        "veto_low",
        "veto_high",
        "opsm_threshold",
        "m2_threshold",
        "distill_coefficient",
    ),
    "the tokens are from the data, not from a policy",
)

SFT = AlgorithmSpec(
    name="sft",
    summary="Supervised fine-tuning: the data's answers, token by token.",
    formula="loss_t = -lp_t\nL = mean over the step's tokens",
    source=(
        "Cross-entropy over the assistant's tokens alone, as in InstructGPT (arXiv 2203.02155), "
        "section 3.5."
    ),
    advantage=f"{ADVANTAGES}:ones",
    policy_loss=f"{LOSSES}:reinforce_loss",
    settings={"old_logprobs": "trainer"},
    excluded={
        **NOT_REWARDED,
        **NOT_SAMPLED,
        "kl_coefficient": "the data's tokens estimate no divergence of the policy",
    },
    learns_from="answers",
    notes="The loss is the mean negative log-likelihood of an answer token, in nats; its "
    "exponential is the perplexity. Rows bring the answers "
    "by `data.completion_key` or `data.conversation_key`; without either the reference "
    "answer is learned.",
)

OF_PAIRS: dict[str, Any] = {
    "advantage": f"{ADVANTAGES}:ones",
    "excluded": {
        **NOT_REWARDED,
        **NOT_SAMPLED,
        "kl_coefficient": "beta is what keeps the policy near the reference",
        "aggregation": "the loss is one of pairs",
    },
    "learns_from": "pairs",
    "reference": True,
    "whole_prompt_groups": True,
    "metrics": ("preference_accuracy", "reward_margin", "chosen_reward", "rejected_reward"),
    "notes": "The rewards that a step reports are those that the policy implies: beta (lp - ref) "
    "of an answer. Rows bring the pairs by "
    "`data.chosen_key` and `data.rejected_key`.",
}
OF_ANSWERS = (
    "lp and ref summed over the tokens of the chosen (c) and the rejected (r) answer, or their "
    "means with length_normalised"
)

DPO = AlgorithmSpec(
    name="dpo",
    summary=(
        "Direct preference optimisation: the chosen answer of each pair becomes likelier than "
        "the rejected one, against the reference model."
    ),
    formula=f"h = beta ((lp_c - ref_c) - (lp_r - ref_r)),  {OF_ANSWERS}\n"
    "loss = -(1 - label_smoothing) log sigmoid(h) - label_smoothing log sigmoid(-h) - "
    "nll_coefficient * mean of lp_c\n"
    "L = mean over the step's pairs",
    source="DPO (arXiv 2305.18290), equation 7; beta: appendix B. Label smoothing: cDPO, in the "
    "same authors' code. Length-normalised: Tulu 3 "
    "(arXiv 2411.15124), section 5.1. Negative log-likelihood: Iterative reasoning "
    "preference optimization (arXiv 2404.19733), equation 1.",
    policy_loss=f"{PREFERENCES}:dpo_loss",
    loss_settings=("dpo_beta", "label_smoothing", "length_normalised", "nll_coefficient"),
    settings={
        "dpo_beta": 0.1,
        "label_smoothing": 0.0,
        "length_normalised": False,
        "nll_coefficient": 0.0,
        "aggregation": "sample_mean",
        "old_logprobs": "trainer",
    },
    **OF_PAIRS,
)

IPO = AlgorithmSpec(
    name="ipo",
    summary=(
        "Identity preference optimisation: a margin between the chosen and the rejected answer "
        "is reached and kept, however sure the pairs are."
    ),
    formula=(
        f"h = (lp_c - ref_c) - (lp_r - ref_r),  {OF_ANSWERS}\nloss = (h - 1 / (2 beta))^2\nL = "
        "mean over the step's pairs"
    ),
    source="IPO: A general theoretical paradigm to understand learning from human preferences "
    "(arXiv 2310.12036), equation 17, beta its tau; "
    "means over the tokens: as TRL's DPO trainer has it, the equation has sums.",
    policy_loss=f"{PREFERENCES}:ipo_loss",
    loss_settings=("dpo_beta", "length_normalised"),
    settings={
        "dpo_beta": 0.1,
        "length_normalised": True,
        "aggregation": "sample_mean",
        "old_logprobs": "trainer",
    },
    **OF_PAIRS,
)
