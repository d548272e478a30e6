"""Imports of roles and run files: each in its own process, without libraries that
it does not use.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SERVICES = yaml.safe_load((ROOT / "compose" / "docker-compose.yml").read_text())["services"]
LIGHT_ROLES = [
    service["command"][1]
    for service in SERVICES.values()
    if service.get("command", [""])[0] == "worker" and service["build"]["target"] == "light"
]
MODEL_LIBRARIES = ("torch", "transformers", "safetensors", "tokenizers", "opentelemetry")


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (
            "import relax_events.config",
            ("torch", "confluent_kafka", "numpy", "fastavro", "obstore"),
        ),
        (
            (
                "import workers.advantage; from relax_events.config import AlgorithmConfig; "
                "AlgorithmConfig(name='gspo').spec"
            ),
            ("torch",),
        ),
        ("import workers.rollout, relax_events.models.tokenizer_folder", ("torch", "transformers")),
        ("; ".join(f"import workers.{role}" for role in LIGHT_ROLES), MODEL_LIBRARIES),
    ],
    ids=["run files", "advantage", "rollout", "roles of the light image"],
)
def test_light_modules_import_no_heavy_packages(code: str, absent: tuple[str, ...]) -> None:
    asked = f"{code}; import sys; print([name for name in {absent} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", asked],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.strip() == "[]"


def test_light_image_has_the_roles_that_need_no_model() -> None:
    assert sorted(LIGHT_ROLES) == ["advantage", "controller", "metrics", "prompter", "reward"]
