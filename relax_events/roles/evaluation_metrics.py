"""Compute the metrics of an evaluation sample by sample, in the memory of a few numbers per
prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


def pass_at_k(num_samples: int, num_passed: int, *, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples passes.

    It is 1 - C(n - c, k) / C(n, k).

    Args:
        num_samples: n, the number of samples of the prompt.
        num_passed: c, the number of samples that pass.
        k: Number of samples in question, at most n.
    Raises:
        ValueError: The numbers don't fit together.
    Source: Chen et al., Evaluating Large Language Models Trained on Code (arXiv 2107.03374),
    section 2.1.
    """
    if not 0 <= num_passed <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@k needs 0 <= passed <= samples and 1 <= k <= samples, got {num_passed} of "
            f"{num_samples} and k = {k}"
        )
    failed = num_samples - num_passed
    return 1.0 - math.comb(failed, k) / math.comb(num_samples, k)


@dataclass(slots=True)
class PromptResults:
    """Counts and rewards of one prompt's samples."""

    num_scored: int = 0
    num_passed: int = 0
    reward_sum: float = 0.0


@dataclass(slots=True)
class EvaluationResults:
    """Counts and rewards of all prompts' samples. Samples that could not be scored count only as
    such.
    """

    pass_reward: float
    prompts: dict[int, PromptResults] = field(default_factory=dict)
    num_samples: int = 0
    num_tokens: int = 0
    num_truncated: int = 0
    num_unscored: int = 0
    num_failed_prompts: int = 0

    def add_sample(
        self, row: int, *, reward: float | None, num_tokens: int, is_truncated: bool
    ) -> None:
        """Add a sample.

        Args:
            row: The row of its prompt.
            reward: None where the reward function failed.
            num_tokens: Length of the completion.
            is_truncated: Whether it ended at the length limit.
        """
        self.num_samples += 1
        self.num_tokens += num_tokens
        self.num_truncated += is_truncated
        if reward is None:
            self.num_unscored += 1
            return
        prompt = self.prompts.setdefault(row, PromptResults())
        prompt.num_scored += 1
        prompt.num_passed += reward >= self.pass_reward
        prompt.reward_sum += reward

    def pass_at(self, ks: Sequence[int]) -> Mapping[str, float]:
        """Return pass@k by k, written in decimal: the mean over the prompts with at least k scored
        samples. A k without such prompts is left out.
        """
        estimated = {}
        for k in ks:
            estimates = [
                pass_at_k(one.num_scored, one.num_passed, k=k)
                for one in self.prompts.values()
                if one.num_scored >= k
            ]
            if estimates:
                estimated[str(k)] = math.fsum(estimates) / len(estimates)
        return estimated

    @property
    def prompt_rewards(self) -> list[float]:
        """Mean reward of each prompt that has scored samples."""
        return [one.reward_sum / one.num_scored for one in self.prompts.values()]

    @property
    def reward_mean(self) -> float | None:
        """Mean over prompts; None when nothing was scored."""
        rewards = self.prompt_rewards
        return math.fsum(rewards) / len(rewards) if rewards else None

    @property
    def reward_stderr(self) -> float | None:
        """Standard error of `reward_mean` over prompts, by the deviation with n - 1; None with
        fewer than two.
        """
        rewards, mean = self.prompt_rewards, self.reward_mean
        if mean is None or len(rewards) < 2:
            return None
        return math.sqrt(
            math.fsum((reward - mean) ** 2 for reward in rewards)
            / (len(rewards) - 1)
            / len(rewards)
        )

    @property
    def completion_tokens_mean(self) -> float | None:
        """Mean length of the completions; None when there are none."""
        return self.num_tokens / self.num_samples if self.num_samples else None
