"""Writes docs/reference from the code: `python docs/generate.py` (or `--check`, which fails when a
page is out of date).
"""
# ruff: noqa: ISC004 - rows of tables stand on one line

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import sys
import typing
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from types import GenericAlias
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticUndefined

import relax_events
from benchmarks.environment import pinned
from relax_events import api, errors
from relax_events.algorithms.description import describe_algorithm, installed_algorithms
from relax_events.config import RunConfig
from relax_events.config.base import is_derived
from relax_events.config.resume_rules import Rule
from relax_events.config.session_changes import list_rules
from relax_events.confinement.entry_points import BOUNDED_POINTS, ENTRY_POINTS, PROGRAM
from relax_events.controller.metrics import HealthMetrics, RunMetrics, ScaleMetrics
from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.events.schemas import current_schemas
from relax_events.kafka.records import POLICY_VERSION_HEADER
from relax_events.projections.health import HealthState
from relax_events.projections.run_state import RunState
from relax_events.projections.scaling import ScaleState
from relax_events.rewards.registry import describe_reward, reward_names
from relax_events.telemetry.metrics import ErrorMetrics, WorkerMetrics
from relax_events.topics import TopicPlan

FOLDER = Path(__file__).parent / "reference"
SECURITY_PAGE = Path(__file__).parent / "explanation" / "security.md"
ENTRY_POINTS_HEADING = "## Entry points"
SCHEMA_FILE = "relax_events/config/run-file.schema.json"
TABLE = re.compile(r"(?<=\n\n)\|.*?(?=\n\n)", re.DOTALL)
CONVENTIONS = r"""## Conventions

Where implementations differ, this table gives the choice here and elsewhere. The versions compared are TRL 1.16.0 and one public copy of each other code base.
The entries for Stable-Baselines3 and for DAPO's own filter were not checked.

| question | here | elsewhere |
|---|---|---|
| Deviation of a prompt group: n or n - 1 | n - 1; `std_correction = 0` for n | verl, slime, NeMo-RL, OpenRLHF and TRL's GRPOTrainer n - 1, rLLM and TRL's AsyncGRPOTrainer n, AReaL either (`std_unbiased`); the papers don't say. For 8 samples the two differ by 7 %, alike for all prompts |
| Epsilon added to the deviation | 1e-6, in units of the reward; equal rewards give exact zeros | verl, slime and NeMo-RL 1e-6, TRL 1e-4 (AsyncGRPOTrainer 1e-8), AReaL 1e-5, OpenRLHF 1e-9, rLLM nothing |
| Lone sample of a prompt | advantage 0 (grpo, opo, maxrl), an error (rloo), its reward (reinforce_plus_plus) | verl and rLLM keep its reward, also without a deviation and in verl's rloo and opo; NeMo-RL and, in evaluation, TRL give 0 |
| Deviation of a batch, group mean (`whiten_advantages = "rewards"`) | of the rewards as scored, n - 1. The batch is the train step: all samples with loss tokens, over all micro-batches and ranks; prompt groups that were filtered, failed or expired are not among them. Equal rewards leave advantages as they are | TRL's `scale_rewards = "batch"` the same, over the batch that was generated, and 1e-4 is added |
| Deviation of a batch, of centred rewards (`"tokens"`, `"samples"`) | n, over the step's loss tokens, each counted, or its samples; 1e-8 is added; `std_correction = 1` for n - 1. The mean is subtracted again | over tokens NeMo-RL n, verl n - 1; both take 1e-8 into the variance (NeMo-RL as its least, verl adds it). Over samples TRL's RLOO `normalize_advantages` and NeMo-RL's GDPO n - 1 |
| Samples cut off by their length | trained (`truncated_samples = "train"`); `mask` removes their loss, `drop` also removes their reward from the prompt group's statistics. Of an episode that branched, only truncated paths are masked; it counts as truncated if its last path was. They count in no mean of the loss. A prompt group with only such samples is filtered, and another issued | DAPO's overlong filtering and TRL's `mask_truncated_completions` as `mask`; TRL counts them in the mean over samples, and with `constant_length` |
| Value after a truncated sample | 0; with `bootstrap_truncated` the critic's value at its last loss token, since no later one is recorded | verl and OpenRLHF 0; Stable-Baselines3 the value of the next state |
| Masked tokens between turns, in GAE and discounted returns | skipped: the next loss token follows | verl's `compute_gae_advantage_return` and NeMo-RL the same; verl's REINFORCE++ restarts from 0 after each masked token; OpenRLHF takes their values and rewards for 0 and discounts over them |
| Deviation with a leave-one-out mean | of the whole prompt group, around its mean | AReaL of the whole prompt group, around the means of the others: n / (n - 1) times as large; NeMo-RL also leaves the sample out of it, and does not divide if it is 0: `normalise_std = "leave_one_out"`, for equal rewards of the others exactly |
| Baseline (`baseline`) | the prompt group's mean, the mean of its other samples, or none; the step's mean is subtracted by the trainer (`whiten_advantages`), over loss tokens or samples | AReaL's `reward_norm` and `adv_norm` have a level for the mean and one for the deviation, each batch, group or none, and `mean_leave1out`; its group deviation under a batch mean is not offered |
| KL term of the loss | the estimate as it is; `kl_unbiased` multiplies it by the ratio | TRL multiplies it unless `use_bias_correction_kl = false` |
| KL estimates | k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d, `abs` = \|d\| with d = log(policy / reference); with `+` the value as before, the gradient of k2, which on policy is that of KL(policy \|\| reference). `kl_bound` bounds the value, for `low_variance` by 10 | verl `kl`, `mse`, `low_var_kl`, `abs` and the same `+`, k3 within -10 and 10; OpenRLHF, slime and SkyRL bound by 10; NeMo-RL `kl_output_clamp_value` |
"""
WHAT_IS_RETURNED = """## What a function may return

| returned | the sample's reward | also recorded |
|---|---|---|
| a number | that number | |
| numbers by name | the one called `reward`, or else their sum; with `reward.weights` their weighted sum | `components` |
| with a list `turn_rewards`, a number for each turn | as in the line above, 0 if there is nothing else, plus the sum of the list | `turn_rewards` |
| with a list `token_rewards`, a number for each loss token | likewise | `token_rewards` |

A turn is one answer of the policy: a contiguous run of loss tokens. The reward of a turn counts at its last loss token, the reward of a token at that token, and the
rest at the sample's last loss token. A list of another length, or a number beyond the range of float32 (+-3.4e38), fails the sample, and its prompt group ends as failed. An empty list counts as none.
[Some algorithms](algorithms.md) use the position of a reward."""
HEADERS = f"""## Headers

| header | of | meaning |
|---|---|---|
| `{POLICY_VERSION_HEADER}` | samples and records that belong to them | Version that owns the record's slot, in decimal: readers skip records outside the window without decoding them. |
| `traceparent`, `tracestate` | all records of a prompt group that is traced, steps, versions | W3C Trace Context, see [traces](../how-to/monitoring.md#traces). |
| `origin-topic`, `origin-partition`, `origin-offset`, `error-class`, `error-text`, `worker-id` | dead letters | Origin of the record, and its error; its own headers are kept. |"""


