"""The model of a run file is compared with the run's published weights: names and shapes, read from
headers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.events.types import PolicyVersionPublished
from relax_events.launcher.broker_checks import find_difference, require_fitting_model
from relax_events.objects import ObjectStore
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.weights.artifact_writer import write_weights

MakeRunConfig = Callable[..., RunConfig]


@pytest.fixture
def published(
    make_run_config: MakeRunConfig, tmp_path: Path
) -> tuple[RunConfig, PolicyVersionPublished]:
    """Return a run that has published its model as version 7."""
    config = make_run_config()
    make_tiny(config.model.path, corpus=["12=21"], hidden_size=32)
    tensors = load_file(config.model.path / "model.safetensors")
    artifact, _ = write_weights(ObjectStore.open(config.objects_uri), tensors, policy_version=7)
    return config, PolicyVersionPublished(
        policy_version=7, artifact=artifact, transports=["store"], start_offsets=[]
    )


def with_model(config: RunConfig, path: Path) -> RunConfig:
    """Return the run with another model."""
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def test_model_that_the_run_started_with_is_accepted(
    published: tuple[RunConfig, PolicyVersionPublished],
) -> None:
    config, newest = published
    assert require_fitting_model(config, newest) == f"{config.model.path} fits policy version 7"


@pytest.mark.parametrize(
    ("made", "difference"),
    [
        ({"hidden_size": 64}, r"lm_head\.weight is \[\d+, 64\] there and \[\d+, 32\]"),
        ({"hidden_size": 32, "num_layers": 3}, r"model\.layers has 3 layers there and 2"),
    ],
)
def test_different_model_is_rejected_with_the_difference(
    published: tuple[RunConfig, PolicyVersionPublished],
    tmp_path: Path,
    made: dict[str, int],
    difference: str,
) -> None:
    config, newest = published
    other = make_tiny(tmp_path / "other", corpus=["12=21"], **made)
    expected = rf"model.path .*other is not the model of run {config.run.id}: {difference} in policy version 7; set model.path to"
    with pytest.raises(ConfigError, match=expected):
        require_fitting_model(with_model(config, other), newest)


def test_model_check_is_skipped_without_version_model_or_manifest(
    published: tuple[RunConfig, PolicyVersionPublished], tmp_path: Path
) -> None:
    config, newest = published
    assert require_fitting_model(config, None).startswith("nothing to compare")
    assert require_fitting_model(with_model(config, tmp_path / "none"), newest).startswith(
        "nothing to compare"
    )
    for path in tmp_path.rglob("manifest-*.json"):
        path.unlink()
    assert require_fitting_model(config, newest).startswith("not compared with policy version 7: ")


def test_model_comparison_ignores_tensors_present_on_one_side_only() -> None:
    assert find_difference({"a": (1,), "experts.0.w": (2,)}, {"a": (1,), "experts.w": (4, 2)}) == ""
