"""The real clients of the token route, `renderers` and `verifiers`, against a served model.

They are installed in an environment of their own, `make agents`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from engine_requests import plain_logprobs, tiny_model
from served_model import TOKEN, served
from tokenizers import AddedToken, Tokenizer

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-agents" / "bin" / "python"
CLIENT = Path(__file__).with_name("renderers_client.py")
ADDED = ("<tool_response>", "</tool_response>")
"""Special tokens that the renderer of Qwen3 looks for; no prompt of the test has them."""
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of `make agents`"),
]


def copy_with_qwens_tokens(path: Path, folder: Path) -> Path:
    """Copy a model's tokenizer, as far as the renderer of Qwen3 needs it: with all its special
    tokens, and without one for unknown text.
    """
    shutil.copytree(path, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"unk_token": None}))
    return folder


def test_renderers_and_verifiers_get_the_engines_tokens_and_logprobs(tmp_path: Path) -> None:
    path = tiny_model()
    folder = copy_with_qwens_tokens(path, tmp_path / "qwen")
    with served(path, max_context_tokens=128) as url:
        printed = subprocess.run(
            [PYTHON, CLIENT, url, folder, TOKEN],
            check=True,
            capture_output=True,
            text=True,
            timeout=200,
        ).stdout
    found = json.loads(printed.splitlines()[-1])
    first, second = found["turns"]
    for turn in (first, second):
        assert turn["completion_ids"]
        np.testing.assert_allclose(
            turn["completion_logprobs"],
            plain_logprobs(np.array(turn["prompt_ids"]), np.array(turn["completion_ids"])),
            atol=1e-4,
        )
    known = [*first["prompt_ids"], *first["completion_ids"]]
    assert second["prompt_ids"][: len(known)] == known
    assert found["verifiers"]["tokens"]["completion_ids"] == first["completion_ids"]
