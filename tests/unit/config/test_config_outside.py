"""External code, programs and files that a run file names: no key is forgotten, and those of a
hostile description are listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import orjson
import pytest
from pydantic import BaseModel

from relax_events.attacks.options import UNPROTECTED
from relax_events.config import RunConfig
from relax_events.config.external_values import Names, find_kind, find_table, is_marked, names_in

NAMING = (str, Path, Any, dict)


def types_in(kind: Any) -> Iterator[Any]:
    """Yield the types that a key's values may have."""
    if get_origin(kind) is Literal:
        return
    yield get_origin(kind) or kind
    for arm in get_args(kind):
        yield from types_in(arm)


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        if (inner := find_table(field.annotation)) is not None:
            yield from keys_of(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def test_every_key_that_can_name_external_resources_is_marked() -> None:
    """A key of texts, paths or tables without a mark in its type would be taken over from a log
    unseen."""
    able = {
        key: field
        for key, field in keys_of(RunConfig)
        if any(kind in NAMING for kind in types_in(field.annotation))
    }
    assert {
        "model.path",
        "reward.options",
        "reward.routes.function",
        "judge.engine.sglang.urls",
        "evaluation.datasets.reward.options",
    } <= able.keys()
    assert [key for key, field in able.items() if not is_marked(field)] == []


def test_unmarked_key_is_treated_as_naming_anything() -> None:
    class Table(BaseModel):
        forgotten: str = ""

    assert find_kind(Table.model_fields["forgotten"]) is Names.OPTIONS
    assert [named.key for named in names_in({"forgotten": "http://evil"}, Table)] == ["forgotten"]


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("reward.function", "/nfs/evil.py:f", Names.CODE),
        ("reward.routes.math.function", "evil.py:f", Names.CODE),
        ("engine.name", "/nfs/evil.py:Engine", Names.CODE),
        ("judge.engine.name", "/nfs/evil.py:Engine", Names.CODE),
        ("algorithm.name", "/nfs/evil.py:SPEC", Names.CODE),
        ("environment.function", "/nfs/evil.py:f", Names.CODE),
        ("trainer.backend", "/nfs/evil.py:Backend", Names.CODE),
        ("data.prompt_filter", "/nfs/evil.py:f", Names.CODE),
        ("telemetry.trackers", ["tensorboard", "/nfs/evil.py:Tracker"], Names.CODE),
        ("engine.sglang.python", "/nfs/python", Names.PROGRAM),
        ("judge.engine.sglang.python", "/nfs/python", Names.PROGRAM),
        ("engine.sglang.arguments", ["--trust-remote-code"], Names.ARGUMENTS),
        ("engine.sglang.server_arguments", [["--model-loader-extra-config", "x"]], Names.ARGUMENTS),
        ("engine.sglang.urls", ["http://evil:30000"], Names.ADDRESS),
        ("objects.uri", "s3://evil/prefix", Names.ADDRESS),
        ("objects.allowed_roots", ["file:///etc/"], Names.ADDRESS),
        ("data.media_hosts", ["evil.example"], Names.ADDRESS),
        ("telemetry.traces.endpoint", "http://evil:4318/v1/traces", Names.ADDRESS),
        ("telemetry.metrics_host", "0.0.0.0", Names.LISTENER),
        ("scaling.host", "0.0.0.0", Names.LISTENER),
        ("weights.host", "10.0.0.1", Names.LISTENER),
        ("model.path", "/nfs/evil", Names.FILE),
        ("critic.model_path", "/nfs/evil", Names.FILE),
        ("teacher.model_path", "/nfs/evil", Names.FILE),
        ("judge.model_path", "/nfs/evil", Names.FILE),
        ("data.media_root", "/", Names.FILE),
        ("data.chat_template_file", "/etc/passwd", Names.FILE),
        ("telemetry.notification_urls_file", "/home/me/.netrc", Names.FILE),
        ("scaling.token_file", "/home/me/token", Names.FILE),
        ("engine.sglang.weights_directory", "/home/me", Names.FILE),
        ("data.source", "jsonl:/home/me/.ssh/id_rsa", Names.DATA),
        ("data.datasets.0.source", "parquet:/data", Names.DATA),
        ("evaluation.datasets.0.source", "jsonl:/etc/shadow", Names.DATA),
        ("reward.environment", ["AWS_SECRET_ACCESS_KEY"], Names.VARIABLE),
        ("reward.options.url", "http://evil", Names.OPTIONS),
        ("reward.options.token_variable", "JUDGE_TOKEN", Names.OPTIONS),
        ("reward.options.allow_unprotected", True, Names.OPTIONS),
        *(("reward.options.allow_unprotected", value, Names.OPTIONS) for value in UNPROTECTED),
        ("reward.options.memory_bytes", 2**50, Names.OPTIONS),
        ("reward.options.is_verified", False, Names.OPTIONS),
        ("reward.options.mode", "open", Names.OPTIONS),
        ("reward.options.allowed.0", 7, Names.OPTIONS),
        ("environment.options.port", 9092, Names.OPTIONS),
        ("data.options.allow_files", 1, Names.QUANTITIES),
        ("reward.options.deep.0.service", "evil.example:80", Names.OPTIONS),
        ("reward.routes.math.options.host", "evil", Names.OPTIONS),
        ("evaluation.datasets.0.reward.options.url", "http://evil", Names.OPTIONS),
        ("environment.options.command", "sh", Names.OPTIONS),
        ("data.options.file", "words", Names.QUANTITIES),
        ("algorithm.options.table", "../x", Names.QUANTITIES),
    ],
)
def test_external_names_in_a_run_description_are_listed(key: str, value: Any, what: Names) -> None:
    tree: Any = value
    for name in reversed(key.split(".")):
        tree = [tree] if name == "0" else {name: tree}
    (found,) = names_in(tree, RunConfig)
    shown = value[-1] if isinstance(value, list) and what is not Names.ARGUMENTS else value
    assert (found.key, found.value, found.what) == (key, shown, what)


def test_empty_table_or_list_of_an_option_is_listed() -> None:
    tree = {"reward": {"options": {"denied": [], "hosts": {}}}}
    assert [named.key for named in names_in(tree, RunConfig)] == [
        "reward.options.denied",
        "reward.options.hosts",
    ]


def test_plain_run_file_names_only_its_model_path() -> None:
    tree = RunConfig.model_validate(
        {
            "run": {"id": "a"},
            "model": {"path": "m", "tiny": {"family": "qwen3"}},
            "data": {
                "source": "reasoning_gym:chain_sum",
                "options": {"min_terms": 2, "kind": "plain"},
                "system_prompt": "Look at http://host/",
            },
            "reward": {
                "function": "math",
                "options": {},
            },
            "engine": {"sampling": {"temperature": 0.5}},
            "scaling": {"host": "localhost"},
        }
    ).model_dump(mode="json")
    assert [named.key for named in names_in(orjson.loads(orjson.dumps(tree)), RunConfig)] == [
        "model.path"
    ]
