"""The doctor: each check reports its own result, and a failing check stops no other."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from relax_events.config import JudgeConfig, RunConfig
from relax_events.errors import (
    CheckFailed,
    ConfigError,
    EnvironmentProblem,
    ObjectError,
    RewardError,
)
from relax_events.launcher import broker_checks, checks, machine_checks
from relax_events.launcher.broker_checks import check_broker, check_store
from relax_events.launcher.checked_run import CheckedRun
from relax_events.launcher.checks import Check, Finding, Level, check_run
from relax_events.launcher.file_checks import check_data, check_reward
from relax_events.launcher.machine_checks import check_disk
from relax_events.planning.inventory import CheckpointFacts

MakeRunConfig = Callable[..., RunConfig]
DiskUsage = namedtuple("DiskUsage", ["total", "used", "free"])
REWARDS = """
def exact(completion, *, answer, metadata, prompt):
    assert metadata == {"level": 2} and prompt == "two and two?"
    return float(completion == answer)

def strict(completion, *, answer, **reported):
    return 1.0 if completion == answer else -1.0

def fails(completion, *, answer, metadata, prompt):
    raise KeyError("no such score")
"""


@pytest.fixture
def make_data(make_run_config: MakeRunConfig, tmp_path: Path) -> MakeRunConfig:
    """Return a maker of run configurations with one prompt and a file of reward functions."""
    (tmp_path / "rows.jsonl").write_bytes(
        orjson.dumps({"prompt": "two and two?", "answer": "4", "level": 2})
    )
    (tmp_path / "rewards.py").write_text(REWARDS)

    def make(reward_name: str = "exact", **sections: dict[str, object]) -> RunConfig:
        reward = {"function": f"{tmp_path / 'rewards.py'}:{reward_name}", "timeout_seconds": 5}
        return make_run_config(
            **{"data": {"source": f"jsonl:{tmp_path / 'rows.jsonl'}"}, "reward": reward} | sections
        )

    return make


def test_doctor_reports_every_check_even_when_some_fail(make_data: MakeRunConfig) -> None:
    findings, _ = check_run(make_data(engine={"name": "vroom"}))
    file_checks = ["roles", "model", "teacher", "judge", "tensors", "data", "first row", "room"]
    file_checks += ["reward"]
    machine = ["folder", "disk", "hosts", "metrics", "traces", "trackers", "scaling API", "harness"]
    machine += ["walls", "devices"]
    broker = ["broker", "schema registry", "object store", "weights", "followers"]
    assert [finding.what for finding in findings] == [*file_checks, *machine, *broker]
    assert [finding.what for finding in findings if not finding.is_good] == ["roles", "model"]
    assert findings[5] == Finding("data", True, f"1 prompts in {make_data().data.source}")


def test_check_with_missing_package_does_not_stop_other_checks(
    make_data: MakeRunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the image without the model's packages."""

    def no_tokenizer(*_: object, **__: object) -> str:
        raise ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers")

    monkeypatch.setattr(checks, "CHECKS", (Check("room", Level.FILE, no_tokenizer),))
    (room,), _ = check_run(make_data())
    assert room == Finding(
        "room",
        True,
        (
            "not checked: tokenizers is not installed here; run relax doctor where the model "
            "runs too"
        ),
    )