def main() -> int:
    """Write the pages, or with `--check` name those that differ."""
    pages = {
        "api.md": api_page(),
        "config.md": config_page(),
        "algorithms.md": algorithms_page(),
        "rewards.md": rewards_page(),
        "events.md": events_page(),
        "metrics.md": metrics_page(),
        "exit-codes.md": errors_page(),
        "resuming.md": resuming_page(),
        "../explanation/security.md": security_page(),
        f"../../{SCHEMA_FILE}": run_file_schema(),
    }
    stale = [
        name
        for name, text in pages.items()
        if not (FOLDER / name).exists() or (FOLDER / name).read_text() != text
    ]
    if "--check" in sys.argv:
        print(
            "\n".join(
                f"docs/reference/{name} is out of date; run: python docs/generate.py"
                for name in stale
            )
            or "docs/reference is up to date"
        )
        return 1 if stale else 0
    for name in stale:
        (FOLDER / name).write_text(pages[name])
    return 0


def security_page() -> str:
    """The page on security, with the table of entry points as the code has them."""
    before, heading, section = SECURITY_PAGE.read_text().partition(ENTRY_POINTS_HEADING)
    return before + heading + TABLE.sub(lambda _: entry_points_table(), section, count=1)


def entry_points_table() -> str:
    """Every place where foreign bytes enter; children of one kind are one row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for point in ENTRY_POINTS:
        doors = ", ".join(point.doors)
        rows.setdefault((doors, f"`{point.profile}`", point.why), []).append(point.name)
    for bounded in BOUNDED_POINTS:
        where = "sandbox" if bounded is PROGRAM else "in process"
        row = ", ".join(bounded.doors), where, bounded.bounds
        rows.setdefault(row, []).append(bounded.name)
    lines = [
        f"| {', '.join(names)} | {doors} | {profile} | {why} |"
        for (doors, profile, why), names in rows.items()
    ]
    head = [
        "| entry point | what reaches it | confinement | what that rests on |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *lines])


def api_page() -> str:
    """Every module of `relax_events.api`, with the signatures of its names."""
    parts = [
        "# The Python API",
        (inspect.getdoc(api) or "").replace("docs/reference/api.md", "This page"),
        *python_face(),
    ]
    for module in pkgutil.iter_modules(api.__path__):
        loaded = importlib.import_module(f"{api.__name__}.{module.name}")
        rows = [_describe_member(name, getattr(loaded, name)) for name in loaded.__all__]
        table = ["| name | what |", "|---|---|", *rows]
        parts += [f"## {loaded.__name__}", inspect.getdoc(loaded) or "", "\n".join(table)]
    return "\n\n".join(parts) + "\n"


def python_face() -> list[str]:
    """The names of the package itself, and what a handle to a run can do."""
    face = {name: getattr(relax_events, name) for name in relax_events.FACE}
    calls = {
        f"Run.{name}": member
        for name, member in vars(face["Run"]).items()
        if not name.startswith("_") and name != "start"
    }
    rows = [_describe_member(name, member) for name, member in (face | calls).items()]
    return [
        "## relax_events",
        "Training from a script or a notebook ([how](../how-to/train-from-python.md)).",
        "\n".join(["| name | what |", "|---|---|", *rows]),
    ]


def _describe_member(name: str, member: Any) -> str:
    """The row of a name: its signature, those of its methods, and what it is."""
    summary = (inspect.getdoc(member) or "").partition("\n\n")[0]
    if isinstance(member, property):
        return f"| `{name}` | {_one_line(summary)} |"
    if not callable(member) or isinstance(member, GenericAlias):
        return f"| `{name}` | `{member!r}` |"
    has_no_signature = isinstance(member, type) and issubclass(member, Enum | Exception | BaseModel)
    signatures = [name if has_no_signature else f"{name}{_show_signature(member)}"]
    if isinstance(member, type) and getattr(member, "_is_protocol", False):
        signatures = [name] + [
            f".{method}{_show_signature(function)}"
            for method, function in vars(member).items()
            if inspect.isfunction(function) and not method.startswith("_")
        ]
    code = "<br>".join(f"`{one.replace('|', chr(92) + '|')}`" for one in signatures)
    return f"| {code} | {_one_line(summary)} |"


def _show_signature(member: Any) -> str:
    signature = inspect.signature(member)
    shown = [
        one.replace(default="..." if one.default is not one.empty else one.empty)
        for one in signature.parameters.values()
        if one.name != "self"
    ]
    text = str(signature.replace(parameters=shown)).replace("'", "")
    return text.removesuffix(" -> None") if isinstance(member, type) else text


def config_page() -> str:
    """Every key of a run file."""
    parts = [
        "# The run file",
        "One TOML file a run. `RELAX_SECTION__KEY` in the environment overrides it, "
        "`section.key=value` on the command line overrides both. "
        "Relative paths, `.relax` among them, are of the directory that `relax` is called "
        "in, wherever the run file lies.",
        f"Editors check and complete a run file by its JSON schema, `{SCHEMA_FILE}`, which the "
        "package has. Taplo and Even Better TOML find it by a first line `#:schema file:///...`, "
        "which `relax init` writes. The schema knows the keys and the bounds of each; the rules "
        "between keys are those of `relax doctor`.",
    ]
    for name, field in RunConfig.model_fields.items():
        parts += _section(name, field.annotation)
    return "\n\n".join(parts) + "\n"


class RunFileSchema(GenerateJsonSchema):
    """Writes draft 7, which editors of TOML read, without null, which TOML lacks."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Keys have no title besides their name."""
        return False

    def nullable_schema(self, schema: Any) -> dict[str, Any]:
        """A key that may be None is left out of a run file."""
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: Any) -> dict[str, Any]:
        """Sections don't repeat the defaults of their keys."""
        inner = super().default_schema(schema)
        if inner.get("default") is None or isinstance(inner["default"], dict):
            inner.pop("default", None)
        return inner

    def tuple_schema(self, schema: Any) -> dict[str, Any]:
        """Draft 7 has the kinds of a fixed list in `items`."""
        inner = super().tuple_schema(schema)
        if "prefixItems" in inner:
            inner["items"] = inner.pop("prefixItems")
        return inner


