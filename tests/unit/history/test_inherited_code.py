"""What a replay or a fork inherits from a log: nothing that an unknown producer wrote is used
before the user agrees.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from small_settings import small_run

from relax_events.cli.output import accept_source
from relax_events.config import RewardConfig, RunConfig
from relax_events.config.external_values import Named, Names
from relax_events.history.runs.inherited_code import (
    UntrustedSettingsError,
    read_own_run_files,
    require_trust,
    require_trusted_reward,
)
from relax_events.runtime.run_description import build_run_description, read_described_config
from relax_events.session.resume import find_changes, settings_history

MakeConfig = Callable[..., RunConfig]
HOSTILE = {
    "reward": {
        "function": "/nfs/evil.py:f",
        "options": {"url": "https://evil", "token_variable": "JUDGE_TOKEN"},
    },
    "engine": {"sglang": {"python": "/nfs/python", "arguments": ["--x"]}},
    "objects": {"uri": "s3://evil/prefix"},
    "telemetry": {"traces": {"endpoint": "http://evil:4318"}},
}


def left(
    source: RunConfig,
    *,
    own: Sequence[RunConfig] = (),
    overrides: Sequence[str] = (),
    is_replay: bool = False,
    directory: Path = Path("elsewhere"),
) -> dict[str, Any]:
    """Return what someone would have to agree to."""
    refused: list[UntrustedSettingsError] = []
    require_trust(
        source,
        is_replay=is_replay,
        run_files=own,
        directory=directory,
        overrides=overrides,
        accept=refused.append,
    )
    return {named.key: named.value for one in refused for named in one.named}


def test_fork_lists_all_inherited_settings_absent_from_local_run_files(
    make_run_config: MakeConfig,
) -> None:
    source = make_run_config(**HOSTILE)
    assert left(source) == {
        "model.path": str(source.model.path),
        "data.source": "jsonl:unused",
        "objects.uri": "s3://evil/prefix",
        "engine.sglang.python": "/nfs/python",
        "engine.sglang.arguments": ["--x"],
        "reward.function": "/nfs/evil.py:f",
        "reward.options.url": "https://evil",
        "reward.options.token_variable": "JUDGE_TOKEN",
        "telemetry.traces.endpoint": "http://evil:4318",
    }


def test_replay_lists_only_inherited_settings_that_it_uses(make_run_config: MakeConfig) -> None:
    source = make_run_config(**HOSTILE)
    used = {"model.path", "objects.uri", "telemetry.traces.endpoint"}
    assert left(source, is_replay=True).keys() == used
    evaluated = make_run_config(
        **HOSTILE, evaluation={"datasets": [{"name": "a", "source": "jsonl:/etc/shadow"}]}
    )
    assert {"reward.function", "engine.sglang.python", "evaluation.datasets.0.source"} <= left(
        evaluated, is_replay=True
    ).keys()
    assert "reward.function" in left(
        source, is_replay=True, overrides=['evaluation.datasets=[{name="a", source="jsonl:x"}]']
    )


def test_replay_that_creates_its_model_lists_the_data_source(make_run_config: MakeConfig) -> None:
    source = make_run_config(model={"tiny": {}})
    assert left(source, is_replay=True)["data.source"] == "jsonl:unused"
    source.model.path.mkdir()
    assert "data.source" not in left(source, is_replay=True)


def test_settings_equal_to_a_local_run_file_need_no_confirmation(
    make_run_config: MakeConfig,
) -> None:
    source = make_run_config(**HOSTILE)
    assert left(source, own=[source]) == {}
    other = make_run_config(**HOSTILE | {"objects": {"uri": "s3://mine/prefix"}})
    assert left(source, own=[other]) == {"objects.uri": "s3://evil/prefix"}
    longer = make_run_config(
        **HOSTILE | {"engine": {"sglang": {"python": "/nfs/python", "arguments": ["--x", "--y"]}}}
    )
    assert left(source, own=[longer]) == {"engine.sglang.arguments": ["--x"]}


def test_replay_run_file_approves_only_the_settings_the_replay_used(
    make_run_config: MakeConfig,
) -> None:
    source = make_run_config(**HOSTILE)
    replay = make_run_config(**HOSTILE, parent={"run": "old"})
    assert left(source, own=[replay], is_replay=True) == {}
    assert {"reward.function", "engine.sglang.python"} <= left(source, own=[replay]).keys()


def test_key_set_by_an_argument_is_not_listed_as_inherited(
    make_run_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_run_config(**HOSTILE)
    monkeypatch.setenv("RELAX_TELEMETRY__TRACES__ENDPOINT", "http://mine:4318")
    overrides = [
        "reward.options.url=https://mine",
        "engine.sglang={}",
        "objects.uri=s3://mine/",
        "model.path=m",
        "data.source=jsonl:m",
    ]
    found = left(source, overrides=overrides)
    assert found.keys() == {"reward.function", "reward.options.token_variable"}


def test_source_without_object_store_lists_its_run_directory(
    make_run_config: MakeConfig, tmp_path: Path
) -> None:
    source = make_run_config()
    assert left(source)["run.directory"] == str(tmp_path)
    assert "run.directory" not in left(source, directory=tmp_path)


def test_run_files_of_this_directory_approve_inherited_settings(
    make_run_config: MakeConfig, tmp_path: Path
) -> None:
    source = make_run_config(**HOSTILE)
    folder = tmp_path / "runs" / source.run.id
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(orjson.dumps(source.model_dump(mode="json")))
    assert (
        left(
            source, own=list(read_own_run_files(tmp_path, source.run.id, "no-such-run", named=None))
        )
        == {}
    )


@pytest.fixture
def evil(tmp_path: Path) -> tuple[str, Path]:
    """Return an algorithm of a file that leaves a trace when it is run, and the trace."""
    trace = tmp_path / "trace"
    (tmp_path / "evil.py").write_text(f"open({str(trace)!r}, 'w')\n")
    return f"{tmp_path / 'evil.py'}:SPEC", trace


@pytest.mark.parametrize("dropped", [(), ("samples_per_prompt",)])
def test_reading_a_run_description_executes_no_code(
    make_run_config: MakeConfig, evil: tuple[str, Path], dropped: tuple[str, ...]
) -> None:
    name, trace = evil
    described = build_run_description(make_run_config())
    tree = orjson.loads(described.config)
    tree["algorithm"] = {"name": name, "clip_low": 0.1}
    tree["run"] = {key: value for key, value in tree["run"].items() if key not in dropped}
    forged = dataclasses.replace(described, config=orjson.dumps(tree).decode())
    found = read_described_config(forged, run_id=described.run_id)
    assert (found.algorithm.name, found.algorithm.learns_from, found.algorithm.is_unread) == (
        name,
        "rewards",
        True,
    )
    assert found.roles()
    assert build_run_description(found).config
    settings_history([forged, described, forged, forged], run_id=described.run_id)
    find_changes(forged, make_run_config())
    assert left(found, overrides=["algorithm.clip_low=0.3"])["algorithm.name"] == name
    assert not trace.exists()


def test_user_is_shown_untrusted_settings_and_accepts_or_rejects_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    refused = UntrustedSettingsError(
        "old", [Named("reward.routes.x\n  y.function", "/nfs/evil.py:\x1b[2J", Names.CODE)]
    )
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    accept_source(refused, trusts=False)
    shown = capsys.readouterr().err
    assert (
        '"reward.routes.x\\n  y.function" = "/nfs/evil.py:\\u001b[2J"  (code that would be run)'
        in shown
    )
    assert "take all this over? [y/N]" in shown
    monkeypatch.setattr("sys.stdin", Terminal("\n"))
    with pytest.raises(UntrustedSettingsError):
        accept_source(refused, trusts=False)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(
        UntrustedSettingsError,
        match=(
            "give --config with a run file that does, set these keys by arguments, or give "
            "--trust-source"
        ),
    ):
        accept_source(refused, trusts=False)
    accept_source(refused, trusts=True)


def test_reward_from_a_log_is_trusted_if_a_run_file_matches_or_the_user_accepts() -> None:
    def refuse(refused: UntrustedSettingsError) -> None:
        raise refused

    rest = {"model": {"path": "model"}, "data": {"source": "jsonl:rows.jsonl"}}
    tree = rest | {
        "run": {"id": "theirs"},
        "reward": {"function": "remote", "options": {"url": "http://unknown:1"}},
    }
    theirs = small_run(tree)
    assert (
        require_trusted_reward(
            theirs, run_files=[small_run(tree | {"run": {"id": "mine"}})], accept=refuse
        )
        == theirs.reward
    )
    with pytest.raises(
        UntrustedSettingsError, match="log of run theirs names what would be used here"
    ) as refused:
        require_trusted_reward(theirs, run_files=[], accept=refuse)
    assert refused.value.named == [Named("reward.options.url", "http://unknown:1", Names.OPTIONS)]
    assert require_trusted_reward(theirs, run_files=[], accept=lambda _: None) == theirs.reward
    harmless = small_run(rest | {"run": {"id": "theirs"}, "reward": {"function": "math"}})
    assert require_trusted_reward(
        harmless, run_files=[], accept=refuse
    ) == RewardConfig.model_validate(harmless.reward.model_dump())
