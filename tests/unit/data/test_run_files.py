"""The shipped run files are valid and refer to existing files."""

from pathlib import Path

import pytest

from relax_events.config import load_run_config
from relax_events.data.sources import open_source
from relax_events.plugins import REWARDS, find_plugin

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_run_file_is_valid_and_named_after_its_run(path: Path) -> None:
    config = load_run_config(path, environment={})
    assert config.run.id == path.stem
    if "judge" not in config.roles():  # which scores without the function
        find_plugin(REWARDS, config.reward.function, what="reward.function")


def test_quickstart_uses_optional_roles_and_needs_no_user_files() -> None:
    config = load_run_config(CONFIGS / "quickstart.toml", environment={})
    assert {"reference", "actor-forward"} <= config.roles().keys()
    assert config.model.tiny is not None
    row = open_source(config.data, seed=0).row(0)
    assert row.answer
    assert len(row.answer) < config.engine.sampling.max_new_tokens