def run_file_schema() -> str:
    """The JSON schema of a run file."""
    schema = RunConfig.model_json_schema(
        ref_template="#/definitions/{model}", schema_generator=RunFileSchema
    )
    schema = {"$schema": "http://json-schema.org/draft-07/schema#"} | schema
    schema["definitions"] = schema.pop("$defs")
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _section(name: str, kind: Any) -> list[str]:
    model: type[BaseModel] = next(
        arm
        for arm in (kind, *typing.get_args(kind))
        if isinstance(arm, type) and issubclass(arm, BaseModel)
    )
    rows, nested = [], []
    for key, field in model.model_fields.items():
        arms = (field.annotation, *typing.get_args(field.annotation))
        if any(isinstance(arm, type) and issubclass(arm, BaseModel) for arm in arms):
            by_name = ".NAME" if typing.get_origin(field.annotation) is dict else ""
            nested += _section(f"{name}.{key}{by_name}", field.annotation)
            continue
        default = (
            "required"
            if field.default is PydanticUndefined and field.default_factory is None
            else _default(field)
        )
        rows.append(f"| `{key}` | {default} | {_one_line(field.description)} |")
    lead = _one_line(model.__doc__)
    heading = f"## [[{name}]]" if typing.get_origin(kind) is tuple else f"## [{name}]"
    return [
        heading,
        lead,
        "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]),
        *nested,
    ]