def test_stopped_embedded_broker_requires_only_java(
    make_run_config: MakeRunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_broker(CheckedRun(make_run_config())).startswith("embedded, not running; Java ")

    def no_java() -> None:
        raise EnvironmentProblem("no Java; install it")

    monkeypatch.setattr(broker_checks, "find_java", no_java)
    with pytest.raises(EnvironmentProblem, match="no Java; install it"):
        check_broker(CheckedRun(make_run_config()))


def test_store_check_writes_reads_and_leaves_the_store_empty(
    make_run_config: MakeRunConfig, tmp_path: Path
) -> None:
    uri = (tmp_path / "objects").as_uri()
    assert (
        check_store(CheckedRun(make_run_config(objects={"uri": uri, "by_run": False})))
        == f"{uri} can be written and read"
    )
    assert not [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]


def test_store_check_detects_unwritable_store(
    make_run_config: MakeRunConfig, tmp_path: Path
) -> None:
    (tmp_path / "in-the-way").touch()
    with pytest.raises((ConfigError, ObjectError), match="in-the-way"):
        check_store(
            CheckedRun(
                make_run_config(
                    objects={"uri": (tmp_path / "in-the-way").as_uri(), "by_run": False}
                )
            )
        )


def test_disk_check_detects_nearly_full_disk(
    make_run_config: MakeRunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run_config(run={"id": "x", "directory": str(tmp_path / "not/yet/there")})
    monkeypatch.setattr(
        machine_checks.shutil,
        "disk_usage",
        lambda _: DiskUsage(10**12, 10**12 - 2 * 10**9, 2 * 10**9),
    )
    assert check_disk(CheckedRun(config)).startswith(f"2 GB free in {tmp_path}; ")
    monkeypatch.setattr(
        machine_checks.shutil, "disk_usage", lambda _: DiskUsage(10**12, 10**12 - 10**8, 10**8)
    )
    with pytest.raises(
        EnvironmentProblem,
        match=r"has 0.10 GB free, a run wants at least 1.07; free some space or set run.directory",
    ):
        check_disk(CheckedRun(config))


def test_reward_check_scores_the_first_reference_answer(make_data: MakeRunConfig) -> None:
    run = CheckedRun(make_data(), is_thorough=True)
    check_data(run)
    assert check_reward(run).endswith(
        "rewards.py:exact gives 1 for the reference answer of the first prompt"
    )


@pytest.mark.parametrize(
    ("on_timeout", "has_environment", "hint"),
    [
        (0.0, True, "reward.on_timeout to the lowest reward, -1 or less"),
        (0.0, False, "first prompt"),
        (-1.0, True, "first prompt"),
        ("none", True, "first prompt"),
    ],
)
def test_reward_check_warns_where_being_late_pays_off(
    make_data: MakeRunConfig, tmp_path: Path, on_timeout: Any, has_environment: bool, hint: str
) -> None:
    file = tmp_path / "rewards.py"
    reward = {"function": f"{file}:strict", "on_timeout": on_timeout}
    environment = {"environment": {"function": f"{file}:exact"}} if has_environment else {}
    run = CheckedRun(make_data(reward=reward, **environment), is_thorough=True)
    check_data(run)
    assert check_reward(run).endswith(hint)


def test_reward_check_detects_a_function_that_raises(make_data: MakeRunConfig) -> None:
    run = CheckedRun(make_data("fails"), is_thorough=True)
    check_data(run)
    with pytest.raises(RewardError, match=r"rewards.py:fails raised KeyError: 'no such score'"):
        check_reward(run)


def test_reward_check_does_not_score_samples_of_the_judge(
    make_data: MakeRunConfig, tmp_path: Path
) -> None:
    judge = {"judge": JudgeConfig(model_path=tmp_path)}
    assert (
        check_reward(CheckedRun(make_data(reward={"function": "genrm"}).model_copy(update=judge)))
        == "the judge scores all samples"
    )
    by_level = {
        "function": f"{tmp_path / 'rewards.py'}:fails",
        "routes": {"two": {"function": "genrm"}},
        "route_key": "level",
    }
    rows = tmp_path / "levels.jsonl"
    rows.write_bytes(orjson.dumps({"prompt": "two and two?", "answer": "4", "level": "two"}))
    config = make_data(data={"source": f"jsonl:{rows}"}, reward=by_level).model_copy(update=judge)
    run = CheckedRun(config, is_thorough=True)
    check_data(run)
    assert check_reward(run).endswith("rewards.py:fails loads; the first prompt is the judge's")


def test_reward_check_detects_unloadable_function_without_prompts(make_data: MakeRunConfig) -> None:
    with pytest.raises(ConfigError, match=r"has no function 'absent', only exact, strict, fails"):
        check_reward(CheckedRun(make_data("absent")))


def test_reward_check_without_prompts_reports_that_it_was_not_run(make_data: MakeRunConfig) -> None:
    with pytest.raises(
        CheckFailed,
        match=r"exact loads, but was not tried: there is no prompt to try it on; see data",
    ):
        check_reward(CheckedRun(make_data()))


def test_finding_of_a_failed_check_carries_its_text(make_data: MakeRunConfig) -> None:
    findings = {
        finding.what: finding
        for finding in check_run(make_data(data={"source": "jsonl:nowhere.jsonl"}))[0]
    }
    assert findings["data"] == Finding(
        "data", False, "data file nowhere.jsonl does not exist; set data.source = 'jsonl:<path>'"
    )
    assert not findings["reward"].is_good


def test_doctor_runs_no_data_or_reward_code_for_a_replay(
    make_data: MakeRunConfig, tmp_path: Path
) -> None:
    """Its run file contains code that the parent's log names, and the user has not agreed to run it."""
    trace = tmp_path / "trace"
    (tmp_path / "evil.py").write_text(
        f"open({str(trace)!r}, 'w')\ndef f(*given, **named):\n    return 1.0\n"
    )
    evil = f"{tmp_path / 'evil.py'}:f"
    config = make_data(
        data={"source": "jsonl:/no/such/file", "prompt_filter": evil},
        reward={"function": evil},
        parent={"run": "theirs"},
    )
    run = CheckedRun(config, is_thorough=True)
    reported = "none needed: a replay trains what was generated and scored before"
    assert (check_data(run), check_reward(run)) == (reported, reported)
    assert not trace.exists()
    part = {"name": "a", "source": f"jsonl:{tmp_path / 'rows.jsonl'}"}
    config = make_data(parent={"run": "theirs"}, evaluation={"datasets": [part]})
    run = CheckedRun(config, is_thorough=True)
    assert check_data(run) == "1 to evaluate a on"
    assert "exact gives 1 for the reference answer" in check_reward(run)


def test_derived_settings_are_reported_with_their_reasons(tmp_path: Path, run_id: str) -> None:
    (tmp_path / "model").mkdir()
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 300,
    }
    (tmp_path / "model/config.json").write_bytes(
        orjson.dumps(sizes | {"max_position_embeddings": 1024, "dtype": "bfloat16"})
    )
    tree: dict[str, Any] = {
        "run": {"id": run_id, "directory": str(tmp_path)},
        "model": {"path": str(tmp_path / "model")},
    }
    config = RunConfig.model_validate(
        tree | {"data": {"source": "jsonl:nowhere"}, "engine": {"threads": 3}}
    )
    _, derived = check_run(config)
    reported = {one.key: (one.value, one.reason) for one in derived}
    assert reported["trainer.learning_rate"] == (
        1e-6,
        "all parameters of a pretrained model are trained",
    )
    assert reported["model.dtype"] == ("bfloat16", "the checkpoint's own")
    assert reported["engine.max_context_tokens"] == (
        1024,
        "the model's 1024 positions, at most 8192",
    )
    assert "engine.threads" not in reported


def test_unreadable_model_is_the_only_finding(tmp_path: Path, run_id: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    tree = {
        "run": {"id": run_id, "directory": str(tmp_path)},
        "model": {"path": str(tmp_path)},
        "data": {"source": "jsonl:nowhere"},
    }
    (finding,), derived = check_run(RunConfig.model_validate(tree))
    assert (finding.what, finding.is_good, derived) == ("model", False, [])
    assert "config.json does not describe the model" in finding.text


@pytest.mark.parametrize(
    ("free", "retained", "text"),
    [
        (500, 0, "keeps all records and grows by up to 0.403 GB a step, 403 GB in all (run.ret"),
        (100, 0, "403 GB in all: more than is free; take more disk, or set run.retain_versions"),
        (100, 9, "keeps the newest 9 versions and grows by up to 0.403 GB a step, 23.8 GB in all"),
    ],
)
def test_disk_check_compares_what_the_log_takes_with_what_is_free(
    free: int,
    retained: int,
    text: str,
    make_run_config: MakeRunConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 groups x 16 samples x 8,192 tokens x 48 bytes are 0.403 GB a step: 403 GB in a thousand, and
    23.8 GB in 9 and the 50 that a checkpoint may be old."""
    monkeypatch.setattr(
        machine_checks.shutil, "disk_usage", lambda _: DiskUsage(10**12, 0, free * 10**9)
    )
    run = {"prompts_per_step": 64, "samples_per_prompt": 16, "num_steps": 1000}
    config = make_run_config(
        run=run | {"retain_versions": retained}, engine={"max_context_tokens": 8192}
    )
    assert text in check_disk(CheckedRun(config))


def test_disk_check_requires_room_for_checkpoints_and_versions(
    make_run_config: MakeRunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three checkpoints of 12 bytes a parameter and four versions of 2: 44 x 596,049,920 bytes, and
    a gibibyte."""
    (tmp_path / "model").mkdir()
    facts = CheckpointFacts("bfloat16", 596_049_920, 151_936, 1024, 28, 16, 8, 128, 3072, 40_960)
    monkeypatch.setattr(machine_checks, "read_checkpoint_facts", lambda _: {"model": facts})
    config = make_run_config(run={"max_staleness": 2}, model={"dtype": "bfloat16"})
    monkeypatch.setattr(
        machine_checks.shutil,
        "disk_usage",
        lambda _: DiskUsage(10**12, 10**12 - 27 * 10**9, 27 * 10**9),
    )
    with pytest.raises(EnvironmentProblem, match=r"has 27.00 GB free, a run wants at least 27.30;"):
        check_disk(CheckedRun(config))
