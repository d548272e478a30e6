"""The doctor: each check alone says what it found, and one that fails keeps no other from running."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from relax_events.config import JudgeConfig, RunConfig
from relax_events.control import doctor
from relax_events.control.doctor import Finding, PromptCheck, check_broker, check_disk, check_store, examine
from relax_events.errors import CheckFailed, ConfigError, EnvironmentProblem, ObjectError, RewardError

MakeRunConfig = Callable[..., RunConfig]
DiskUsage = namedtuple("DiskUsage", ["total", "used", "free"])
JUDGE = """
def exact(completion, *, answer, metadata, prompt):
    assert metadata == {"level": 2} and prompt == "two and two?"
    return float(completion == answer)

def fails(completion, *, answer, metadata, prompt):
    raise KeyError("no such judge")
"""


@pytest.fixture
def make_data(make_run_config: MakeRunConfig, tmp_path: Path) -> MakeRunConfig:
    """Return a maker of run configurations with one prompt and a file of judges."""
    (tmp_path / "rows.jsonl").write_bytes(orjson.dumps({"prompt": "two and two?", "answer": "4", "level": 2}))
    (tmp_path / "judge.py").write_text(JUDGE)

    def make(judge: str = "exact", **sections: dict[str, object]) -> RunConfig:
        reward = {"function": f"{tmp_path / 'judge.py'}:{judge}", "timeout_seconds": 5}
        return make_run_config(**{"data": {"source": f"jsonl:{tmp_path / 'rows.jsonl'}"}, "reward": reward} | sections)

    return make


def test_examine_reports_every_check_even_where_some_fail(make_data: MakeRunConfig) -> None:
    findings = examine(make_data(engine={"name": "vroom"}))
    names = ["broker", "schema registry", "object store", "disk", "model", "teacher", "judge", "data"]
    names += ["reward", "roles", "metrics", "traces", "scaling API"]
    assert [finding.what for finding in findings] == names
    assert [finding.what for finding in findings if not finding.is_good] == ["model", "roles"]
    assert findings[7] == Finding("data", True, f"1 prompts in {make_data().data.source}")


def test_embedded_broker_that_is_down_needs_java_alone(make_run_config: MakeRunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_broker(make_run_config()).startswith("embedded, not running; Java ")

    def no_java() -> None:
        raise EnvironmentProblem("no Java; install it")

    monkeypatch.setattr(doctor, "find_java", no_java)
    with pytest.raises(EnvironmentProblem, match="no Java; install it"):
        check_broker(make_run_config())


def test_store_is_written_read_and_left_empty(make_run_config: MakeRunConfig, tmp_path: Path) -> None:
    uri = (tmp_path / "objects").as_uri()
    assert check_store(make_run_config(objects={"uri": uri})) == f"{uri} can be written and read"
    assert not [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]


def test_store_that_takes_nothing_is_found(make_run_config: MakeRunConfig, tmp_path: Path) -> None:
    (tmp_path / "in-the-way").touch()
    with pytest.raises((ConfigError, ObjectError), match="in-the-way"):
        check_store(make_run_config(objects={"uri": (tmp_path / "in-the-way").as_uri()}))


def test_disk_that_is_nearly_full_is_found(make_run_config: MakeRunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_run_config(run={"id": "x", "directory": str(tmp_path / "not/yet/there")})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: DiskUsage(10**12, 10**12 - 2 * 10**9, 2 * 10**9))
    assert check_disk(config) == f"2 GB free in {tmp_path}"
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: DiskUsage(10**12, 10**12 - 10**8, 10**8))
    with pytest.raises(EnvironmentProblem, match=r"has 0.10 GB free, a run wants at least 1.07; free some space or set run.directory"):
        check_disk(config)


def test_reward_is_tried_on_the_first_reference_answer(make_data: MakeRunConfig) -> None:
    check, config = PromptCheck(), make_data()
    check.check_data(config)
    assert check.check_reward(config).endswith("judge.py:exact gives 1 for the reference answer of the first prompt")


def test_reward_that_raises_is_found(make_data: MakeRunConfig) -> None:
    check, config = PromptCheck(), make_data("fails")
    check.check_data(config)
    with pytest.raises(RewardError, match=r"judge.py:fails raised KeyError: 'no such judge'"):
        check.check_reward(config)


def test_judge_s_own_samples_are_not_scored_by_rule(make_data: MakeRunConfig, tmp_path: Path) -> None:
    judge = {"judge": JudgeConfig(model_path=tmp_path)}
    assert PromptCheck().check_reward(make_data(reward={"function": "genrm"}).model_copy(update=judge)) == "the judge scores all samples"
    by_level = {"function": f"{tmp_path / 'judge.py'}:fails", "routes": {"two": {"function": "genrm"}}, "route_key": "level"}
    rows = tmp_path / "levels.jsonl"
    rows.write_bytes(orjson.dumps({"prompt": "two and two?", "answer": "4", "level": "two"}))
    check, config = PromptCheck(), make_data(data={"source": f"jsonl:{rows}"}, reward=by_level).model_copy(update=judge)
    check.check_data(config)
    assert check.check_reward(config).endswith("judge.py:fails loads; the first prompt is the judge's")


def test_reward_that_can_not_be_loaded_is_found_without_prompts(make_data: MakeRunConfig) -> None:
    with pytest.raises(ConfigError, match=r"has no function 'nobody', only exact, fails"):
        PromptCheck().check_reward(make_data("nobody"))


def test_reward_without_prompts_says_that_it_was_not_tried(make_data: MakeRunConfig) -> None:
    with pytest.raises(CheckFailed, match=r"exact loads, but was not tried: there is no prompt to try it on; see data"):
        PromptCheck().check_reward(make_data())


def test_finding_of_a_failed_check_carries_its_text(make_data: MakeRunConfig) -> None:
    findings = {finding.what: finding for finding in examine(make_data(data={"source": "jsonl:nowhere.jsonl"}))}
    assert findings["data"] == Finding("data", False, "data file nowhere.jsonl does not exist; set data.source = 'jsonl:<path>'")
    assert not findings["reward"].is_good