def _default(field: Any) -> Any:
    if is_derived(field):
        return "derived"
    value = field.default_factory() if field.default is PydanticUndefined else field.default
    return f"`{value if isinstance(value, Path) else json.dumps(value, default=str)}`"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def algorithms_page() -> str:
    """Every installed algorithm."""
    lead = (
        "Each is one spec that names its parts; `relax algorithms NAME` prints the "
        "same. The settings are described in "
        "[the run file](config.md), the choice of an algorithm in [algorithms]"
        "(../how-to/algorithms.md). In the formulas lp is the trained "
        "policy's log-probability of a token, lo the old policy's (`old_logprobs`), R a "
        "sample's reward. To each loss are added "
        "`kl_coefficient` times the KL estimate, where `kl_placement` is `loss`, "
        "`distill_coefficient` times the divergence from the teacher, "
        "where `distill_placement` is `loss`, and `-entropy_coefficient` times the entropy.\n\n"
        "A step's loss and gradient don't depend on how its samples were ordered, cut into "
        "micro-batches, packed or spread over ranks: relative "
        "differences are below 1e-11 in float64 and 1e-4 in float32 "
        "(`tests/property/test_loss_invariance.py`).\n\n"
        "Losses, gradients and advantages of grpo, dapo, dr_grpo, gspo, gspo_token, sapo, "
        "cispo, gmpo, rloo, dpo and ipo, the KL and entropy terms, "
        "corrections, off-policy sequence masks and the divergences of a distillation are "
        "those of TRL's trainers on the same inputs, losses and "
        "gradients within 1e-9 (`tests/unit/algorithms/test_against_trl.py`): release "
        f"{pinned('trl', 'trl')} wrote `tests/data/trl.json`, and after `make trl` a test "
        "runs it again. That release has no PPO.\n\n"
        "R is the sum of a sample's rewards. Algorithms with an advantage for each token, "
        "`ppo` and `reinforce_plus_plus`, use their positions: a reward that a reward "
        "function returned [by turn](../how-to/extensions.md#by-turn-and-by-token) counts at "
        "the last loss token of its turn, a reward by token at that "
        "token, and the rest of R at the sample's last loss token. To all others, which have "
        "one advantage for a whole sample, use only R."
    )
    parts = ["# Algorithms", lead]
    for spec in installed_algorithms():
        description = describe_algorithm(spec.name)
        own = [
            f"`{key} = {value}`"
            for key, value in description["settings"].items()
            if key in spec.settings
        ]
        parts += [
            f"## {spec.name}",
            spec.summary,
            f"```\n{spec.formula}\n```",
            f"Settings of its own: {', '.join(own) or 'none'}.",
            f"Needs {description['needs']}.",
        ]
        parts += [spec.notes] if spec.notes else []
        excluded = dict(spec.excluded) | (
            {"trainer.num_epochs` and `trainer.num_mini_batches": spec.one_update}
            if spec.one_update
            else {}
        )
        parts += (
            [f"Not for it: {'; '.join(f'`{key}` ({why})' for key, why in excluded.items())}."]
            if excluded
            else []
        )
        parts += [f"Source: {spec.source}"]
    return "\n\n".join([*parts, CONVENTIONS])


