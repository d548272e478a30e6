"""How many mathematical answers are judged in a second, killable each, and beside math-verify as it
is called without a pool.

python -m benchmarks.rewards
"""

from __future__ import annotations

import logging
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from math_verify import parse, verify

from benchmarks import report
from relax_events.config import RewardConfig
from relax_events.rewards.pool import RewardItem, RewardPool
from relax_events.rewards.scores import Score
from relax_events.rewards.verifiers.math_answers import math

NUM_PROMPTS, SAMPLES_PER_PROMPT = 250, 8
NUM_FORKED, NUM_STARTED = 200, 4
NUM_ROUNDS = 3
GOAL_PER_SECOND = 500
THINKING = "Let us take this step by step, and check each of them before the next one. " * 25
QUESTION = f"""{NUM_PROMPTS} prompts with {SAMPLES_PER_PROMPT} answers of about 2,000 characters each, about half of them right: half of the prompts
have integers, a quarter decimals and fractions, a quarter roots and polynomials that need algebra. Ours is the reward `math` in
its child processes, each call with a time and a memory limit. Beside it math-verify {version("math-verify")} in three ways:
in the caller's own process with its alarm signal, which neither ends a call that is stuck in one operation nor survives a crash;
in a process forked for each call; in a process started for each call. Medians of {NUM_ROUNDS} rounds, sides in turn."""
STATED = {
    "in a box": r"So the answer is $\boxed{{{n}}}$.",
    'behind "answer is"': "So the answer is {n}.",
    'behind "answer is", as a formula with a unit': "So the answer is ${n}$ dollars.",
    "as the last number": "So we get {n} apples.",
}
"""How an integer may be stated; math-verify searches for the last two."""
NUM_STATED = 1000
STARTED = (
    "import sys\nfrom math_verify import parse, verify\nprint(verify(parse(sys.argv[1]), "
    "parse(sys.stdin.read())))"
)


def answers(seed: int = 0) -> list[RewardItem]:
    """Make the answers; the same each time."""
    chance = random.Random(seed)
    items = []
    for prompt in range(NUM_PROMPTS):
        wanted, same, other = problem(prompt % 8, chance.randint(2, 99))
        for sample in range(SAMPLES_PER_PROMPT):
            given = same if chance.random() < 0.5 else other
            items.append(
                RewardItem(
                    f"{prompt}/{sample}",
                    rf"{THINKING}So the answer is $\boxed{{{given}}}$.",
                    f"${wanted}$",
                )
            )
    return items


def problem(kind: int, n: int) -> tuple[str, str, str]:
    """Return a reference, an answer that equals it, and one that does not."""
    if kind < 4:
        return str(n), str(n), str(n + 1)
    if kind == 4:
        return (
            rf"\frac{{{n}}}{{{n + 1}}}",
            rf"\dfrac{{{2 * n}}}{{{2 * n + 2}}}",
            rf"\frac{{{n}}}{{{n + 2}}}",
        )
    if kind == 5:
        return f"{n / 4}", rf"\frac{{{n}}}{{4}}", f"{n / 5}"
    if kind == 6:
        return rf"{n}\sqrt{{2}}", rf"\sqrt{{{2 * n * n}}}", rf"{n}\sqrt{{3}}"
    return f"x^2+{n}x", f"x(x+{n})", f"x^2-{n}x"


