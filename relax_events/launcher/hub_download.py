"""Fetches what a run file names on the Hugging Face hub into this host's cache of it, by the hub's
own library: its variables (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE), deadlines and retries.

No file of a kind that can hold code is fetched.
"""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Literal

from relax_events.config import RowsConfig
from relax_events.config.hub_names import (
    MAIN,
    PREFIX,
    HubName,
    find_cached_commit,
    find_model_name,
    parse_hub_name,
)
from relax_events.data.hub_files import (
    CARD_FILE,
    choose_files,
    find_cached_files,
    locate_files,
    read_card,
)
from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.model_folder.tensors import WEIGHT_FILES
from relax_events.session.defaults import find_parent

SMALL_FILES = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "README.md",
    "LICEN[CS]E*",
    "NOTICE*",
    "USE_POLICY*",
)
OTHER_FILES = ("[!a]*/*", "a[!d]*/*", "consolidated*")
"""Not fetched: folders with the model in other forms (all but `additional_chat_templates`), and
weights in Mistral's own form."""
AGAIN = "run the same command again: what was fetched is kept"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
Report = Callable[[str], object]


def find_commit(name: HubName) -> str:
    """Return the commit of a branch or a tag: the one in this host's cache, else the hub's.

    Raises:
        ConfigError: The hub has no such name.
        EnvironmentProblem: The hub refuses it, or can't be reached.
    """
    if (commit := find_cached_commit(name)) is not None:
        return commit
    from huggingface_hub import HfApi

    with _explain_errors(name):
        revision = HfApi().resolve_revision(
            name.repo, repo_type=name.kind, revision=name.revision or MAIN
        )
    return revision.resolved


def fetch_models(
    models: Mapping[str, tuple[Path, bool]], *, with_weights: bool = True, report: Report
) -> None:
    """Fetch the models of a run that it names on the hub, unless this host's cache has them.

    Args:
        models: By key: the folder of each model, whose name has a commit, and whether its weights
            are read.
        with_weights: False fetches no weights.
        report: Called with a line for each model that is fetched.
    Raises:
        ConfigError: The hub has no such commit, or no weights as safetensors.
        EnvironmentProblem: The hub refuses a model or can't be reached, or the disk is full.
    """
    for key, (folder, has_weights) in models.items():
        if (name := find_model_name(folder)) is not None:
            _fetch_model(name, key=key, needs_weights=with_weights and has_weights, report=report)


def fetch_data(sources: Mapping[str, RowsConfig], *, report: Report) -> None:
    """Fetch the datasets that are named on the hub, unless this host's cache has them: the files of
    their configs and splits.

    Args:
        sources: By key; their names have commits.
        report: Called with a line for each that is fetched.
    Raises:
        ConfigError: The hub has no such commit, config or split, or in another format.
        EnvironmentProblem: As `fetch_models`.
    """
    for key, source in sources.items():
        if source.source.startswith(PREFIX):
            _fetch_dataset(source.source, source.split, key=key, report=report)


def fetch_dataset(text: str, split: str, *, key: str, report: Report) -> tuple[str, list[Path]]:
    """Fetch a dataset unless this host's cache has it; return its name with its commit, and its
    files.

    Args:
        text: `hf:org/name@revision:config:split`.
        split: The split where the name has none.
        key: Of the run file or the command, for errors.
        report: Called with a line if it is fetched.
    Raises:
        ConfigError: It is no name, or as `fetch_data`.
        EnvironmentProblem: As `fetch_models`.
    """
    name = _pin(text, "dataset", key=key)
    return str(name), _fetch_dataset(str(name), split, key=key, report=report)


def _pin(text: str, kind: Literal["model", "dataset"], *, key: str) -> HubName:
    try:
        name = parse_hub_name(text, kind)
    except ValueError as error:
        raise ConfigError(f"{key} {error}") from None
    return name if name.is_pinned else name.at(find_commit(name))


def _fetch_dataset(source: str, split: str, *, key: str, report: Report) -> list[Path]:
    if (files := find_cached_files(source, split, key=key)) is not None:
        return files
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    name = parse_hub_name(source, "dataset")
    report(f"fetching {key} {name} into {name.folder}")
    with _explain_errors(name):
        tree = HfApi().list_repo_tree(
            name.repo, repo_type=name.kind, revision=name.revision, recursive=True
        )
        sizes = {file.path: file.size for file in tree if isinstance(file, RepoFile)}
    if CARD_FILE in sizes:
        _download(name, [CARD_FILE])
    paths = choose_files(sizes, read_card(name), name, split=split, key=key)
    _require_room(name, {path: sizes[path] for path in paths})
    _download(name, [escape(path) for path in (*paths, CARD_FILE)], ignored=())
    return locate_files(source, split, key=key)


