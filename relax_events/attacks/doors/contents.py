"""Texts that spell control tokens, replies of a policy's server, and settings with secrets or
hidden code, which the process of a worker, or of a command, reads itself.
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
from relax_events.attacks.hostile_service import (
    MARK,
    hostile_service,
    list_policy_replies,
    list_replies,
)
from relax_events.attacks.options import SECRET, SECRET_OPTIONS, UNPROTECTED
from relax_events.attacks.suite import HELD, Assault, Attack
from relax_events.attacks.targets import Targets
from relax_events.attacks.texts import control_token_texts
from relax_events.config import DataConfig, RunConfig, SamplingConfig, load_run_config
from relax_events.config.external_values import names_in
from relax_events.confinement.entry_points import POLICY_SERVER, PROMPT_RENDERER, RUN_SETTINGS
from relax_events.data.control_tokens import TURN_TAGS
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import (
    EnvironmentContext,
    GeneratedSample,
    GenerationRequest,
    SampleRequest,
)
from relax_events.episodes.chat_engine import ChatEngine, ChatServer
from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage

say = ChatMessage.of_text
REPLY_SECONDS = 1.0
POLL_SECONDS = 60.0
CALLS_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}({{ call.function.name }} "
    "{{ call.function.arguments }}){% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes a call's name and arguments as they come."""
RUN_FILE = '[run]\nid = "demo"\n[model]\npath = "m"\n[data]\nsource = "jsonl:x"\n'


def content_assaults() -> Iterator[Assault]:
    """Give the assaults of texts, replies and settings."""
    yield bounded_assault(PROMPT_RENDERER, _prepare_texts)
    yield bounded_assault(POLICY_SERVER, _prepare_policy_replies)
    yield bounded_assault(RUN_SETTINGS, _prepare_settings)


@contextmanager
def _prepare_texts(_: Targets) -> Iterator[list[Attack]]:
    with tempfile.TemporaryDirectory() as name:
        folder = build_tiny_model(Path(name) / "model")
        renderer = PromptRenderer.from_folder(folder, DataConfig(source="jsonl:x"))
        control = _list_control_tokens(folder)
        yield [
            Attack(f"{role}: {text!r:.60}", partial(_render, renderer, role, text, control))
            for role in ("user", "tool", "system")
            for text in dict.fromkeys(control_token_texts(list(control)))
        ]


def _list_control_tokens(folder: Path) -> dict[str, int]:
    """Return texts and ids of a model's control tokens."""
    from transformers import AutoTokenizer

    added = cast("Any", AutoTokenizer).from_pretrained(folder).added_tokens_decoder
    return {one.content: number for number, one in added.items() if one.special}


@contextmanager
def _prepare_policy_replies(targets: Targets) -> Iterator[list[Attack]]:
    """Ask for each reply by name. The replies that no reward takes may become samples here."""
    port = targets.outside["port"]
    with tempfile.TemporaryDirectory() as name:
        folder, template = build_tiny_model(Path(name) / "model"), Path(name) / "template.jinja"
        template.write_text(CALLS_TEMPLATE)
        data = DataConfig(source="jsonl:x", chat_template_file=template)
        renderer, control = PromptRenderer.from_folder(folder, data), _list_control_tokens(folder)
        more = list_policy_replies(dict.fromkeys(control_token_texts(list(control))))
        with hostile_service(port, more) as url:
            engine = ChatEngine(ChatServer(url=url, seconds=REPLY_SECONDS), renderer)
            try:
                samples = _generate(engine, [*list_replies(port), *more])
            finally:
                engine.close()
    control_ids = {number for text, number in control.items() if text not in TURN_TAGS}
    yield [Attack(one.sample_id, partial(_judge_reply, one, control_ids)) for one in samples]


def _generate(engine: ChatEngine, names: list[str]) -> list[GeneratedSample]:
    """Return a sample for each reply of the service."""
    nothing = np.zeros(0, np.int32)
    for name in names:
        sample = SampleRequest(
            sample_id=name,
            seed=0,
            tokens=nothing,
            logprobs=np.zeros(0, np.float32),
            segments=(),
        )
        context = EnvironmentContext(messages=[say("user", f"{MARK}{name};")])
        engine.submit(
            GenerationRequest(
                prompt_group_id=name,
                prompt_tokens=nothing,
                samples=(sample,),
                sampling=SamplingConfig(max_new_tokens=64),
                stop_token_ids=(),
                environment_context=context,
            )
        )
    samples: list[GeneratedSample] = []
    while engine.num_running:
        samples += engine.poll(timeout_seconds=POLL_SECONDS)
    return samples


def _judge_reply(sample: GeneratedSample, control: set[int]) -> str:
    """A reply fails its sample, or has one control token, its end, and tags of a turn."""
    ids = [one for one in sample.tokens.tolist() if one in control]
    is_held = sample.error or (len(ids) == 1 and int(sample.tokens[-1]) in control)
    return HELD if is_held else f"control tokens are {ids}"


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
