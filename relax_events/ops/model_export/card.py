"""Writes the model card of an exported folder: which run, data, algorithm and base model its
weights come from, and how they learned.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from relax_events import __version__
from relax_events.config import RunConfig
from relax_events.events.types import PolicyEvaluated, TrainStepCommitted
from relax_events.history.runs.details import highlights
from relax_events.ops.model_export.base_folder import BaseModel
from relax_events.ops.model_export.versions import read_metrics
from relax_events.printable import printable
from relax_events.projections.run_state import RunState
from relax_events.runtime.run_description import digest_config

PRIVATE_SETTINGS = ("model", "data", "objects")
"""Left out of the settings: paths of one machine, and values with a section of their own."""
MAX_CURVE_ROWS = 20
CURVE_METRICS = ("reward_mean", "loss", "kl_estimate", "entropy", "completion_tokens_mean")
LOCAL_FOLDERS = re.compile(r"(?<![\w./])(?:file://)?/(?:[^/\s:,]+/)+")
"""Absolute paths of one machine, of which the card shows the last part."""
THINKER_CLASS = "Qwen3OmniMoeThinkerForConditionalGeneration"
MODEL_CLASSES = dict.fromkeys(("qwen3_omni_moe", "qwen3_omni_moe_thinker"), THINKER_CLASS)
"""Of models that no auto class loads."""
PACKAGES = ("torch", "transformers")
MICROS = 1e6


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where exported weights come from.

    Attributes:
        config: The run.
        policy_version: The exported version.
        digest: Of its weights, as on the log.
        kind: `weights` or `checkpoint`.
        base: The base model.
        state: The folded control log, with all steps.
        content: Of the folder: `model`, `adapters` or `merged model`.
    """

    config: RunConfig
    policy_version: int
    digest: bytes
    kind: str
    base: BaseModel
    state: RunState
    content: str = "model"

    @property
    def steps(self) -> list[TrainStepCommitted]:
        """The train steps that led to the version, in order."""
        return [step for step in self.state.steps if step.policy_version <= self.policy_version]


