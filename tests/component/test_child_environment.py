"""Environment variables of child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax_events.config import RewardConfig
from relax_events.confinement.variables import build_child_environment
from relax_events.rewards.pool import RewardItem, RewardPool
from relax_events.rewards.scores import Score

SECRETS = (
    "AWS_SECRET_ACCESS_KEY",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "RELAX_NOTIFICATION_URLS",
    "BROKER_PASSWORD",
    "SCHEMA_REGISTRY_LOGIN",
    "MY_OWN",
)


@pytest.fixture
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("JUDGE_TOKEN", "y")


@pytest.mark.usefixtures("_secrets")
def test_children_inherit_no_secrets() -> None:
    found = build_child_environment()
    assert not found.keys() & {*SECRETS, "JUDGE_TOKEN"}
    assert {"PATH", "HOME", "OMP_NUM_THREADS"} <= found.keys()
    assert build_child_environment(["JUDGE_TOKEN"])["JUDGE_TOKEN"] == "y"
    assert build_child_environment(prefixes=("WANDB_",))["WANDB_API_KEY"] == "x"


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://me:hunter2@proxy:3128", "http://proxy:3128"),
        ("http://me:hun/t@er2@proxy:3128/", "http://proxy:3128/"),
        ("me:hunter2@proxy:3128", "proxy:3128"),
        ("//token@proxy", "//proxy"),
        ("http://proxy:3128", "http://proxy:3128"),
    ],
)
def test_children_get_proxies_without_their_login(
    monkeypatch: pytest.MonkeyPatch, address: str, shown: str
) -> None:
    names = ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy")
    for name in names:
        monkeypatch.setenv(name, address)
    assert {build_child_environment()[name] for name in names} == {shown}
    assert build_child_environment(["HTTPS_PROXY"])["HTTPS_PROXY"] == address


@pytest.mark.usefixtures("_secrets")
def test_reward_config_collects_variables_named_in_the_run_file() -> None:
    config = RewardConfig(
        function="genrm",
        options={"url": "http://127.0.0.1:1", "token_variable": "JUDGE_TOKEN"},
        environment=("MY_OWN",),
    )
    assert config.variables == {"JUDGE_TOKEN", "MY_OWN"}


@pytest.mark.usefixtures("_secrets")
def test_reward_function_sees_named_variables_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\ndef score(completion, *, answer, metadata, prompt):\n    return "
        f"float(len({set(SECRETS)!r} & set(os.environ)))\n"
    )
    pool = RewardPool(RewardConfig(function=f"{file}:score", environment=("MY_OWN",), processes=1))
    try:
        (result,) = pool.score_batch([RewardItem("1", "")])
    finally:
        pool.close()
    assert isinstance(result, Score)
    assert result.reward == 1.0


def test_reward_function_can_not_read_the_variables_of_its_worker(tmp_path: Path) -> None:
    """Those that the worker was started with stand in its memory from the first instruction on."""
    (tmp_path / "mine.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "def score(completion):\n"
        "    try:\n"
        "        said = Path(f'/proc/{os.getppid()}/environ').read_bytes()\n"
        "    except OSError:\n"
        "        said = b''\n"
        "    return float(b'AWS_SECRET_ACCESS_KEY' in said)\n"
    )
    program = (
        "from relax_events.config import RewardConfig\n"
        "from relax_events.rewards.pool import RewardItem, RewardPool\n"
        f"config = RewardConfig(function={str(tmp_path / 'mine.py')!r} + ':score', processes=1)\n"
        "with RewardPool(config) as pool:\n"
        "    print(pool.score_batch([RewardItem('1', '')])[0].reward)\n"
    )
    variables = {**os.environ, "AWS_SECRET_ACCESS_KEY": "x"}
    said = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, check=True
    )
    assert said.stdout.split() == [b"0.0"], said.stderr.decode()