def events_page() -> str:
    """Every topic and every Avro record."""
    parts = [
        "# Topics and events",
        (
            "The Avro schemas in `schemas/` are the contract; each record on the log is one of "
            "these, behind its schema's fingerprint or registry id."
        ),
        "## Topics",
        "Partitions are those of `run.max_staleness = 1` and `broker.partitions_per_version = 2`: three slots of two.",
        _topic_rows(),
        HEADERS,
    ]
    for name, schema in sorted(current_schemas().items()):
        if schema["type"] != "record":
            continue
        rows = [
            f"| `{field['name']}` | {_type(field['type'])} | {_one_line(field['doc'])} |"
            for field in schema["fields"]
        ]
        parts += [
            f"## {name.rsplit('.', 1)[-1]}",
            schema["doc"],
            "\n".join(["| field | type | meaning |", "|---|---|---|", *rows]),
        ]
    return "\n\n".join(parts) + "\n"


def _type(kind: Any) -> str:
    if isinstance(kind, list):
        return " or ".join(_type(arm) for arm in kind)
    if not isinstance(kind, dict):
        return str(kind).rsplit(".", 1)[-1]
    if kind["type"] == "array":
        return f"array of {_type(kind['items'])}"
    if kind["type"] == "map":
        return f"map of {_type(kind['values'])}"
    return str(kind.get("logicalType") or kind.get("name") or kind["type"])


def _topic_rows() -> str:
    specs = TopicPlan("RUN", 1, 2, 4, 1, "none").specs()
    rows = [
        (
            f"| `{spec.name}` | {spec.num_partitions} | {spec.settings['cleanup.policy']} | "
            f"{spec.doc} |"
        )
        for spec in specs
    ]
    return "\n".join(["| topic | partitions | clean-up | what |", "|---|---|---|---|", *rows])


