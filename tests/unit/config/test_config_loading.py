"""A run file is read, overlaid and checked, and every error names its key and the remedy."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from relax_events.config import RunConfig, load_run_config
from relax_events.config.broker import GUARDED_CLIENT_KEYS
from relax_events.config.loading import read_value
from relax_events.errors import ConfigError

REPOSITORY = Path(__file__).parents[3]
MINIMAL = """
[run]
id = "mine"
[model]
path = "model"
[data]
source = "jsonl:data.jsonl"
"""


SCHEMA_FILE = REPOSITORY / "relax_events" / "config" / "run-file.schema.json"
KEY_ERRORS = [
    ("run.max_staleness=-1", "run.max_staleness must be >= 0, got -1; set run.max_staleness"),
    ("run.num_steps=0", "run.num_steps must be >= 1, got 0; set run.num_steps"),
    (
        "algorithm.clip_low=1.5",
        "algorithm.clip_low must be <= 1, got 1.5; set algorithm.clip_low",
    ),
    (
        "engine.sampling.temperature=0",
        "engine.sampling.temperature must be > 0, got 0; set engine.sampling.temperature",
    ),
    (
        "engine.sampling.top_p=1.5",
        "engine.sampling.top_p must be <= 1, got 1.5; set engine.sampling.top_p",
    ),
    ("run.mode=both", "run.mode must be 'sync' or 'async', got 'both'; set run.mode"),
    ("run.num_steps=many", "run.num_steps must be an integer, got 'many'; set run.num_steps"),
    (
        "run.id=Not_Allowed",
        ("run.id must match '^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$', got 'Not_Allowed'; set run.id"),
    ),
    (
        "model.tiny.hidden_size=33",
        "model.tiny.hidden_size must be a multiple of 32, got 33; set model.tiny.hidden_size",
    ),
    ("run.max_stalenes=1", "unknown key run.max_stalenes; did you mean run.max_staleness?"),
    ("trainer.lr=0.1", "unknown key trainer.lr; did you mean "),
    (
        "engine.temperature=1",
        "unknown key engine.temperature; did you mean engine.sampling.temperature?",
    ),
    ("rnu.seed=1", "unknown key rnu; did you mean run?"),
    ("zzzz.qqqq=1", "unknown key zzzz; known sections are run, model, data, "),
    (
        "broker.client.acks=1",
        (
            "broker.client: acks carries a delivery promise and can't be overridden; remove "
            "it from broker.client"
        ),
    ),
]
OTHER_ERRORS = [
    (
        "broker.queue_partitions=2",
        (
            "broker: a share group's queue has one partition, got queue_partitions = 2; "
            "leave out broker.queue_partitions, or set broker.prompt_queue = 'consumer_group'"
        ),
    ),
    (
        "trainer.ranks=5",
        (
            "every data-parallel rank reads shards of its own: trainer.ranks = 5 needs "
            "broker.partitions_per_version >= 5, "
            "got 2; set broker.partitions_per_version or trainer.ranks"
        ),
    ),
    ("run.seed.x=1", "run.seed.x=1: seed is a value, not a section"),
    (
        "seed=1",
        "override 'seed=1' is not of the form section.key=value; for example run.seed=1",
    ),
    (
        "run.seed",
        "override 'run.seed' is not of the form section.key=value; for example run.seed=1",
    ),
]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def load(path: Path, *overrides: str, **environment: str) -> RunConfig:
    return load_run_config(path, overrides, environment)


def error_of(path: Path, *overrides: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, *overrides, **environment)
    return str(caught.value).replace(f"{path}: ", "")


def list_schema_errors(tree: dict[str, Any]) -> list[str]:
    """Return what an editor would mark in a run file."""
    schema = json.loads(SCHEMA_FILE.read_text())
    Draft7Validator.check_schema(schema)
    return [error.message for error in Draft7Validator(schema).iter_errors(tree)]


def test_minimal_run_file_gets_the_defaults(run_file: Path) -> None:
    config = load(run_file)
    assert (config.run.id, config.run.max_staleness, config.broker.bootstrap_servers) == (
        "mine",
        1,
        "embedded",
    )
    assert config.run_directory == Path(".relax/runs/mine")
    assert config.objects_uri == (Path.cwd() / ".relax/runs/mine/objects").as_uri()
    assert set(config.roles()) == {
        "controller",
        "metrics",
        "prompter",
        "rollout",
        "reward",
        "advantage",
        "trainer",
    }


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "configs").rglob("*.toml")), ids=lambda path: path.stem
)
def test_shipped_run_files_load_and_fit_the_schema(path: Path) -> None:
    config = load(path)
    assert config.run.num_steps >= 1
    assert list_schema_errors(tomllib.loads(path.read_text())) == []


@pytest.mark.parametrize("override", [override for override, _ in KEY_ERRORS])
def test_schema_for_editors_refuses_a_wrong_key(override: str) -> None:
    tree = tomllib.loads(MINIMAL)
    assert list_schema_errors(tree) == []
    key, _, value = override.partition("=")
    *tables, last = key.split(".")
    table = tree
    for name in tables:
        table = table.setdefault(name, {})
    table[last] = read_value(value)
    assert list_schema_errors(tree) != []


def test_later_config_layers_override_earlier_ones(run_file: Path) -> None:
    run_file.write_text(
        MINIMAL.replace('id = "mine"', 'id = "mine"\nseed = 1\nnum_steps = 1\nmax_staleness = 3')
    )
    config = load(run_file, "run.num_steps=3", RELAX_RUN__SEED="2", RELAX_RUN__NUM_STEPS="2")
    assert (config.run.max_staleness, config.run.seed, config.run.num_steps) == (3, 2, 3)


def test_the_process_environment_is_the_default_layer(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_RUN__SEED", "77")
    assert load_run_config(run_file).run.seed == 77


def test_relative_paths_are_resolved_against_the_working_directory(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    moved = tmp_path / "elsewhere" / "run.toml"
    moved.parent.mkdir()
    moved.write_text(run_file.read_text())
    assert load_run_config(moved).run_directory.absolute() == tmp_path / ".relax" / "runs" / "mine"


def test_environment_variables_without_a_section_are_ignored(run_file: Path) -> None:
    assert load(run_file, RELAX_TOKEN="x", OTHER__KEY="y").run.id == "mine"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.id=other", "other"),
        ('run.id="quoted"', "quoted"),
        (" run.id = spaced ", "spaced"),
    ],
)
def test_override_takes_toml_or_a_bare_string(run_file: Path, override: str, value: str) -> None:
    assert load(run_file, override).run.id == value


def test_override_reaches_nested_tables(run_file: Path) -> None:
    config = load(
        run_file,
        "engine.sampling.max_new_tokens=5",
        'broker.client={ "security.protocol" = "SSL" }',
        "trainer.betas=[0.8, 0.9]",
    )
    assert config.engine.sampling.max_new_tokens == 5
    assert config.broker.client == {"security.protocol": "SSL"}
    assert config.trainer.betas == (0.8, 0.9)


def test_roles_follow_from_the_algorithm(run_file: Path) -> None:
    config = load(
        run_file,
        "algorithm.kl_coefficient=0.1",
        "algorithm.old_logprobs=actor",
        "workers.rollout=3",
    )
    assert {name: config.roles()[name] for name in ("reference", "actor-forward", "rollout")} == {
        "reference": 1,
        "actor-forward": 1,
        "rollout": 3,
    }


def test_object_store_defaults_to_the_run_directory(run_file: Path, tmp_path: Path) -> None:
    assert (
        load(run_file, f"run.directory={tmp_path}").objects_uri
        == (tmp_path / "runs/mine/objects").as_uri()
    )
    assert load(run_file, "objects.uri=s3://bucket/x").objects_uri == "s3://bucket/x/mine"


@pytest.mark.parametrize(("override", "text"), KEY_ERRORS + OTHER_ERRORS)
def test_config_error_names_key_value_rule_and_remedy(
    run_file: Path, override: str, text: str
) -> None:
    if override == "run.seed.x=1":
        run_file.write_text(MINIMAL.replace('id = "mine"', 'id = "mine"\nseed = 1'))
    found = error_of(run_file, override)
    assert found == text or (text.endswith(" ") and found.startswith(text))


def test_sync_mode_rejects_nonzero_staleness(run_file: Path) -> None:
    text = (
        "run: mode = 'sync' is on-policy, got max_staleness = 2; set run.max_staleness = 0 or "
        "run.mode = 'async'"
    )
    assert error_of(run_file, "run.mode=sync", "run.max_staleness=2") == text
    assert load(run_file, "run.mode=sync", "run.max_staleness=0").run.mode == "sync"


@pytest.mark.parametrize("key", sorted(GUARDED_CLIENT_KEYS))
def test_client_keys_that_affect_delivery_guarantees_are_rejected(run_file: Path, key: str) -> None:
    run_file.write_text(MINIMAL + f'[broker.client]\n"{key}" = "x"\n')
    assert f"{key} carries a delivery promise" in error_of(run_file)


def test_all_config_errors_are_reported_at_once(run_file: Path) -> None:
    assert (
        len(error_of(run_file, "run.num_steps=0", "run.sed=1", "data.num_problems=0").splitlines())
        == 3
    )


def test_required_keys_are_named_when_missing(run_file: Path) -> None:
    run_file.write_text('[run]\nid = "mine"\n[data]\n')
    assert error_of(run_file).splitlines() == [
        "model is required",
        "data: the prompts need a source; set data.source, or give [[data.datasets]] tables",
    ]


def test_environment_error_names_the_variable(run_file: Path) -> None:
    assert (
        error_of(run_file, RELAX_RUN__ID__X="1") == "RELAX_RUN__ID__X: id is a value, not a section"
    )


def test_error_names_the_missing_run_file(tmp_path: Path) -> None:
    text = (
        f"run file {tmp_path / 'no.toml'} does not exist; give the path of a TOML file, for "
        "example configs/quickstart.toml, which `relax init` writes"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        load(tmp_path / "no.toml")


@pytest.mark.parametrize(
    ("content", "text"), [(b"[run\n", "is not TOML: "), (b"\xff\xfe", "can't be read: ")]
)
def test_error_names_the_run_file_that_is_not_toml(
    run_file: Path, content: bytes, text: str
) -> None:
    run_file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"run file {re.escape(str(run_file))} {text}"):
        load(run_file)


def test_directory_given_as_run_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder and no run file; give a file"):
        load(tmp_path)


@pytest.mark.parametrize(
    "deep",
    [
        "run" + ".a" * 5000 + "=1",
        "broker.client" + ".a" * 5000 + "=1",
        "reward.options=" + "[" * 80 + "]" * 80,
    ],
)
def test_too_deeply_nested_settings_are_rejected(run_file: Path, deep: str) -> None:
    with pytest.raises(ConfigError, match="has sections and lists more than 64 deep"):
        load_run_config(run_file, [deep])
    key, _, value = deep.partition("=")
    run_file.write_text(f"{key} = {value}\n")
    with pytest.raises(ConfigError, match=r"more than 64 deep|is not TOML"):
        load_run_config(run_file)


def test_long_list_of_config_errors_is_truncated(run_file: Path) -> None:
    lines = error_of(run_file, *(f"run.key{number}=1" for number in range(1000))).splitlines()
    assert len(lines) == 21
    assert lines[0].startswith("unknown key run.key0;")
    assert lines[-1] == "980 problems more"


def test_configuration_is_frozen(run_file: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(run_file).run.seed = 2  # type: ignore[misc]


def test_every_key_is_documented() -> None:
    def undocumented(model: type, prefix: str = "") -> list[str]:
        found = []
        for name, field in model.model_fields.items():  # type: ignore[attr-defined]
            kinds = [
                kind
                for kind in (field.annotation, *getattr(field.annotation, "__args__", ()))
                if hasattr(kind, "model_fields")
            ]
            found += [] if field.description or kinds else [prefix + name]
            for kind in kinds:
                found += undocumented(kind, f"{prefix}{name}.")
        return found

    assert undocumented(RunConfig) == []


def test_rollout_workers_must_not_exceed_consumer_group_partitions(
    run_file: Path,
) -> None:
    queue = ("broker.prompt_queue=consumer_group", "workers.rollout=3")
    text = (
        "a worker without a partition gets no prompts: workers.rollout = 3 needs "
        "broker.queue_partitions >= 3, got 2"
    )
    assert (
        error_of(run_file, *queue, "broker.queue_partitions=2")
        == f"{text}; set broker.queue_partitions or workers.rollout"
    )
    assert load(run_file, *queue, "broker.queue_partitions=3").broker.queue_partitions == 3