def fetch_model(text: str, *, key: str, report: Report) -> HubName:
    """Fetch a model unless this host's cache has it, and return its name with its commit.

    Args:
        text: `hf:org/name@revision`.
        key: Of the run file or the command, for errors.
        report: Called with a line if it is fetched.
    Raises:
        ConfigError: It is no name, or as `fetch_models`.
        EnvironmentProblem: As `fetch_models`.
    """
    name = _pin(text, "model", key=key)
    _fetch_model(name, key=key, needs_weights=True, report=report)
    return name


def _fetch_model(name: HubName, *, key: str, needs_weights: bool, report: Report) -> None:
    patterns = [*SMALL_FILES, *([WEIGHT_FILES] if needs_weights else [])]
    if _is_fetched(name, patterns):
        return
    report(f"fetching {key} {name} into {name.folder}")
    _download(name, list(SMALL_FILES))
    sizes = {path: size for path, size in _list_files(name).items() if "/" not in path}
    weights = {
        path: size for path, size in sizes.items() if path.endswith(WEIGHT_FILES.lstrip("*"))
    }
    if needs_weights and not weights:
        pickles = [path for path in sizes if path.endswith(PICKLES)]
        raise ConfigError(
            f"{key}: {name} has no weights as safetensors"
            + (f", only {pickles[0]}, and a pickle may hold code" if pickles else "")
            + "; name a repository or a revision with *.safetensors"
        )
    if needs_weights:
        _require_room(name, weights)
    _download(name, patterns)


def _is_fetched(name: HubName, patterns: list[str]) -> bool:
    """Return whether the cache has every file that is needed, without asking the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot_download(
            name.repo,
            repo_type=name.kind,
            revision=name.revision,
            allow_patterns=patterns,
            ignore_patterns=list(OTHER_FILES),
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return False
    return True


def _download(name: HubName, patterns: list[str], *, ignored: Sequence[str] = OTHER_FILES) -> None:
    from huggingface_hub import snapshot_download

    with _explain_errors(name), _quiet_unless_watched():
        snapshot_download(
            name.repo,
            repo_type=name.kind,
            revision=name.revision,
            allow_patterns=patterns,
            ignore_patterns=list(ignored),
        )


def _list_files(name: HubName) -> dict[str, int]:
    """Return the size in bytes of each file of a commit, from the cache's list of them."""
    from huggingface_hub import get_cached_repo_tree

    files = get_cached_repo_tree(name.repo, repo_type=name.kind, revision=name.revision)
    return {file.path: file.size for file in files}


def _require_room(name: HubName, sizes: dict[str, int]) -> None:
    """Refuse a download that the disk has no room for."""
    num_bytes = sum(size for path, size in sizes.items() if not (name.folder / path).is_file())
    free = shutil.disk_usage(find_parent(name.folder)).free
    if num_bytes > free:
        raise EnvironmentProblem(
            f"{name} has {num_bytes / 1e9:.1f} GB to fetch, and {name.folder} has room for "
            f"{free / 1e9:.1f} GB; free some, or set HF_HOME to a folder on a larger disk"
        )


@contextmanager
def _quiet_unless_watched() -> Iterator[None]:
    """Show the library's progress bars on a terminal alone."""
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _explain_errors(name: HubName) -> Iterator[None]:
    """Turn the library's errors into ours, each with its remedy."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    page = f"{hub}/{'datasets/' if name.kind == 'dataset' else ''}{name.repo}"
    try:
        yield
    except errors.GatedRepoError:
        raise EnvironmentProblem(
            f"{name} is gated: accept its conditions at {page}, and give a token of that account "
            "in HF_TOKEN, or by: hf auth login"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{hub} shows no {name.kind} {name.repo}: check the name; a private one needs a "
            "token in HF_TOKEN, or by: hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"{name.kind} {name.repo} has no revision {name.revision!r}; see {page}/commits/main"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.RevisionResolutionError) as error:
        raise EnvironmentProblem(_explain_absence(name, error)) from None
    except errors.HFValidationError as error:
        raise ConfigError(f"{name} is no name of the hub: {error}") from None
    except errors.HfHubHTTPError as error:
        raise EnvironmentProblem(
            f"{hub} refused {name} with status {error.response.status_code}; a status of 401 or "
            "403 asks for another token in HF_TOKEN, others for another attempt later"
        ) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free some of the disk, or set HF_HOME to a folder on a larger one"
        else:
            remedy = AGAIN
        raise EnvironmentProblem(f"fetching {name} from {hub} failed: {error}; {remedy}") from None
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # the transport's, re-exported
        raise EnvironmentProblem(f"fetching {name} from {hub} failed: {error}; {AGAIN}") from None


def _explain_absence(name: HubName, error: Exception) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return (
            f"{name} is not in this host's cache, and HF_HUB_OFFLINE forbids to fetch it; unset "
            f"it, or copy the cache of a host that has it to {constants.HF_HUB_CACHE}"
        )
    reason = " ".join(str(error.__cause__ or error).split())
    return (
        f"{name} is not in this host's cache, and {constants.ENDPOINT} can't be reached: "
        f"{reason}; HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy"
    )