def render_card(lineage: Lineage) -> str:
    """Return the model card, in Markdown with front matter for the hub."""
    config = lineage.config
    title = f"{config.run.id}, version {lineage.policy_version}"
    parts = [
        _front_matter(lineage),
        f"# {_inline(title)}",
        f"{_inline(lineage.base.name)}, trained by Relax Events with {config.algorithm.name}.",
        _section("Lineage", _table(("", ""), _lineage_rows(lineage))),
        _section("Base model", _table(("", ""), _base_rows(lineage.base))),
        _section("Data", _table(("source", "weight"), _data_rows(config))),
        _section("Settings", _table(("", ""), _setting_rows(config))),
        _section("Reward curve", _curve(lineage.steps)),
        _section("Evaluations", _evaluations(lineage)),
        _section("Use", _use(lineage)),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(lineage: Lineage) -> str:
    base = lineage.base
    task = "image-text-to-text" if base.is_multimodal else "text-generation"
    lines = [
        *([f"license: {_scalar(base.licence)}"] if base.licence else []),
        *([f"base_model: {_scalar(base.name)}"] if base.is_on_hub else []),
        f"library_name: {'peft' if lineage.content == 'adapters' else 'transformers'}",
        f"pipeline_tag: {task}",
        "tags:",
        "- relax-events",
        "- reinforcement-learning",
        f"- {_scalar(lineage.config.algorithm.name)}",
    ]
    return "\n".join(["---", *lines, "---"])


def _lineage_rows(lineage: Lineage) -> list[tuple[str, object]]:
    config, state, steps = lineage.config, lineage.state, lineage.steps
    described = state.description
    parent = config.parent
    written = described.package_version if described else "unknown"
    digest = described.config_digest if described else digest_config(config)
    rows: list[tuple[str, object]] = [
        ("run", config.run.id),
        ("policy version", f"{lineage.policy_version} of {config.last_version}"),
        ("content", lineage.content),
        ("weights, SHA-256", lineage.digest.hex()),
        ("read from", lineage.kind),
        ("run file, SHA-256", digest),
    ]
    if parent.run:
        rows.append(("trained from", f"{parent.run}, version {parent.from_version}"))
    if steps:
        rows += [
            ("trained", f"{_time(steps[0].committed_at)} to {_time(steps[-1].committed_at)}"),
            ("train steps", len(steps)),
            ("trained tokens", f"{sum(step.metrics.get('num_tokens', 0) for step in steps):.0f}"),
        ]
    return [
        *rows,
        ("run by", f"Relax Events {written}"),
        ("exported by", f"Relax Events {__version__}{_package_versions()}"),
    ]


def _base_rows(base: BaseModel) -> list[tuple[str, object]]:
    return [
        ("name", base.name),
        ("licence", base.licence or "unknown: the base folder's README.md names none"),
        ("architecture", base.model_type),
        ("config.json, SHA-256", base.config_digest),
    ]


def _data_rows(config: RunConfig) -> list[tuple[object, ...]]:
    weights = config.data.weights
    return [
        (without_local_folders(part.source), f"{weight:g}")
        for part, weight in zip(config.data.parts, weights, strict=True)
    ]


def _setting_rows(config: RunConfig) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [
        (name.replace("_", " "), without_local_folders(str(value)))
        for name, value in highlights(config).items()
        if name not in PRIVATE_SETTINGS
    ]
    frozen = ", ".join(config.model.frozen) or "none"
    return [*rows, ("dtype", config.model.dtype), ("frozen parts", frozen)]


def _curve(steps: Sequence[TrainStepCommitted]) -> str:
    """Return the metrics of some steps, evenly spread, the first and the last among them."""
    if not steps:
        return "No train step led to this version."
    names = [name for name in CURVE_METRICS if any(name in step.metrics for step in steps)]
    count = min(len(steps), MAX_CURVE_ROWS)
    indices = sorted({round(row * (len(steps) - 1) / max(count - 1, 1)) for row in range(count)})
    rows = [
        (steps[index].train_step, *(_number(steps[index].metrics.get(name)) for name in names))
        for index in indices
    ]
    return _table(("step", *names), rows)


def _evaluations(lineage: Lineage) -> str:
    events: Iterable[PolicyEvaluated] = lineage.state.evaluations.values()
    shown = sorted(
        (event for event in events if event.policy_version <= lineage.policy_version),
        key=lambda event: (event.dataset, event.policy_version),
    )
    if not shown:
        return "The run has no evaluation up to this version."
    names = sorted({name for event in shown for name in read_metrics(event)})
    rows = [
        (
            event.dataset,
            event.policy_version,
            event.num_prompts,
            *(_number(read_metrics(event).get(name)) for name in names),
        )
        for event in shown
    ]
    return _table(("dataset", "version", "prompts", *names), rows)


def _use(lineage: Lineage) -> str:
    if lineage.content == "adapters":
        return _use_adapters(lineage)
    reader, model = "AutoTokenizer", "AutoModelForCausalLM"
    if lineage.base.is_multimodal:
        reader = "AutoProcessor"
        model = MODEL_CLASSES.get(lineage.base.model_type, "AutoModelForImageTextToText")
    return (
        f"```python\nfrom transformers import {reader}, {model}\n\n"
        f'reader = {reader}.from_pretrained("FOLDER")\n'
        f'model = {model}.from_pretrained("FOLDER", dtype="auto")\n```\n\n'
        "```bash\nrelax serve FOLDER\npython -m sglang.launch_server --model-path FOLDER\n```"
    )


def _use_adapters(lineage: Lineage) -> str:
    base = lineage.base
    model = "AutoModelForCausalLM"
    if base.is_multimodal:
        model = MODEL_CLASSES.get(base.model_type, "AutoModelForImageTextToText")
    return (
        "The folder holds adapters; `BASE` stands for the base model's folder.\n\n"
        f"```python\nfrom peft import PeftModel\nfrom transformers import {model}\n\n"
        f'base = {model}.from_pretrained("BASE", dtype="auto")\n'
        'model = PeftModel.from_pretrained(base, "FOLDER")\n```\n\n'
        "```bash\nrelax serve FOLDER --base BASE\n```"
    )


def without_local_folders(text: str) -> str:
    """Return a setting without the folders of absolute paths: `jsonl:/home/me/rows.jsonl` becomes
    `jsonl:rows.jsonl`.
    """
    return LOCAL_FOLDERS.sub("", text)


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *([_inline(str(cell)) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _inline(text: str) -> str:
    """Return a text that can't end a table cell, a line, or start markup."""
    plain = printable(" ".join(text.split()))
    return "".join(f"\\{sign}" if sign in "|<>[]`*_\\" else sign for sign in plain)


def _scalar(text: str) -> str:
    """Return a text as a YAML scalar."""
    plain = printable(" ".join(text.split()))
    is_plain = all(sign.isalnum() or sign in "-._/" for sign in plain)
    return plain if is_plain and plain[:1].isalnum() else f'"{_quoted(plain)}"'


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _time(micros: int) -> str:
    return datetime.fromtimestamp(micros / MICROS, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _package_versions() -> str:
    numbers: dict[str, Any] = {}
    for name in PACKAGES:
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            continue
    return "".join(f", {name} {number}" for name, number in numbers.items())
