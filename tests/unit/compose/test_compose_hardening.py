"""Every service of every compose file has minimal rights and resource limits, and listens on this
machine alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

COMPOSE = Path(__file__).parents[3] / "compose"
STACK = "docker-compose.yml"
MORE_RIGHTS = {
    "privileged",
    "cap_add",
    "devices",
    "device_cgroup_rules",
    "group_add",
    "userns_mode",
    "cgroup_parent",
    "sysctls",
    "user",
}
ANOTHERS_SPACE = {"network_mode", "pid", "ipc", "uts", "cgroup", "volumes_from"}
REQUIRED = {
    "read_only": lambda value: value is True,
    "cap_drop": lambda value: value == ["ALL"],
    "security_opt": lambda value: value == ["no-new-privileges:true"],
    "tmpfs": lambda value: any(path == "/tmp" or path.startswith("/tmp:") for path in value),
    "mem_limit": lambda value: re.fullmatch(r"(\$\{[A-Z]+_MEMORY:-)?\d+[mg]\}?", value),
    "pids_limit": lambda value: 0 < value <= 4096,
}
FOLDERS_OF_THE_MACHINE = {
    "..",
    "../configs",
    "./prometheus",
    "./alertmanager",
    "./grafana/provisioning",
    "./grafana/dashboards",
}
LOADED = {file.name: yaml.safe_load(file.read_text()) for file in sorted(COMPOSE.glob("*.y*ml"))}
FILES: dict[str, dict[str, Any]] = {
    name: tree["services"] for name, tree in LOADED.items() if "services" in tree
}


def laid_over(services: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each service of a file as compose runs it: the keys of the stack's own service, or of
    the one that it extends, and over them its own."""
    merged = {}
    for name, service in services.items():
        base = (
            FILES[service["extends"]["file"]][service["extends"]["service"]]
            if "extends" in service
            else FILES[STACK].get(name, {})
        )
        merged[name] = {**base, **service}
    return merged


SERVICES = [
    pytest.param(service, id=f"{file}:{name}")
    for file, services in FILES.items()
    for name, service in laid_over(services).items()
]


def lacking(service: dict[str, Any]) -> list[str]:
    """Return what a service lacks or has too much of."""
    found = [
        key
        for key, is_right in REQUIRED.items()
        if key not in service or not is_right(service[key])
    ]
    found += sorted((MORE_RIGHTS | ANOTHERS_SPACE) & service.keys())
    found += [
        f"port {port}"
        for port in service.get("ports", [])
        if not str(port).startswith("127.0.0.1:")
    ]
    return found + [
        f"mount {mount}" for mount in service.get("volumes", []) if not is_harmless(mount)
    ]


def is_harmless(mount: str) -> bool:
    """Tell whether a mount is a volume, or a folder of the repository that can't be changed."""
    source, *rest = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", mount).split(":")
    is_volume = re.fullmatch(r"[a-z][a-z0-9-]*", source) or not rest
    return bool(is_volume) or (source in FOLDERS_OF_THE_MACHINE and rest[-1] == "ro")


def test_hardening_tests_cover_every_compose_file() -> None:
    of_kubernetes = {name for name, tree in LOADED.items() if "apiVersion" in tree}
    assert of_kubernetes == {"keda.yml", "keda-consumer-group.yml"}
    assert set(LOADED) - of_kubernetes == set(FILES)
    assert not [*COMPOSE.glob("*/docker-compose*"), *COMPOSE.glob("*/compose*.y*ml")]


@pytest.mark.parametrize("service", SERVICES)
def test_service_has_minimal_privileges_and_resource_limits(service: dict[str, Any]) -> None:
    assert lacking(service) == []
    assert re.fullmatch(r"\$\{[A-Z]+_IMAGE:-[^}]+:[^}]+\}", service["image"])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"read_only": False}, "read_only"),
        ({"cap_drop": ["NET_RAW"]}, "cap_drop"),
        ({"security_opt": ["seccomp:unconfined"]}, "security_opt"),
        ({"tmpfs": ["/var/tmp"]}, "tmpfs"),
        ({"pids_limit": -1}, "pids_limit"),
        ({"mem_limit": "0"}, "mem_limit"),
        ({"cap_add": ["SYS_ADMIN"]}, "cap_add"),
        ({"privileged": True}, "privileged"),
        ({"user": "root"}, "user"),
        ({"network_mode": "host"}, "network_mode"),
        ({"ports": ["${GRAFANA_PORT:-3000}:3000"]}, "port ${GRAFANA_PORT:-3000}:3000"),
        (
            {"volumes": ["/var/run/docker.sock:/var/run/docker.sock"]},
            "mount /var/run/docker.sock:/var/run/docker.sock",
        ),
        (
            {"volumes": ["${RUN_FILES:-../configs}:/srv/relax/configs"]},
            "mount ${RUN_FILES:-../configs}:/srv/relax/configs",
        ),
    ],
)
def test_check_detects_privileges_added_by_an_overlay(change: dict[str, Any], found: str) -> None:
    assert lacking(laid_over({"advantage": change})["advantage"]) == [found]


