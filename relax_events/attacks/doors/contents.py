"""Texts that spell control tokens, and settings with secrets or hidden code, which the process of a
worker, or of a command, reads itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from relax_events.attacks.attacked_run import build_tiny_model
from relax_events.attacks.doors.stored import bounded_assault
from relax_events.attacks.options import SECRET, SECRET_OPTIONS, UNPROTECTED
from relax_events.attacks.suite import HELD, Assault, Attack
from relax_events.attacks.targets import Targets
from relax_events.attacks.texts import control_token_texts
from relax_events.config import DataConfig, RunConfig, load_run_config
from relax_events.config.external_values import names_in
from relax_events.confinement.entry_points import PROMPT_RENDERER, RUN_SETTINGS
from relax_events.data.rendering import PromptRenderer
from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage

say = ChatMessage.of_text
RUN_FILE = '[run]\nid = "demo"\n[model]\npath = "m"\n[data]\nsource = "jsonl:x"\n'


def content_assaults() -> Iterator[Assault]:
    """Give the assaults of texts and settings."""
    yield bounded_assault(PROMPT_RENDERER, _prepare_texts)
    yield bounded_assault(RUN_SETTINGS, _prepare_settings)


@contextmanager
def _prepare_texts(_: Targets) -> Iterator[list[Attack]]:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = build_tiny_model(Path(name) / "model")
        renderer = PromptRenderer.from_folder(folder, DataConfig(source="jsonl:x"))
        added = cast("Any", AutoTokenizer).from_pretrained(folder).added_tokens_decoder
        control = {one.content: number for number, one in added.items() if one.special}
        yield [
            Attack(f"{role}: {text!r:.60}", partial(_render, renderer, role, text, control))
            for role in ("user", "tool", "system")
            for text in dict.fromkeys(control_token_texts(list(control)))
        ]


def _render(renderer: PromptRenderer, role: str, text: str, control: dict[str, int]) -> str:
    """A message, and a reply of an environment, have the control tokens of the template alone."""
    before = [say("user", "abc")]
    ids = set(control.values())
    renders: tuple[Callable[[str], NDArray[np.int32]], ...] = (
        lambda content: renderer.prompt_tokens([say(role, content)]),
        lambda content: renderer.bridge_tokens(before, [say("user", content)]),
    )
    for render in renders:
        tokens = [[one for one in render(each).tolist() if one in ids] for each in ("abc", text)]
        if tokens[0] != tokens[1]:
            return f"control tokens are {tokens[1]}, and of a harmless text {tokens[0]}"
    return HELD


@contextmanager
def _prepare_settings(_: Targets) -> Iterator[list[Attack]]:
    yield [
        *(Attack(f"secret in {one[:60]}", partial(_load, one)) for one in SECRET_OPTIONS),
        *(Attack(f"allow_unprotected = {one!r}", partial(_list, one)) for one in UNPROTECTED),
        *(
            Attack(f"hidden {key} = {value!r}", partial(_list_key, key, value))
            for key, value in HIDDEN.items()
        ),
    ]


HIDDEN = {
    "reward.function": "/nfs/evil.py:f",
    "engine.name": "/nfs/evil.py:Engine",
    "environment.function": "/nfs/evil.py:f",
    "trainer.backend": "/nfs/evil.py:Backend",
    "engine.sglang.python": "/nfs/python",
    "objects.uri": "s3://evil/prefix",
    "model.path": "/nfs/evil",
    "data.media_root": "/",
    "reward.options.url": "http://evil",
    "environment.options.command": "sh",
}
"""Values of a description that name code, programs, addresses and files."""


def _load(argument: str) -> str:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "run.toml"
        path.write_text(RUN_FILE)
        try:
            load_run_config(path, [argument], environment={})
        except ConfigError as error:
            return "the error shows the secret" if SECRET in str(error) else HELD
    return "the secret was taken"


def _list(value: object) -> str:
    return _list_key("reward.options.allow_unprotected", value)


def _list_key(key: str, value: object) -> str:
    """A description's value is listed, so that a fork asks before it uses it."""
    tree: object = value
    for name in reversed(key.split(".")):
        tree = {name: tree}
    listed = [one.key for one in names_in(tree, RunConfig)]  # type: ignore[arg-type]
    return HELD if listed == [key] else "it is not listed"
