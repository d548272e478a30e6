"""What differs between two sessions of a run, each change with its rule (see `resume_rules`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from relax_events.config.external_values import find_table
from relax_events.config.resume_rules import IN_FLIGHT, OnResume, Rule
from relax_events.config.run_config import RunConfig


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs from the run's last session; None is a key that is not
    there.
    """

    key: str
    old: Any
    new: Any
    rule: Rule
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"


def changes_between(
    old: RunConfig, new: RunConfig, *, old_tree: Mapping[str, Any], new_tree: Mapping[str, Any]
) -> list[Change]:
    """Return what differs, key by key, each with its rule; roles that come or go with a change
    count as a change of their own.

    Args:
        old: The run as it was.
        new: The run as it is wanted.
        old_tree: The run description on the log.
        new_tree: The new run description.
    """
    before, after = dict(_leaves(old_tree)), dict(_leaves(new_tree))
    changes = [
        _change(key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    was, will_be = (
        " ".join(sorted(config.roles().keys() - {"evaluator", "judge"})) for config in (old, new)
    )
    if was != will_be:
        changes.append(
            Change(
                "roles",
                was,
                will_be,
                Rule.NEVER,
                f"{IN_FLIGHT}, and were not worked on by the roles that come in",
            )
        )
    return changes


def find_rule(key: str) -> OnResume:
    """Return a key's rule: its own, or that of the innermost table around it that has one.

    Raises:
        ValueError: The key is in no section.
    """
    model: type[BaseModel] | None = RunConfig
    rule: OnResume | None = None
    for part in key.split("."):
        if model is None or (field := model.model_fields.get(part)) is None:
            break
        rule = _get_rule(field) or rule
        model = _get_section(field)
    if rule is None:
        raise ValueError(f"no section of a run file holds the key {key}")
    return rule


def list_rules(
    model: type[BaseModel] = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, OnResume]]:
    """Give each key or section that has a rule of its own, in the order of the run file's
    reference.
    """
    for name, field in model.model_fields.items():
        if (rule := _get_rule(field)) is not None:
            yield f"{prefix}{name}", rule
        if (section := _get_section(field)) is not None:
            yield from list_rules(section, f"{prefix}{name}.")


def _get_rule(field: FieldInfo) -> OnResume | None:
    return next((mark for mark in field.metadata if isinstance(mark, OnResume)), None)


def _get_section(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a key is; None for other keys, and for lists and tables by name,
    which change as a whole.
    """
    return None if get_origin(field.annotation) else find_table(field.annotation)


def _change(key: str, old: Any, new: Any) -> Change:
    on_resume = find_rule(key)
    is_asked = key == "run.num_steps" and new < old
    return Change(key, old, new, Rule.ACCEPTED if is_asked else on_resume.rule, on_resume.effect)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    return "(none)" if value is None else str(value)
