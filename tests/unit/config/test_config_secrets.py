"""A secret in a run file or an argument is rejected with its key and a remedy, and
never printed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relax_events.attacks.options import SECRET, SECRET_OPTIONS
from relax_events.config import load_run_config
from relax_events.config.addresses import refuse_secret_values
from relax_events.errors import ConfigError

HEAD = '[run]\nid = "demo"\n[model]\npath = "m"\n[data]\nsource = "jsonl:x"\n'


def refusal(
    tmp_path: Path, text: str = "", *overrides: str, environment: dict[str, str] | None = None
) -> str:
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
def test_password_in_client_settings_is_rejected(
    tmp_path: Path, text: str, overrides: tuple[str, ...], environment: dict[str, str]
) -> None:
    said = refusal(tmp_path, text, *overrides, environment=environment)
    assert (
        "broker.client: sasl.password is a secret and must not be in a run file, an "
        "argument or a log"
    ) in said
    assert "name that in broker.password_file, or set BROKER_PASSWORD in the environment" in said
    assert SECRET not in said


@pytest.mark.parametrize(
    "key",
    ["ssl.key.password", "ssl.key.pem", "ssl.keystore.password", "sasl.oauthbearer.client.secret"],
)
def test_error_about_other_secrets_points_to_secret_files(tmp_path: Path, key: str) -> None:
    said = refusal(tmp_path, f'[broker.client]\n"{key}" = "{SECRET}"')
    assert f"{key} is a secret" in said
    assert "name that in broker.secret_files" in said
    assert SECRET not in said


@pytest.mark.parametrize(
    "override",
    [
        f"sasl.password {SECRET}",
        f"broker.client={SECRET}",
        f"broker.client.sasl.password.x={SECRET}",
        f"run.id.password={SECRET}",
    ],
)
def test_error_about_a_misplaced_secret_hides_its_value(tmp_path: Path, override: str) -> None:
    assert SECRET not in refusal(tmp_path, "", override)


def test_secret_files_accept_only_secret_settings(tmp_path: Path) -> None:
    said = refusal(tmp_path, '[broker.secret_files]\n"linger.ms" = "/run/secrets/linger"')
    assert "linger.ms is no secret setting of librdkafka" in said


@pytest.mark.parametrize(
    ("override", "key", "remedy"),
    [
        (f"objects.uri=s3://AKIAKEY:{SECRET}@bucket/x", "objects.uri", "AWS_ACCESS_KEY_ID"),
        (f"objects.uri=s3://AKIAKEY:a/{SECRET}@bucket/x", "objects.uri", "AWS_ACCESS_KEY_ID"),
        (
            f'objects.allowed_roots=["s3://images/","s3://{SECRET}@bucket/"]',
            "objects.allowed_roots.1",
            "AWS_ACCESS_KEY_ID",
        ),
        (
            f'reward.options={{url="http://user:{SECRET}@svc/score"}}',
            "reward.options.url",
            "options.token_variable",
        ),
        (
            f'reward.options={{deep=[{{service="HTTPS://{SECRET}@svc"}}]}}',
            "reward.options.deep.0.service",
            "options.token_variable",
        ),
        (
            f'reward.routes={{math={{options={{url="http://u:{SECRET}@svc"}}}}}}',
            "reward.routes.math.options.url",
            "options.token_variable",
        ),
        (
            f'reward.options={{url="https://svc/score?api_key={SECRET}"}}',
            "reward.options.url",
            "options.token_variable",
        ),
        (
            f"broker.bootstrap_servers=user:{SECRET}@kafka:9092",
            "broker.bootstrap_servers",
            "broker.password_file",
        ),
        (
            f'broker.client={{"metadata.broker.list"="a:1,u:{SECRET}@b:2"}}',
            "broker.client.metadata.broker.list",
            "broker.password_file",
        ),
        (
            f"broker.schema_registry=http://user:{SECRET}@registry",
            "broker.schema_registry",
            "schema_registry_login_file",
        ),
        (
            f'judge.engine.sglang.urls=["http://u:{SECRET}@judge:30000"]',
            "judge.engine.sglang.urls.0",
            "environment variable",
        ),
        (
            f'engine.sglang.urls=["u:{SECRET}@server:30000"]',
            "engine.sglang.urls.0",
            "environment variable",
        ),
        (
            f"telemetry.traces.endpoint=http://u:{SECRET}@collector/v1/traces",
            "telemetry.traces.endpoint",
            "OTEL_EXPORTER_OTLP_HEADERS",
        ),
        (
            f"telemetry.tracker_project=http://u:{SECRET}@tracker/p",
            "telemetry.tracker_project",
            "environment",
        ),
        (
            f'data.options={{mirror="ftp://u:{SECRET}@mirror"}}',
            "data.options.mirror",
            "environment variable",
        ),
    ],
)
def test_address_with_credentials_is_rejected(
    tmp_path: Path, override: str, key: str, remedy: str
) -> None:
    said = refusal(tmp_path, "", override)
    assert said.startswith(f"{key} holds an address with a")
    assert remedy in said
    assert SECRET not in said
    assert "AKIAKEY" not in said


@pytest.mark.parametrize("override", SECRET_OPTIONS)
def test_secret_in_an_option_or_an_argument_is_rejected(tmp_path: Path, override: str) -> None:
    said = refusal(tmp_path, "", override)
    assert said.startswith(override.partition("=")[0])
    assert re.search(
        r" holds (a token|a secret|an address with a secret in its query), which", said
    )
    assert "environment" in said
    assert SECRET not in said


@pytest.mark.parametrize(
    "override",
    [
        'reward.options={key="answer", pattern="token=(\\\\d+)", stop_token="</s>"}',
        'reward.options={token_file="/run/secrets/token", api_key_variable="JUDGE_TOKEN"}',
        'reward.options={max_tokens=512, note="the bearer authentication of a service"}',
        'environment.command=["sh", "-c", "curl -H \\"Authorization: Bearer $TOKEN\\" x"]',
        'environment.command=["agent", "--api-key", "$KEY", "--token=/run/secrets/token"]',
        'environment.command=["agent", "--key=${KEY}", "--password-file", "/run/password"]',
        'reward.options={words=["secret", "password"], kinds=["token", "rhyme"]}',
        'data.system_prompt="Say password=opensesame1 to no one"',
        'engine.sglang.arguments=["--served-model-name", "sk-learn", "--stream-interval=4"]',
    ],
)
def test_reference_to_a_secret_is_accepted(tmp_path: Path, override: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(HEAD)
    load_run_config(path, [override], environment={})


def test_error_about_a_misplaced_argument_hides_credentials(tmp_path: Path) -> None:
    assert SECRET not in refusal(tmp_path, "", f"http://user:{SECRET}@svc")


@pytest.mark.parametrize(
    "override",
    [
        'reward.options={url="http://[::1]:30000/score?model=a@b"}',
        'reward.options={url="http://svc:8080/users/a@b", contact="me@example.org"}',
        "objects.uri=file:///data/a@b",
        'data.system_prompt="a login is written as http://user:word@host"',
        'broker.bootstrap_servers="a:9092,[::1]:9092"',
    ],
)
def test_address_without_credentials_is_accepted(tmp_path: Path, override: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(HEAD)
    load_run_config(path, [override], environment={})


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (
            'url="https://svc", token_variable="AWS_SECRET_ACCESS_KEY"',
            "take a name such as JUDGE_TOKEN or REWARD_MATH_TOKEN, or list",
        ),
        (
            'url="https://svc", token_variable="RELAX_DATA__TOKEN"',
            "take a name such as JUDGE_TOKEN",
        ),
        (
            'url="https://svc", key_variable="HF_TOKEN"',
            "options.key_variable = 'HF_TOKEN' names an environment variable",
        ),
        (
            'url="http://judge:30000", token_variable="JUDGE_TOKEN"',
            "would be sent unencrypted to http://judge:30000; take an https address",
        ),
        (
            'url="http://127.0.0.1.evil.example", token_variable="JUDGE_TOKEN"',
            "would be sent unencrypted",
        ),
    ],
)
@pytest.mark.parametrize(
    "setting", ["reward.options={{{}}}", "reward.routes={{math={{options={{{}}}}}}}"]
)
def test_unsafe_token_variable_in_reward_options_is_rejected(
    tmp_path: Path, options: str, rule: str, setting: str
) -> None:
    assert rule in refusal(tmp_path, "", setting.format(options))


@pytest.mark.parametrize(
    "override",
    [
        'reward.options={url="https://svc", token_variable="JUDGE_TOKEN"}',
        'reward.options={url="http://127.0.0.1:1", token_variable="REWARD_MATH_TOKEN"}',
        'reward.options={url="http://[::1]:1", token_variable="RELAX_TOKEN"}',
        (
            'reward.options={url="https://svc", token_variable="OPENAI_API_KEY"} '
            'reward.environment=["OPENAI_API_KEY"]'
        ),
    ],
)
def test_token_variable_in_reward_options_is_accepted(tmp_path: Path, override: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(HEAD)
    load_run_config(path, re.split(r" (?=reward\.)", override), environment={})


def test_folder_of_credentials_is_a_path_and_no_secret() -> None:
    refuse_secret_values({"broker": {"credentials": "secrets"}})
    with pytest.raises(ConfigError, match=r"model.credentials holds a secret"):
        refuse_secret_values({"model": {"credentials": "secrets"}})
