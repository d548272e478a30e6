"""A secret in a run file or an argument is refused, by name and remedy, and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_events.config import load_run_config
from relax_events.errors import ConfigError

HEAD = '[run]\nid = "demo"\n[model]\npath = "m"\n[data]\nsource = "jsonl:x"\n'
SECRET = "hunter2-hunter2"


def refusal(tmp_path: Path, text: str = "", *overrides: str, environment: dict[str, str] | None = None) -> str:
    """Return why a run file is refused."""
    path = tmp_path / "run.toml"
    path.write_text(HEAD + text)
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, overrides, environment=environment or {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "overrides", "environment"),
    [
        (f'[broker.client]\n"sasl.password" = "{SECRET}"', (), {}),
        (f'[broker.client]\nsasl.password = "{SECRET}"', (), {}),
        ("", (f'broker.client={{"sasl.password" = "{SECRET}"}}',), {}),
        ("", (f"broker.client.sasl.password={SECRET}",), {}),
        ("", (), {"RELAX_BROKER__CLIENT": f'{{"sasl.password" = "{SECRET}"}}'}),
    ],
    ids=["quoted", "dotted", "inline-argument", "dotted-argument", "environment"],
)
def test_password_among_client_settings_is_refused(tmp_path: Path, text: str, overrides: tuple[str, ...], environment: dict[str, str]) -> None:
    said = refusal(tmp_path, text, *overrides, environment=environment)
    assert "broker.client: sasl.password is a secret and must not stand in a run file, an argument or a log" in said
    assert "name that in broker.password_file, or set BROKER_PASSWORD in the environment" in said
    assert SECRET not in said


@pytest.mark.parametrize("key", ["ssl.key.password", "ssl.key.pem", "ssl.keystore.password", "sasl.oauthbearer.client.secret"])
def test_other_secrets_are_sent_to_files(tmp_path: Path, key: str) -> None:
    said = refusal(tmp_path, f'[broker.client]\n"{key}" = "{SECRET}"')
    assert f"{key} is a secret" in said
    assert "name that in broker.secret_files" in said
    assert SECRET not in said


@pytest.mark.parametrize(
    "override",
    [f"sasl.password {SECRET}", f"broker.client={SECRET}", f"broker.client.sasl.password.x={SECRET}", f"run.id.password={SECRET}"],
)
def test_misplaced_secret_is_not_shown(tmp_path: Path, override: str) -> None:
    assert SECRET not in refusal(tmp_path, "", override)


def test_secret_files_are_for_secrets(tmp_path: Path) -> None:
    said = refusal(tmp_path, '[broker.secret_files]\n"linger.ms" = "/run/secrets/linger"')
    assert "linger.ms is no secret setting of librdkafka" in said