def main() -> None:
    """Measure all sides in turn and write the page."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    items, load = answers(), os.getloadavg()[0]
    sides: dict[str, Callable[[], tuple[float, list[float]]]] = {
        "ours, 1 child process": lambda: pooled(items, 1),
        "ours, 2 child processes": lambda: pooled(items, 2),
        "math-verify in the caller's process": lambda: in_process(items),
        "math-verify, forked for each call": lambda: forked(items[:: len(items) // NUM_FORKED]),
        "math-verify, started for each call": lambda: started(items[:: len(items) // NUM_STARTED]),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    verdicts: dict[str, list[float]] = {}
    for _ in range(NUM_ROUNDS):
        for name, measure in sides.items():
            rate, verdicts[name] = measure()
            rates[name].append(rate)
    ours, theirs = (
        verdicts["ours, 2 child processes"],
        verdicts["math-verify in the caller's process"],
    )
    num_apart = sum(mine != other for mine, other in zip(ours, theirs, strict=True))
    best = statistics.median(rates["ours, 2 child processes"])
    reached = "reached" if best >= GOAL_PER_SECOND else "missed"
    report.write(
        "rewards",
        title="Mathematical answers a second",
        question=" ".join(QUESTION.split()),
        command="python -m benchmarks.rewards",
        tables={
            "Answers in boxes": [
                {
                    "side": name,
                    "answers/s": f"{statistics.median(found):,.1f}",
                    "can be killed": "no" if "caller" in name else "yes",
                }
                for name, found in rates.items()
            ],
            "Integers, ours, by the way they are stated": [
                {"stated": name, "answers a CPU second": f"{stated_rate(ending):,.0f}"}
                for name, ending in STATED.items()
            ],
        },
        conclusion=f"Other programs gave the machine a load average of {load:.0f} before the first "
        "round. "
        f"The goal of {GOAL_PER_SECOND} answers a second on two cores is {reached}: {best:.0f}. "
        f"Of {len(ours)} verdicts {num_apart} differ from math-verify's.",
        data=rates,
    )


def stated_rate(ending: str) -> float:
    """Return how many integers, half of them right, are judged in a second of the processor, in
    this process; the best of the rounds."""
    best = 0.0
    for turn in range(NUM_ROUNDS):
        numbers = range(turn * NUM_STATED, (turn + 1) * NUM_STATED)  # no answer is judged twice
        started_at = time.process_time()
        for n in numbers:
            math(THINKING + ending.format(n=n), answer=str(n + n % 2), metadata={}, prompt="")
        best = max(best, NUM_STATED / (time.process_time() - started_at))
    return best


def pooled(items: list[RewardItem], num_processes: int) -> tuple[float, list[float]]:
    """Score with the reward pool, warm as it is in a run."""
    with RewardPool(RewardConfig(function="math", processes=num_processes)) as pool:
        pool.score_batch(items[:64])
        started_at = time.perf_counter()
        results = pool.score_batch(items)
        seconds = time.perf_counter() - started_at
    return len(items) / seconds, [
        result.reward if isinstance(result, Score) else float("nan") for result in results
    ]


def in_process(items: list[RewardItem]) -> tuple[float, list[float]]:
    """Call math-verify in this process, with its own limit of time."""
    judge(items[0])
    started_at = time.perf_counter()
    verdicts = [judge(item) for item in items]
    return len(items) / (time.perf_counter() - started_at), verdicts


def forked(items: list[RewardItem]) -> tuple[float, list[float]]:
    """Call math-verify in a process forked for each call."""
    started_at = time.perf_counter()
    verdicts = []
    for item in items:
        if (child := os.fork()) == 0:
            os._exit(int(judge(item)))
        verdicts.append(float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    return len(items) / (time.perf_counter() - started_at), verdicts


def started(items: list[RewardItem]) -> tuple[float, list[float]]:
    """Call math-verify in a process started for each call."""
    started_at = time.perf_counter()
    verdicts = []
    for item in items:
        command: list[Any] = [sys.executable, "-c", STARTED, item.answer]
        done = subprocess.run(
            command, input=item.completion, capture_output=True, text=True, check=True, timeout=120
        )
        verdicts.append(float(done.stdout.strip() == "True"))
    return len(items) / (time.perf_counter() - started_at), verdicts


def judge(item: RewardItem) -> float:
    """Judge an answer as math-verify's own page shows it."""
    return float(verify(parse(item.answer), parse(item.completion)))


if __name__ == "__main__":
    main()
