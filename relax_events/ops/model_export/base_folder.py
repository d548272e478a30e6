"""The files and the licence that an exported folder takes from the base model's folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from relax_events.model_folder import read_model_json
from relax_events.regular_files import open_regular, read_regular_text

CARD_FILE = "README.md"
COPIED_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken"}
COPIED_NAMES = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY)", re.IGNORECASE)
RECIPE_FILE = "relax_events.json"
"""How `relax models prepare` made the model; the exported model was trained since."""
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_HOLDERS = ("tokenizer_config.json", "chat_template.json")
"""The second is an older place of processors."""
TEMPLATES_FOLDER = "additional_chat_templates"
CACHED_NAME = re.compile(r"models--([^/]+?)--([^/]+)")
"""A folder in the cache of Hugging Face's hub."""
FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---", re.DOTALL)
DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base model as the card names it.

    Attributes:
        name: `organisation/name` of the hub where it is known, else the folder's name.
        is_on_hub: Whether `name` is that of the hub.
        licence: Identifier; empty when unknown.
        config_digest: SHA-256 of its `config.json`, hexadecimal.
        model_type: Of its `config.json`.
        is_multimodal: Whether it reads media.
    """

    name: str
    is_on_hub: bool
    licence: str
    config_digest: str
    model_type: str
    is_multimodal: bool


def read_base_model(folder: Path) -> BaseModel:
    """Read the name and the licence of the model in a folder.

    Raises:
        ConfigError: Its `config.json` can't be read.
    """
    config = read_model_json(folder / "config.json")
    card = _read_front_matter(folder / CARD_FILE)
    match = CACHED_NAME.search(str(folder.absolute()))
    name = f"{match[1]}/{match[2]}" if match else ""
    return BaseModel(
        name=name or folder.absolute().name,
        is_on_hub=bool(name),
        licence=card.get("license", ""),
        config_digest=sha256(read_regular_text(folder / "config.json").encode()).hexdigest(),
        model_type=str(config.get("model_type", "")),
        is_multimodal=(folder / "preprocessor_config.json").is_file(),
    )


def _read_front_matter(path: Path) -> dict[str, str]:
    """Return the single-line values at the top of a model card; empty without a front matter."""
    try:
        match = FRONT_MATTER.match(read_regular_text(path))
    except (OSError, UnicodeDecodeError):
        return {}
    lines = match[1].splitlines() if match else []
    pairs = (line.partition(":") for line in lines if re.match(r"\w+:", line))
    return {key: value.strip().strip("\"'") for key, _, value in pairs}


def copy_small_files(
    base: Path, target: Path, *, chat_template: str = "", without: Collection[str] = ()
) -> None:
    """Copy configuration, tokenizer, chat template, preprocessor and licence.

    Code is not copied, nor are weights in other formats.

    Args:
        base: The base model's folder.
        target: The folder to write; exists.
        chat_template: The text of the template that the run trained with; empty keeps the base
            model's.
        without: Names of files to leave out.
    Raises:
        ConfigError: The base model's settings of its tokenizer are not JSON.
        OSError: A file can't be copied.
    """
    for path in sorted(base.iterdir()):
        if path.is_file() and _is_copied(path.name) and path.name not in without:
            _copy(path, target / path.name)
    if (base / TEMPLATES_FOLDER).is_dir():
        (target / TEMPLATES_FOLDER).mkdir()
        for path in sorted((base / TEMPLATES_FOLDER).glob("*.jinja")):
            _copy(path, target / TEMPLATES_FOLDER / path.name)
    if chat_template:
        _write_template(target, chat_template)


def _write_template(folder: Path, text: str) -> None:
    """Write a chat template into all files that loaders take it from; a folder that has no other
    template stays as it was published.
    """
    holders = {
        name: read_model_json(folder / name)
        for name in TEMPLATE_HOLDERS
        if (folder / name).is_file()
    }
    templates = [tree["chat_template"] for tree in holders.values() if tree.get("chat_template")]
    if (folder / TEMPLATE_FILE).is_file():
        templates.append((folder / TEMPLATE_FILE).read_text())
    if templates and all(template == text for template in templates):
        return
    (folder / TEMPLATE_FILE).write_text(text)
    for name, tree in holders.items():
        data = orjson.dumps(tree | {"chat_template": text}, option=orjson.OPT_INDENT_2)
        (folder / name).write_bytes(data + b"\n")


def _is_copied(name: str) -> bool:
    if name.startswith(".") or name in (RECIPE_FILE, CARD_FILE) or name.endswith(".index.json"):
        return False
    return Path(name).suffix in COPIED_SUFFIXES or bool(COPIED_NAMES.match(name))


def _copy(path: Path, target: Path) -> None:
    with open_regular(path) as source, target.open("xb") as file:
        shutil.copyfileobj(source, file)


def set_dtype(folder: Path, dtype: str) -> None:
    """Let `config.json` name the dtype of the exported weights, where it names another.

    Args:
        folder: The exported folder.
        dtype: Of the trained weights.
    Raises:
        ConfigError: `config.json` can't be read.
    """
    path = folder / "config.json"
    config = read_model_json(path)
    changed = _with_dtype(config, dtype)
    if not any(key in config for key in DTYPE_KEYS):
        changed = changed | {"dtype": dtype}
    if changed != config:
        path.write_bytes(orjson.dumps(changed, option=orjson.OPT_INDENT_2) + b"\n")


def _with_dtype(tree: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    return {
        key: _with_dtype(value, dtype)
        if isinstance(value, Mapping)
        else dtype
        if key in DTYPE_KEYS and value is not None
        else value
        for key, value in tree.items()
    }
