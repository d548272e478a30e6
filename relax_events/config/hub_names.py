"""Models and datasets by their name on the Hugging Face hub, as run files spell them:
`hf:org/name@revision`, for a dataset also `hf:org/name@revision:config:split`.

A run is described by commits: a name without one takes that of this host's cache of the hub when
a run file is read. A commit's files lie in that cache, in a folder that follows from the name;
nothing here uses the network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer

from relax_events.config.external_values import Names

PREFIX = "hf:"
MAIN = "main"
MODEL_KEYS = ("path", "model_path")
DATA_KEY = "source"
NAME = re.compile(
    r"hf:(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?"
    r"(?P<parts>(?::[^:\[\]@\s]+){0,2})(?P<rows>\[\d*:\d*\])?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
SNAPSHOT = re.compile(r".*/models--(?P<repo>[^/]+)/snapshots/(?P<revision>.+)")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the hub at a revision.

    Attributes:
        kind: What it holds.
        repo: `org/name`, or the name alone where the hub has it so.
        revision: A branch, a tag or a commit of 40 hexadecimal digits; empty takes the hub's main
            branch.
        parts: Of a dataset: its config, its split, or both in this order.
        rows: Of a dataset: the slice `[first:last]`, or empty.
    """

    kind: Literal["model", "dataset"]
    repo: str
    revision: str = ""
    parts: tuple[str, ...] = ()
    rows: str = ""

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit."""
        return COMMIT.fullmatch(self.revision) is not None

    @property
    def folder(self) -> Path:
        """Where the files of the commit are, or will be, in this host's cache; of another revision
        a folder that never exists.
        """
        from huggingface_hub import constants

        cache = Path(constants.HF_HUB_CACHE).expanduser().resolve()
        repo = "--".join((f"{self.kind}s", *self.repo.split("/")))
        return cache / repo / "snapshots" / (self.revision or MAIN)

    def at(self, commit: str) -> HubName:
        """Return the name with a commit for its revision."""
        return replace(self, revision=commit)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return (
            f"{PREFIX}{self.repo}{revision}{''.join(f':{part}' for part in self.parts)}{self.rows}"
        )


CommitFinder = Callable[[HubName], str | None]
"""Returns the commit of a name that has another revision; None where this host does not know
it."""


def parse_hub_name(text: str, kind: Literal["model", "dataset"]) -> HubName:
    """Read a name that begins with `hf:`.

    Raises:
        ValueError: It is of no such form, or a model's name has a dataset's parts.
    """
    match = NAME.fullmatch(text)
    if match is None or ".." in text or (kind == "model" and (match["parts"] or match["rows"])):
        form = "hf:org/name[@revision]" + ("[:config][:split]" if kind == "dataset" else "")
        raise ValueError(f"must have the form {form}, got {text!r}")
    parts = tuple(match["parts"].split(":")[1:])
    return HubName(kind, match["repo"], match["revision"] or "", parts, match["rows"] or "")


def find_earlier_name(text: str, earlier: object) -> str | None:
    """Return an earlier name with a commit that a name without any revision may stand for: it is of
    the same part of the same repository. None where there is none.
    """
    if not isinstance(earlier, str) or not earlier.startswith(PREFIX):
        return None
    name, old = (parse_hub_name(one, "dataset") for one in (text, earlier))
    is_same = not name.revision and old.is_pinned and name.at(old.revision) == old
    return earlier if is_same else None


def find_cached_commit(name: HubName) -> str | None:
    """Return the commit that this host's cache has for a branch or a tag; None where it has
    none.
    """
    path = name.at(MAIN).folder.parents[1] / "refs" / (name.revision or MAIN)
    try:
        commit = path.read_text().strip()
    except OSError:
        return None
    return commit if COMMIT.fullmatch(commit) else None


def pin_names(tree: dict[str, Any], find_commit: CommitFinder) -> dict[str, str]:
    """Replace the names in a run file by names with commits, in place.

    Args:
        tree: The run file.
        find_commit: Says which commit a name stands for; a name whose commit is unknown stays.
    Returns:
        The names that had none, by key; `data.datasets.0.source` is a key of a list.
    Raises:
        ValueError: A name has another form; the text names the key.
    """
    unpinned = {}
    for key, table, last in list(_list_names(tree)):
        text = table[last]
        try:
            name = parse_hub_name(text, "dataset" if last == DATA_KEY else "model")
        except ValueError as error:
            raise ValueError(f"{key} {error}; set {key}") from None
        if name.is_pinned:
            continue
        unpinned[key] = text
        if (commit := find_commit(name)) is not None:
            table[last] = str(name.at(commit))
    return unpinned


def _list_names(tree: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """Give each name of the hub: its key, the table that holds it and its key there."""
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        whole_key = f"{key}.{name}" if key else str(name)
        if isinstance(value, str) and name in (*MODEL_KEYS, DATA_KEY) and value.startswith(PREFIX):
            yield whole_key, tree, name
        elif isinstance(value, list):
            for number, one in enumerate(value):
                yield from _list_names(one, f"{whole_key}.{number}")
        else:
            yield from _list_names(value, whole_key)


def find_model_name(folder: Path) -> HubName | None:
    """Return the name whose files a folder holds; None for any other folder."""
    match = SNAPSHOT.fullmatch(str(folder))
    if match is None:
        return None
    name = HubName("model", match["repo"].replace("--", "/", 1), match["revision"])
    is_name = folder == name.folder and (name.is_pinned or not folder.exists())
    return name if is_name else None


def _find_folder(value: Any) -> Any:
    """Return the folder of a name; anything else as it is."""
    text = str(value)
    return parse_hub_name(text, "model").folder if text.startswith(PREFIX) else value


def _write_folder(folder: Path) -> str:
    """Return the name of a folder of the hub's cache, which is the same on every host; the path of
    any other.
    """
    return str(find_model_name(folder) or folder)


ModelFolder = Annotated[
    Path,
    BeforeValidator(_find_folder),
    PlainSerializer(_write_folder, return_type=str, when_used="json"),
    Names.FILE,
]
"""A model's folder; a name of the hub stands for a folder in the hub's cache of this host."""
