"""Bad input through the command line: the error names the input, the value, the rule and the
remedy, and no process is left running.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from command_line import FinishedRun, Relax, log_of, report_of, write_rows

from relax_events.packages.examples.tiny_models import make_tiny

NOBODY = "broker.bootstrap_servers=127.0.0.1:1"
FEW_SECONDS = (
    60.0  # an answer is due after 5; the rest is the start of the program on a busy machine
)

BAD_REWARDS = """
import time

def fails(completion, *, answer, metadata, prompt):
    if metadata["way"] == "raises":
        raise ValueError("the reward service is down")
    if metadata["way"] == "hangs":
        time.sleep(3600)
    return float("nan")
"""


@pytest.mark.parametrize(
    ("override", "texts"),
    [
        ("run.max_stalenes=1", ["unknown key run.max_stalenes", "did you mean run.max_staleness?"]),
        (
            "run.max_staleness=-1",
            ["run.max_staleness must be >= 0, got -1", "set run.max_staleness"],
        ),
        ("run.mode=synch", ["run.mode must be 'sync' or 'async'", "got 'synch'"]),
        (
            'broker.client={"acks"="1"}',
            ["acks carries a delivery promise", "remove it from broker.client"],
        ),
        ("trainer.ranks=3", ["trainer.ranks = 3 needs broker.partitions_per_version >= 3, got 2"]),
        (
            "engine.name=vroom",
            ["engine.name = 'vroom' is not installed; installed are", "transformers"],
        ),
        (
            "data.source=jsonl:nowhere.jsonl",
            ["data file nowhere.jsonl does not exist", "set data.source"],
        ),
        ("data.source=csv:rows", ["data.source must be one of 'jsonl:<path>'", "got 'csv:rows'"]),
        (
            "data.answer_key=solution",
            [
                "prompts.jsonl:1 has no key 'solution', only 'prompt', 'answer'",
                "set data.answer_key",
            ],
        ),
        ("model.path=nowhere", ["model.path nowhere does not exist", "[model.tiny]"]),
        ("model.path=.", ["model.path . has no config.json", "Hugging Face layout"]),
        (
            "engine.max_context_tokens=2",
            [
                (
                    "engine.max_context_tokens = 2 leaves no token for a completion: the shortest "
                    "of the first 8 prompts has"
                )
            ],
        ),
        (
            "algorithm.name=grppo",
            ["algorithm.name = 'grppo' is not installed", "did you mean grpo?"],
        ),
        (
            'telemetry.trackers=["tensorbord"]',
            ["telemetry.trackers: 'tensorbord' is not installed", "did you mean tensorboard?"],
        ),
        (
            "run.directory=run.toml/below",
            ["run.toml is not a folder that this user may write to; set run.directory"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_run_with_invalid_settings_fails_before_anything_starts(
    relax: Relax, run_file: Path, tmp_path: Path, override: str, texts: list[str]
) -> None:
    ended = relax("run", run_file, override)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert "Traceback" not in ended.err
    assert [text for text in texts if text not in ended.err] == [], ended.err
    assert not (tmp_path / ".relax/broker").exists()


@pytest.mark.parametrize(
    "command", [["run"], ["topics", "show"], ["ledger", "check"]], ids=" ".join
)
def test_command_reports_unreachable_broker_within_seconds(
    relax: Relax, run_file: Path, command: list[str]
) -> None:
    started = time.monotonic()
    ended = relax(*command, run_file, NOBODY)
    assert ended.code == 3
    assert (
        "no broker answered at 127.0.0.1:1 within 5 s; start it, or set broker.bootstrap_servers"
        in ended.err
    )
    assert "Traceback" not in ended.err
    assert time.monotonic() - started < FEW_SECONDS


@pytest.mark.timeout(300)
def test_resumed_run_rejects_another_model_before_a_worker_starts(
    relax: Relax, finished_run: FinishedRun, tmp_path: Path
) -> None:
    other = make_tiny(tmp_path / "other", corpus=["12=21"], hidden_size=64)
    store = (f"objects.uri={finished_run.config.objects_uri}", "objects.by_run=false")
    changed = (f"model.path={other}", f"run.directory={tmp_path / 'elsewhere'}", *store)
    for command, code in (("doctor", 6), ("run", 2)):
        ended = relax(
            command,
            finished_run.run_file,
            *changed,
            *(["--accept-changes"] if command == "run" else []),
        )
        assert ended.code == code
        assert (
            f"model.path {other} is not the model of run {finished_run.config.run.id}: "
            in ended.out + ended.err
        )
    assert {path.name for path in (tmp_path / "elsewhere").rglob("*.log")} == {
        "run.log",
        "starter.log",
    }, "no worker has written one"


def test_error_names_file_and_line_of_a_row_without_prompt(
    relax: Relax, run_file: Path, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "one", "answer": "1"}, {"answer": "2"}])
    for command, code in (("run", 2), ("doctor", 6)):
        ended = relax(command, run_file, f"data.source=jsonl:{rows}")
        assert ended.code == code
        assert (
            f"{rows}:2 has no key 'prompt', only 'answer'; set data.prompt_key"
            in ended.out + ended.err
        )


def test_doctor_reports_settings_that_the_run_would_reject(
    relax: Relax, run_file: Path, tmp_path: Path
) -> None:
    own = tmp_path / "tracker.py"
    own.write_text("import no_such_library\n\nclass Mine: ...\n")
    overrides = (
        "engine.max_context_tokens=2",
        f'telemetry.trackers=["{own}:Mine"]',
        "run.directory=run.toml/below",
    )
    ended = relax("doctor", run_file, *overrides)
    assert ended.code == 6
    for text in (
        "FAIL room: engine.max_context_tokens = 2 leaves",
        "needs no_such_library",
        "FAIL folder: ",
    ):
        assert text in ended.out


def test_error_explains_that_a_data_file_was_given_as_run_file(
    relax: Relax, prepared: Path
) -> None:
    ended = relax("doctor", prepared / "prompts.jsonl")
    assert ended.code == 2
    assert (
        "prompts.jsonl holds rows of data and is no run file; give a run file, in TOML, "
        "whose data.source names it"
    ) in ended.err


def test_worker_of_unknown_role_is_rejected_with_the_known_ones(
    relax: Relax, run_file: Path
) -> None:
    ended = relax("worker", "dancer", run_file)
    assert ended.code == 2
    assert "role 'dancer' is not installed; installed are actor-forward, advantage" in ended.err


def test_worker_without_its_embedded_broker_explains_how_to_start_it(
    relax: Relax, run_file: Path
) -> None:
    ended = relax("worker", "prompter", run_file)
    assert ended.code == 3
    assert "does not run; start it with: relax broker start --directory .relax/broker" in ended.err


def test_worker_waits_for_its_broker_up_to_the_request_timeout(
    relax: Relax, run_file: Path
) -> None:
    ended = relax("worker", "prompter", run_file, NOBODY, "broker.request_timeout_seconds=2")
    assert ended.code == 3
    assert (
        "error: no broker answered at 127.0.0.1:1 within 2 s; start it, or set "
        "broker.bootstrap_servers"
    ) in ended.err


def test_error_names_metrics_port_in_use(relax: Relax, run_file: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for command, code in (("run", 2), ("doctor", 6)):
            ended = relax(command, run_file, f"telemetry.metrics_port={port}")
            assert ended.code == code
            assert (
                f"can't serve metrics on 127.0.0.1:{port}: Address already in use; set "
                "telemetry.metrics_port = 0"
            ) in ended.out + ended.err


def test_doctor_reports_all_problems_at_once_and_starts_no_process(
    relax: Relax, run_file: Path, tmp_path: Path
) -> None:
    bad = [
        NOBODY,
        "model.path=nowhere",
        "data.source=jsonl:nowhere.jsonl",
        "reward.function=nowhere.py:score",
        "engine.name=vroom",
    ]
    ended = relax("doctor", run_file, *bad)
    found = dict(
        line[5:].split(": ", 1) for line in ended.out.splitlines() if line.startswith("FAIL ")
    )
    assert ended.code == 6
    assert set(found) == {"broker", "weights", "followers", "model", "data", "reward", "roles"}
    assert "no broker answered at 127.0.0.1:1" in found["broker"]
    assert "model.path nowhere does not exist" in found["model"]
    assert "data file nowhere.jsonl does not exist" in found["data"]
    assert "file nowhere.py does not exist" in found["reward"]
    assert "engine.name = 'vroom' is not installed" in found["roles"]
    assert "Traceback" not in ended.err
    assert not (tmp_path / ".relax/broker").exists()


@pytest.mark.timeout(240)
def test_run_whose_rewards_all_fail_ends_with_the_reasons(
    relax: Relax, run_file: Path, run_id: str, bootstrap_servers: str, tmp_path: Path
) -> None:
    ways = ("raises", "hangs", "is not a number")
    rows = write_rows(
        tmp_path / "rows.jsonl",
        [{"prompt": f"a reward that {way}", "answer": "", "way": way} for way in ways],
    )
    (tmp_path / "rewards.py").write_text(BAD_REWARDS)
    ended = relax(
        "run",
        run_file,
        f"broker.bootstrap_servers={bootstrap_servers}",
        f"data.source=jsonl:{rows}",
        "data.shuffle=false",
        f"reward.function={tmp_path / 'rewards.py'}:fails",
        "reward.timeout_seconds=0.5",
        "reward.processes=4",
        "run.samples_per_prompt=2",
        "run.max_failed_prompt_groups=6",
        timeout_seconds=200,
    )
    assert ended.code == 1
    assert "Traceback" not in ended.err
    assert f"run {run_id} ended before its goal: " in ended.err
    assert (
        "prompt groups failed in a row (run.max_failed_prompt_groups); the last one: reward: 0 of "
        "2 samples are usable, 2 are needed (algorithm.min_samples_per_group): 2 refused; first: "
        "reward function"
    ) in ended.err
    report = report_of(tmp_path, run_id)
    assert report["outcomes"]["failed"] >= 6
    assert (report["steps"], report["succeeded"], report["ledger_problems"]) == (0, False, [])
    errors = " ".join(
        entry["error"]
        for entry in log_of(tmp_path, run_id, "reward-0")
        if entry["event"] == "sample.unscored"
    )
    assert "raised ValueError: the reward service is down" in errors
    assert "took longer than 0.5 s (reward.timeout_seconds)" in errors
    assert "returned 'reward': nan; rewards must be within +-3.4e38" in errors


def test_init_writes_a_run_file_that_the_doctor_accepts(relax: Relax, prepared: Path) -> None:
    given = ("--model", prepared / "model", "--data", prepared / "prompts.jsonl")
    ended = relax("init", "mine.toml", *given)
    assert ended.code == 0, ended.out + ended.err
    assert "ok   reward: exact_match gives 1 for the reference answer" in ended.out
    assert "FAIL" not in ended.out
    assert ended.out.rstrip().endswith("begin with: relax run mine.toml")
    misspelt = relax("init", "other.toml", *given, "--reward", "exact_matsh")
    assert "begin with" not in misspelt.out
    assert "FAIL reward" in misspelt.out
    assert misspelt.out.rstrip().endswith("repair what failed, then: relax doctor other.toml")
    again = relax("init", "mine.toml", *given)
    assert (again.code, "mine.toml exists; give another name, or --force" in again.err) == (2, True)
