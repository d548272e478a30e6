"""The reward pool: order, speed, and every failure of user code."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from relax_events.config import RewardConfig
from relax_events.confinement import Profile
from relax_events.confinement.prints import BURST_BYTES
from relax_events.errors import ConfigError, RewardError
from relax_events.rewards.pool import RewardItem, RewardPool
from relax_events.rewards.scores import Score

USER_FILE = """
import os, signal, sys, threading

LEAKED = []

def score(completion, *, answer, metadata, prompt):
    print("noise on stdout")
    if completion == "hang":
        threading.Event().wait()
    if completion == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "leave":
        os._exit(9)
    if completion == "exit":
        sys.exit(3)
    if completion == "raise":
        raise KeyError("colour")
    if completion == "nan":
        return float("nan")
    if completion == "text":
        return "1"
    if completion == "memory":
        return len(bytearray(10**10))
    if completion == "leak":
        LEAKED.append(bytearray(25 * 10**7))
    if completion == "power":
        return 9**9**9**9
    if completion == "read":
        return len(sys.stdin.read())
    if completion == "pid":
        return os.getpid()
    if completion == "parts":
        return {"form": metadata["form"], "content": len(prompt)}
    return float(completion == answer)
"""


@pytest.fixture
def function(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(USER_FILE)
    return f"{tmp_path / 'mine.py'}:score"


@pytest.fixture
def pool(function: str) -> Iterator[RewardPool]:
    with RewardPool(RewardConfig(function=function, timeout_seconds=100, processes=2)) as pool:
        yield pool


@pytest.fixture
def hasty_pool(function: str) -> Iterator[RewardPool]:
    """For calls that never end; others end in time unless the machine stands still."""
    with RewardPool(RewardConfig(function=function, timeout_seconds=4, processes=2)) as pool:
        yield pool


def items(*completions: str) -> list[RewardItem]:
    return [
        RewardItem(f"sample-{number}", completion, "good")
        for number, completion in enumerate(completions)
    ]


def rewards(results: list[Score | RewardError]) -> list[float | None]:
    return [result.reward if isinstance(result, Score) else None for result in results]


def test_pool_keeps_the_order_of_many_items(pool: RewardPool) -> None:
    completions = ["good" if number % 3 == 0 else "bad" for number in range(1000)]
    assert rewards(pool.score_batch(items(*completions))) == [
        float(number % 3 == 0) for number in range(1000)
    ]
    assert pool.score_batch([]) == []


def test_pool_uses_all_its_processes(pool: RewardPool) -> None:
    pids = {
        result.reward
        for result in pool.score_batch(items(*["pid"] * 64))
        if isinstance(result, Score)
    }
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_pool_passes_prompt_and_metadata_and_returns_components(pool: RewardPool) -> None:
    (result,) = pool.score_batch(
        [RewardItem("a", "parts", metadata='{"form": 0.5}', prompt="four")]
    )
    assert isinstance(result, Score)
    assert (result.reward, result.components) == (4.5, {"form": 0.5, "content": 4.0})
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("die", r"died \(signal SIGSEGV\) on sample sample-1$"),
        ("leave", r"died \(exit code 9\) on sample sample-1$"),
        ("exit", r"raised SystemExit: 3 \(.*mine.py:15\) on sample sample-1$"),
        ("raise", r"raised KeyError: 'colour' \(.*mine.py:17\) on sample sample-1$"),
        ("nan", r"returned 'reward': nan; rewards must be within \+-3.4e38 on sample sample-1$"),
        (
            "text",
            r"returned 'reward': '1' \(str\); it must return a number or a dict of numbers on sample sample-1$",
        ),
        ("memory", r"raised MemoryError"),
    ],
)
def test_pool_counts_a_failure_against_its_sample_alone(
    pool: RewardPool, completion: str, text: str
) -> None:
    check_failure(pool, completion, text)


@pytest.mark.parametrize("completion", ["hang", "power"])
def test_pool_counts_a_late_call_against_its_sample_alone(
    hasty_pool: RewardPool, completion: str
) -> None:
    text = r"took longer than 4 s \(reward.timeout_seconds\) on sample sample-1$"
    check_failure(hasty_pool, completion, text)


def check_failure(pool: RewardPool, completion: str, text: str) -> None:
    results = pool.score_batch(items("good", completion, "good", "good", "bad"))
    assert rewards(results) == [1.0, None, 1.0, 1.0, 0.0]
    with pytest.raises(RewardError, match=text):
        raise next(result for result in results if isinstance(result, RewardError))


def test_pool_does_not_blame_a_sample_for_memory_that_another_leaked(function: str) -> None:
    with RewardPool(RewardConfig(function=function, memory_bytes=600 * 1024**2)) as pool:
        assert rewards(pool.score_batch(items(*["leak", "good"] * 3))) == [0.0, 1.0] * 3


def test_reward_function_cannot_read_the_request_pipe(pool: RewardPool) -> None:
    assert rewards(pool.score_batch(items("read", "good", "read", "good"))) == [0.0, 1.0, 0.0, 1.0]


def test_pool_continues_after_many_failures(pool: RewardPool) -> None:
    assert (
        rewards(pool.score_batch(items(*["die", "good", "leave", "raise"] * 5)))
        == [None, 1.0, None, None] * 5
    )
    assert rewards(pool.score_batch(items("good"))) == [1.0]


def test_pool_restarts_a_child_killed_between_batches(pool: RewardPool) -> None:
    pids = {
        int(result.reward)
        for result in pool.score_batch(items(*["pid"] * 64))
        if isinstance(result, Score)
    }
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    results = pool.score_batch(items(*["good"] * 64))
    # Each of the two children can take at most the call at its head with it.
    assert sum(result.reward for result in results if isinstance(result, Score)) >= 62


def test_pool_scores_completions_larger_than_a_pipe(pool: RewardPool) -> None:
    large = "x" * 300_000
    batch = [RewardItem(f"{number}", large, large) for number in range(40)]
    assert rewards(pool.score_batch(batch)) == [1.0] * 40


def test_pool_reports_progress_for_calls_that_hang(hasty_pool: RewardPool) -> None:
    answers: list[int] = []
    results = hasty_pool.score_batch(items(*["hang"] * 6), on_answer=lambda: answers.append(1))
    assert rewards(results) == [None] * 6
    assert len(answers) >= 3, (
        "two children hang at a time, and no caller waits for the last of them"
    )


def test_pool_uses_one_process_per_core_up_to_a_maximum_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relax_events.config.reward.os.sched_getaffinity", lambda _: range(5))
    assert (RewardConfig().num_processes, RewardConfig(processes=3).num_processes) == (5, 3)
    monkeypatch.setattr("relax_events.config.reward.os.sched_getaffinity", lambda _: range(128))
    assert RewardConfig().num_processes == 8


def test_pool_names_its_function_and_version(pool: RewardPool, function: str) -> None:
    assert pool.name == function
    assert len(pool.digest) == 64


def test_pool_refuses_a_function_that_changed_during_the_run(
    pool: RewardPool, function: str
) -> None:
    Path(function.removesuffix(":score")).write_text(USER_FILE + "\n# another version\n")
    with pytest.raises(ConfigError, match="changed during the run"):
        pool.score_batch(items("good"))


def test_pool_accepts_a_reward_file_rewritten_with_the_same_content(
    pool: RewardPool, function: str
) -> None:
    version = pool.digest
    Path(function.removesuffix(":score")).write_text(USER_FILE)
    assert rewards(pool.score_batch(items("good"))) == rewards(pool.score_batch(items("good")))
    assert pool.digest == version


def test_pool_reports_when_the_file_of_its_function_is_missing(
    pool: RewardPool, function: str
) -> None:
    Path(function.removesuffix(":score")).unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        pool.score_batch(items("good"))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def score(:\n", "syntax error in line 1"),
        ("def other(): pass\n", "has no function 'score', only other"),
        ("import os\nos._exit(4)\n", r"died \(exit code 4\) before it was loaded"),
        ("memory = bytearray(10**10)\n", "MemoryError"),
    ],
)
def test_pool_does_not_start_with_a_function_that_can_not_be_loaded(
    tmp_path: Path, source: str, text: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=text):
        RewardPool(RewardConfig(function=f"{tmp_path / 'mine.py'}:score", processes=2))


def test_pool_ends_its_children_when_it_is_closed(function: str) -> None:
    with RewardPool(RewardConfig(function=function)) as pool:
        (result,) = pool.score_batch(items("pid"))
    assert isinstance(result, Score)
    assert not psutil.pid_exists(int(result.reward))


def test_child_ends_with_its_parent_even_in_a_call_that_hangs(function: str) -> None:
    program = (
        "import sys\nfrom relax_events.config import RewardConfig\nfrom "
        "relax_events.rewards.pool import RewardItem, RewardPool\n"
        f"pool = RewardPool(RewardConfig(function={function!r}, timeout_seconds=600))\n"
        "print(int(pool.score_batch([RewardItem('a', 'pid')])[0].reward), flush=True)\n"
        "pool.score_batch([RewardItem('a', 'hang')])\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(timeout=60)


def test_pool_scores_many_samples_together() -> None:
    """Batching makes each call cheap: 8,600 a second on a busy core, against 290 a second one by
    one."""
    batch = [RewardItem(f"{number}", "word", "word", prompt="x" * 200) for number in range(5_000)]
    with RewardPool(RewardConfig(function="exact_match")) as pool:
        assert rewards(pool.score_batch(batch)) == [1.0] * len(batch)

        def seconds_each(batches: list[list[RewardItem]]) -> float:
            started = time.perf_counter()
            for items in batches:
                pool.score_batch(items)
            return (time.perf_counter() - started) / sum(map(len, batches))

        ratios = [
            seconds_each([[item] for item in batch[:100]]) / seconds_each([batch]) for _ in range(3)
        ]
    assert max(ratios) > 4


def test_pool_loads_a_verifier_before_the_first_deadline_runs() -> None:
    metadata = '{"task": "chain_sum", "options": {}, "entry": {"answer": "4", "metadata": {}}}'
    with RewardPool(RewardConfig(function="reasoning_gym", timeout_seconds=2.0)) as pool:
        assert rewards(
            pool.score_batch(
                [RewardItem("a", "4", "4", metadata), RewardItem("b", "5", "4", metadata)]
            )
        ) == [1.0, 0.0]


def test_reward_function_does_not_see_the_broker_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BROKER_PASSWORD", "RELAX_BROKER__PASSWORD_FILE", "RELAX_BROKER__CREDENTIALS"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("OF_THE_USER", "kept")
    looking = tmp_path / "looking.py"
    looking.write_text(
        "import os\n\ndef look(completion, *, answer, metadata, prompt):\n"
        "    return float('OF_THE_USER' in os.environ) - sum('BROKER' in name for name in "
        "os.environ)\n"
    )
    with RewardPool(RewardConfig(function=f"{looking}:look", environment=("OF_THE_USER",))) as pool:
        (score,) = pool.score_batch([RewardItem("a", "b", answer="c", metadata="{}", prompt="d")])
    assert isinstance(score, Score)
    assert score.reward == 1.0


def test_pool_survives_hostile_math_expressions_and_fails_only_their_samples() -> None:
    nasty = [
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{" + "x" * 10_000_000 + "}",
        r"\boxed{" + "(" * 10_000 + ")" * 10_000 + "}",
    ]
    texts = [r"\boxed{42}", *nasty, "x" * 10_000_000 + r"\boxed{42}", r"\boxed{41}"]
    batch = [RewardItem(str(index), text, "42") for index, text in enumerate(texts)]
    with RewardPool(RewardConfig(function="math", timeout_seconds=10)) as pool:
        results = pool.score_batch(batch)
    assert [result.reward if isinstance(result, Score) else None for result in results] == [
        1.0,
        None,
        None,
        None,
        1.0,
        0.0,
    ]


def test_printed_output_of_a_reward_function_is_bounded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "def score(completion, *, answer, metadata, prompt):\n    print('x' * 5_000_000)\n   "
        " print('short ' * 100, '\\n', end='')\n    return 1.0\n"
    )
    with RewardPool(RewardConfig(function=f"{tmp_path / 'mine.py'}:score", processes=1)) as pool:
        assert [
            score
            for score in pool.score_batch(items(*["a"] * 30))
            if isinstance(score, RewardError)
        ] == []
    assert len(capfd.readouterr().err) < 2 * BURST_BYTES


def test_process_of_a_verifier_is_replaced_after_an_unexpected_error_and_not_after_a_refusal() -> (
    None
):
    with RewardPool(RewardConfig(function="reasoning_gym", processes=1)) as pool:
        (before,) = pool._pools[Profile.PURE].pids
        good = '{"task": "chain_sum", "options": {}, "entry": {"answer": "4", "metadata": {}}}'
        refused, right = pool.score_batch(
            [RewardItem("a", "4", "4", "{}"), RewardItem("b", "4", "4", good)]
        )
        assert isinstance(refused, RewardError)
        assert rewards([right]) == [1.0]
        assert pool._pools[Profile.PURE].pids == [before]
        odd = good.replace('"answer": "4"', '"answer": 4')
        unexpected, right = pool.score_batch(
            [RewardItem("a", "4", "4", odd), RewardItem("b", "4", "4", good)]
        )
        assert isinstance(unexpected, RewardError)
        assert rewards([right]) == [1.0]
        assert pool._pools[Profile.PURE].pids != [before]


def test_explanation_of_a_reward_runs_where_the_reward_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "from relax_events.rewards.registry import Explanation, reward\n"
        "def explain(completion, *, answer, metadata, prompt, bonus=0):\n"
        "    return Explanation(answer=str(os.getpid()), location=metadata['at'], why=str(bonus))\n"
        "@reward(explain=explain)\n"
        "def score(completion, *, answer, metadata, prompt, bonus: int = 0):\n"
        "    return 1.0\n"
    )
    config = RewardConfig(
        function=f"{tmp_path / 'mine.py'}:score", options={"bonus": 3}, processes=1
    )
    with RewardPool(config) as pool:
        said = pool.explain(RewardItem("a", "x", metadata='{"at": "here"}'))
        assert said is not None
        assert (said.answer, said.location, said.why) == (
            str(pool._pools[Profile.TRUSTED].pids[0]),
            "here",
            "3",
        )
        with pytest.raises(RewardError, match=r"raised KeyError: 'at'"):
            pool.explain(RewardItem("a", "x"))