def metrics_page() -> str:
    """Every metric: of a worker, and of the run."""
    tree = {
        "run": {"id": "documented"},
        "model": {"path": "model"},
        "data": {"source": "jsonl:rows"},
        "workers": {"drain_seconds": 20.0},
    }
    config = RunConfig.model_validate(tree)
    parts = [
        "# Metrics",
        (
            "All names begin with `relax_`, all values are in base units. No label holds a "
            "version or an id; the scrape target says which run it is."
        ),
        "## Of every worker\n\nServed on `/metrics` of every worker.",
        _metric_rows(
            [
                *WorkerMetrics("trainer").registry.collect(),
                *ErrorMetrics("trainer", broker={}, objects={}, away_seconds=float).collect(),
            ]
        ),
        (
            "## Of the run\n\nServed by the controller in addition, which keeps the run's state: "
            "it is rebuilt from the control log at each start."
        ),
        _metric_rows(
            [family for collector in _of_the_run(config) for family in collector.collect()]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _of_the_run(config: RunConfig) -> list[Collector]:
    health = HealthMetrics(HealthState.from_config(config, own_id="controller-0"), config)
    return [
        RunMetrics(config, RunState()),
        health,
        ScaleMetrics(ScaleState(), ScalingBounds.from_config(config, is_supervised=True)),
    ]


def _metric_rows(families: Iterable[Metric]) -> str:
    rows = [
        (
            f"| `{family.name}{'_total' if family.type == 'counter' else ''}` | {family.type} | "
            f"{family.documentation} |"
        )
        for family in families
    ]
    return "\n".join(["| metric | type | meaning |", "|---|---|---|", *rows])


def rewards_page() -> str:
    """Every installed reward."""
    lead = (
        "The names that `reward.function` accepts, as `relax rewards NAME` prints them. "
        "Options go into `[reward.options]`."
    )
    parts = ["# Rewards", lead, WHAT_IS_RETURNED]
    for name in reward_names():
        reward = describe_reward(name)
        parts += [f"## {name}", f"Scores {reward.scores}. {reward.text}"]
        if reward.failures:
            parts.append(f"Failures: {' '.join(reward.failures)}")
        if reward.metadata:
            rows = [f"| `{key}` | {_one_line(text)} |" for key, text in reward.metadata.items()]
            parts.append("\n".join(["| metadata | what |", "|---|---|", *rows]))
        if reward.options:
            rows = [
                (
                    f"| `{one.name}` | {_one_line(one.kind)} | "
                    f"{'required' if one.is_required else f'`{json.dumps(one.default)}`'} |"
                )
                for one in reward.options
            ]
            parts.append("\n".join(["| option | type | default |", "|---|---|---|", *rows]))
        if reward.source:
            parts.append(f"Source: {reward.source}.")
    return "\n\n".join(parts) + "\n"


def resuming_page() -> str:
    """What may change between the sessions of a run."""
    lead = (
        "`relax run` compares the run file with the one that the run's log describes, shows "
        "each key that differs, and applies this table. "
        f"`{Rule.FREE}`: the change applies. `{Rule.ACCEPTED}`: it changes the training "
        "from here on; give `--accept-changes`, or confirm on a "
        f"terminal. `{Rule.NEVER}`: the run can't resume with it; `relax runs fork` starts a "
        "separate run from its weights. If two lines match a key, the "
        "longer one applies. The log records each change and its first policy version: "
        "`relax runs show` and the report show it. A change that adds or removes a "
        "role is refused as well."
    )
    rows = [f"| `{key}` | {on.rule} | {_one_line(on.effect)} |" for key, on in list_rules()]
    return "\n".join(
        [
            "# Changing a run file between sessions",
            "",
            lead,
            "",
            "| key or section | may change | effect |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def errors_page() -> str:
    """The error tree and its exit codes."""
    codes = (
        "0 ok, 1 unexpected or goal not reached, 2 usage or configuration, 3 broker unreachable, "
        "4 refused by the broker, 5 schema, 6 a check found something, 7 fenced, 8 restart it: "
        "it hung and was asked to exit, or the object store stayed unavailable, 130 "
        "interrupted by Ctrl-C (SIGINT), 141 the reader of the output has gone, 143 interrupted "
        "by SIGTERM"
    )
    return (
        "# Errors and exit codes\n\nExit codes: "
        f"{codes}.\n\n```\n{(errors.__doc__ or '').strip()}\n```\n"
    )


if __name__ == "__main__":
    sys.exit(main())