def test_check_detects_a_service_without_required_limits() -> None:
    assert lacking(laid_over({"new": {"image": "x"}})["new"]) == list(REQUIRED)


@pytest.mark.parametrize("service", SERVICES)
def test_compose_files_contain_no_secrets(service: dict[str, Any]) -> None:
    environment = service.get("environment", {})
    secret = {
        key: value
        for key, value in environment.items()
        if re.search("PASSWORD|SECRET|TOKEN|_KEY$", key)
    }
    assert all(
        key.endswith("_FILE") and value.startswith("/run/secrets/") for key, value in secret.items()
    )


def test_grafana_requires_a_password_and_sends_no_telemetry() -> None:
    tree = LOADED["dashboards.yml"]
    environment = tree["services"]["grafana"]["environment"]
    assert environment["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/grafana_password"
    assert (
        tree["secrets"]["grafana_password"]["file"]
        == "${GRAFANA_PASSWORD_FILE:-./secrets/grafana_password}"
    )
    off = {
        "GF_AUTH_ANONYMOUS_ENABLED", "GF_USERS_ALLOW_SIGN_UP", "GF_USERS_ALLOW_ORG_CREATE", "GF_SECURITY_ALLOW_EMBEDDING",
        "GF_ANALYTICS_REPORTING_ENABLED", "GF_ANALYTICS_CHECK_FOR_UPDATES", "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES",
        "GF_ANALYTICS_FEEDBACK_LINKS_ENABLED", "GF_NEWS_NEWS_FEED_ENABLED", "GF_SNAPSHOTS_EXTERNAL_ENABLED", "GF_PUBLIC_DASHBOARDS_ENABLED",
        "GF_PLUGINS_PLUGIN_ADMIN_ENABLED",
    }  # fmt: skip
    assert {key for key, value in environment.items() if value == "false"} == off
    assert (
        environment["GF_SECURITY_DISABLE_GRAVATAR"]
        == environment["GF_SECURITY_CONTENT_SECURITY_POLICY"]
        == "true"
    )
    assert environment["GF_SECURITY_COOKIE_SECURE"] == "${GRAFANA_COOKIE_SECURE:-true}"
    assert environment["GF_SECURITY_COOKIE_SAMESITE"] == "strict"


def test_console_requires_a_password_and_is_read_only_by_default() -> None:
    tree = LOADED["console.yml"]
    service = tree["services"]["console"]
    environment = service["environment"]
    assert environment["KAFKA_CLUSTERS_0_READONLY"] == "${CONSOLE_READONLY:-true}"
    assert (
        environment["KAFKA_CLUSTERS_0_BOOTSTRAPSERVERS"]
        == LOADED[STACK]["x-environment"]["RELAX_BROKER__BOOTSTRAP_SERVERS"]
    )
    assert environment["AUTH_TYPE"] == "LOGIN_FORM"
    (secret,) = service["secrets"]
    assert (secret["target"], environment["SPRING_CONFIG_IMPORT"]) == (
        "spring.security.user.password",
        "configtree:/run/secrets/",
    )
    assert (
        tree["secrets"][secret["source"]]["file"]
        == "${CONSOLE_PASSWORD_FILE:-./secrets/console_password}"
    )
    assert environment["SERVER_REACTIVE_SESSION_COOKIE_SECURE"] == "${CONSOLE_COOKIE_SECURE:-true}"
    assert environment["SERVER_REACTIVE_SESSION_COOKIE_SAMESITE"] == "strict"
    assert environment["DYNAMIC_CONFIG_ENABLED"] == "false"
    assert environment["MANAGEMENT_ENDPOINTS_WEB_EXPOSURE_INCLUDE"] == "health"
