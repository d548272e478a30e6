"""A model folder with custom code is rejected and the code does not run, also where transformers
would ask a user.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path
from relax_events.errors import ConfigError
import torch
from relax_events.models.causal_lm import load_causal_lm
try:
    load_causal_lm(Path(sys.argv[1]), attention="sdpa", dtype=torch.float32, device=torch.device("cpu"))
except ConfigError as error:
    print("refused:", error)
"""


def test_code_of_a_model_folder_is_not_run(tmp_path: Path) -> None:
    config = {
        "model_type": "own",
        "architectures": ["Own"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(
        f"open({str(tmp_path / 'pwned')!r}, 'w')\nclass OwnConfig: pass\nclass Own: pass\n"
    )
    asking, terminal = pty.openpty()
    os.write(asking, b"y\n" * 5)
    try:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
        result = subprocess.run(
            command, stdin=terminal, capture_output=True, text=True, timeout=200, check=False
        )
    finally:
        os.close(asking)
        os.close(terminal)
    assert result.stdout.startswith("refused: model.path"), result.stderr
    assert not (tmp_path / "pwned").exists()
