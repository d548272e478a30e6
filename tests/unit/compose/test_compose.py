"""The compose files agree with the code: their services are the roles, their commands parse, and
each service has what it needs.
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml

from relax_events.cli.app import app
from relax_events.config import BrokerConfig, load_run_config
from relax_events.kafka.security.acls import build_username
from relax_events.kafka.security.folder import SecurityFolder
from relax_events.objects.rights import FOLDERS, STORE_RIGHTS
from relax_events.plugins import ROLES
from tests.stack.images import further_targets

ROOT = Path(__file__).parents[3]
COMPOSE = ROOT / "compose"
STACK: dict[str, Any] = yaml.safe_load((COMPOSE / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
INSTALLED = {role.name for role in entry_points(group=ROLES) if role.value.startswith("workers.")}
WORKERS = {
    name: service
    for name, service in SERVICES.items()
    if service.get("command", [""])[0] == "worker"
}
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")


def settled(text: str) -> str:
    """Put in the defaults of the variables."""
    return DEFAULT.sub(r"\1", text)


def test_worker_services_match_the_installed_roles() -> None:
    assert set(WORKERS) == INSTALLED
    assert all(service["command"][1] == role for role, service in WORKERS.items())


def test_services_without_profile_match_the_quickstart_roles() -> None:
    needed = load_run_config(ROOT / "configs" / "quickstart.toml", environment={}).roles()
    assert {role for role, service in WORKERS.items() if "profiles" not in service} == set(needed)


@pytest.mark.parametrize("name", [name for name, service in OURS.items() if "command" in service])
def test_service_command_is_valid_and_names_an_existing_run_file(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    _, bound, _ = app.parse_args(
        [settled(word) for word in OURS[name]["command"]], print_error=False, exit_on_error=False
    )
    assert bound.arguments["config"].is_file()


def test_unauthenticated_pages_bind_to_localhost_without_admin_api() -> None:
    for name in ("prometheus", "alertmanager"):
        service = SERVICES[name]
        assert len(service["ports"]) == 1
        assert service["ports"][0].startswith("127.0.0.1:")
        assert not [
            word
            for word in service["command"]
            if "enable-admin-api" in word or "enable-lifecycle" in word
        ]


def test_uv_is_installed_with_pinned_version_and_hash() -> None:
    for text in ((COMPOSE / "Dockerfile").read_text(), (ROOT / "Makefile").read_text()):
        (install,) = re.findall(r"pip install (.*requirements/tools.txt)", text)
        assert "--require-hashes" in install
        assert "--no-deps" in install
        assert not re.search(r"pip install [^\n]*\buv\b(?! pip)", text)
    assert pins("tools.txt") == {(ROOT / "requirements" / "tools.in").read_text().strip()}


def test_dockerignore_admits_exactly_the_requirements_the_image_copies() -> None:
    copied = set(
        re.findall(r"^COPY (requirements/\S+)", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE)
    )
    given = set(
        re.findall(r"^!(requirements/\S+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    )
    assert (
        copied - {"requirements/${ACCELERATOR}.txt"}
        | {"requirements/cpu.txt", "requirements/cuda.txt"}
        == given
    )


def test_image_is_built_with_every_folder_that_the_wheel_contains() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    folders = {*wheel["packages"], *wheel["force-include"]}
    copied = re.findall(r"^COPY (\S+) \S+$", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE)
    admitted = re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert folders <= set(copied)
    assert folders <= set(admitted)


@pytest.mark.parametrize("name", OURS)
def test_own_containers_can_write_only_to_their_volume(name: str) -> None:
    service = OURS[name]
    assert (service["read_only"], service["cap_drop"], service["security_opt"]) == (
        True,
        ["ALL"],
        ["no-new-privileges:true"],
    )
    files = "files:/srv/relax/.relax" + (":ro" if name == "reward" else "")
    assert service["volumes"] == [files, "${RUN_FILES:-../configs}:/srv/relax/configs:ro"]
    assert not [key for key in service["environment"] if re.search("PASSWORD|SECRET|KEY", key)]


@pytest.mark.parametrize("name", WORKERS)
def test_worker_starts_after_topics_and_model_and_restarts_on_failure(name: str) -> None:
    service = WORKERS[name]
    done = {"condition": "service_completed_successfully"}
    assert service["depends_on"] == {"topics": done, "model": done}
    assert SERVICES["topics"]["depends_on"] == {"kafka": {"condition": "service_healthy"}}
    assert service["restart"] == "on-failure"
    assert "healthcheck" not in service  # the image's own
    assert float(service["stop_grace_period"].removesuffix("s")) > float(
        service["environment"]["RELAX_WORKERS__DRAIN_SECONDS"]
    )


def test_image_has_healthcheck_unprivileged_user_and_exec_entrypoint() -> None:
    text = (COMPOSE / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    assert (
        {service["build"]["target"] for service in OURS.values()}
        == {"light", "model"}
        < set(stages)
    )
    assert re.search(r'^USER relax\b.*^ENTRYPOINT \["relax"\]$', text, re.MULTILINE | re.DOTALL)
    assert re.search(r'^HEALTHCHECK .* CMD \["relax", "health"\]$', text, re.MULTILINE)
    assert text.count("--require-hashes") == 4


def test_reward_worker_shares_a_network_only_with_broker_and_prometheus() -> None:
    networks = {
        name: list(service.get("networks", ["default"])) for name, service in SERVICES.items()
    }
    assert networks["reward"] == ["scoring"]
    assert {name for name, those in networks.items() if "scoring" in those} == {
        "kafka",
        "prometheus",
        "reward",
    }
    assert STACK["networks"]["scoring"] == {
        "internal": True,
        "driver_opts": {"com.docker.network.bridge.inhibit_ipv4": "true"},
    }


def test_prometheus_does_not_listen_on_the_network_of_the_reward_workers() -> None:
    (option,) = [
        word
        for word in SERVICES["prometheus"]["command"]
        if word.startswith("--web.listen-address=")
    ]
    networks = SERVICES["prometheus"]["networks"]
    assert option == f"--web.listen-address={networks['default']['aliases'][0]}:9090"
    assert networks["scoring"] == {}


@pytest.mark.parametrize("overlay", ["outside", "s3", "existing-cluster"])
def test_overlay_gives_only_the_reward_worker_an_outside_network(
    overlay: str,
) -> None:
    laid = yaml.safe_load((COMPOSE / f"{overlay}.yml").read_text())
    assert laid["services"]["reward"]["networks"] == ["scoring", "outside"]
    assert laid["networks"] == {"outside": {}}
    assert not [
        name
        for name, service in laid["services"].items()
        if name != "reward" and "outside" in service.get("networks", [])
    ]


def pins(file: str) -> set[str]:
    return set(
        re.findall(
            r"^[a-z0-9-]+==[^ ;\\]+", (ROOT / "requirements" / file).read_text(), re.MULTILINE
        )
    )


@pytest.mark.parametrize("name", ["light", "cpu"])
def test_image_requirements_match_the_lock_file(name: str) -> None:
    assert pins(f"{name}.txt") - pins("lock.txt") == set()
    assert any(pin.startswith("torch==") for pin in pins(f"{name}.txt")) == (name == "cpu")


def test_cuda_requirements_add_only_cuda_packages_to_the_lock_file() -> None:
    assert {pin.partition("==")[0] for pin in pins("cuda.txt") - pins("lock.txt")} == {
        "nvidia-cusolver",
        "nvidia-nvtx",
        "triton",
    }


def test_gpus_are_reserved_for_the_services_that_run_the_model() -> None:
    overlay = yaml.safe_load((COMPOSE / "gpu.yml").read_text())["services"]
    assert set(overlay) == {
        name for name, service in OURS.items() if service["build"]["target"] == "model"
    }
    for service in overlay.values():
        assert service["build"]["args"]["ACCELERATOR"] == "cuda"
        assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == [
            "gpu"
        ]


def test_s3_overlay_gives_each_service_the_credential_of_its_role_alone() -> None:
    overlay = yaml.safe_load((COMPOSE / "s3.yml").read_text())
    services = overlay["services"]
    assert services.keys() == {*WORKERS, "relax"}
    for name, service in services.items():
        principal = name if name in WORKERS else "operator"
        assert service["environment"] == {
            "RELAX_OBJECTS__URI": "${OBJECTS_URI}",
            "OBJECTS_CREDENTIALS_FILE": "/run/secrets/objects",
        }
        assert service["secrets"] == [{"source": f"objects-{principal}", "target": "objects"}]
        assert "env_file" not in service
        (path,) = overlay["secrets"][f"objects-{principal}"].values()
        assert path == f"${{OBJECTS_CREDENTIALS:-./secrets/objects}}/{principal}.env"


def test_objects_overlay_mounts_what_a_role_changes_writable_and_no_more() -> None:
    overlay = yaml.safe_load((COMPOSE / "objects.yml").read_text())
    assert overlay["services"].keys() == {*WORKERS, "model", "relax"}
    for name, service in overlay["services"].items():
        rights = STORE_RIGHTS[name if name in WORKERS else "operator"]
        mounted = {}
        for volume in service["volumes"]:
            source, path, *mode = volume.split(":")
            assert source in overlay["volumes"]
            mounted[path.removeprefix("/srv/relax/objects").lstrip("/")] = mode != ["ro"]
        assert mounted.pop("") is (name not in WORKERS)
        assert mounted == {
            folder.rstrip("/"): folder in rights.changes
            for folder in FOLDERS
            if folder in (*rights.reads, *rights.changes)
        }
        settings = load_run_config(
            ROOT / "configs" / "quickstart.toml", environment=service["environment"]
        )
        assert settings.objects_uri == "file:///srv/relax/objects"


def test_image_owns_the_folders_that_volumes_of_objects_are_mounted_at() -> None:
    text = (COMPOSE / "Dockerfile").read_text()
    (made,) = re.findall(r"cd /srv/relax/objects && install .* relax (weights .*)", text)
    assert made.split() == [folder.rstrip("/") for folder in FOLDERS]


def test_tracing_overlay_sends_traces_of_all_workers_to_its_collector() -> None:
    overlay = yaml.safe_load((COMPOSE / "tracing.yml").read_text())["services"]
    del overlay["jaeger"]
    assert overlay.keys() == {*WORKERS, "relax"}
    for service in overlay.values():
        given = {name: settled(value) for name, value in service["environment"].items()}
        config = load_run_config(ROOT / "configs" / "quickstart.toml", environment=given)
        assert (config.telemetry.traces.endpoint, config.telemetry.traces.ratio) == (
            "http://jaeger:4318/v1/traces",
            1.0,
        )
    assert any(
        pin.startswith("opentelemetry-exporter-otlp-proto-http==")
        for pin in pins("light.txt") & pins("cpu.txt") & pins("cuda.txt")
    )


def test_notifications_overlay_gives_metrics_a_key_that_the_run_file_has() -> None:
    overlay = yaml.safe_load((COMPOSE / "notifications.yml").read_text())["services"]
    assert overlay.keys() == {"metrics"}
    telemetry = load_run_config(
        ROOT / "configs" / "quickstart.toml", environment=overlay["metrics"]["environment"]
    ).telemetry
    assert telemetry.notification_urls_file == Path("/run/secrets/notification_urls")


def test_trackers_overlay_changes_only_the_metrics_service_and_its_image() -> None:
    overlay = yaml.safe_load((COMPOSE / "trackers.yml").read_text())["services"]
    assert overlay.keys() == {"metrics"}
    service = overlay["metrics"]
    default = DEFAULT.sub(r"\1", service["environment"]["RELAX_TELEMETRY__TRACKERS"])
    environment = {"RELAX_TELEMETRY__TRACKERS": default}
    assert load_run_config(
        ROOT / "configs" / "quickstart.toml", environment=environment
    ).telemetry.trackers == ("tensorboard", "wandb")
    packages = {pin.partition("==")[0] for pin in pins("trackers.txt") - pins("light.txt")}
    assert {"wandb", "clearml", "mlflow-skinny", "trackio"} <= packages
    assert further_targets([COMPOSE / "trackers.yml"]) == {"trackers": "relax-events:trackers"}
    assert f"FROM runtime AS {service['build']['target']}\n" in (COMPOSE / "Dockerfile").read_text()


def test_three_broker_cluster_has_replication_factor_three() -> None:
    overlay = yaml.safe_load((COMPOSE / "cluster.yml").read_text())["services"]
    brokers = {
        name: {**SERVICES["kafka"]["environment"], **overlay[name]["environment"]}
        for name in ("kafka", "kafka-2", "kafka-3")
    }
    assert [settings["KAFKA_NODE_ID"] for settings in brokers.values()] == ["1", "2", "3"]
    assert all(
        settings["KAFKA_ADVERTISED_LISTENERS"] == f"PLAINTEXT://{name}:9092"
        for name, settings in brokers.items()
    )
    factors = {
        value
        for settings in brokers.values()
        for key, value in settings.items()
        if key.endswith("REPLICATION_FACTOR")
    }
    assert (
        factors
        == {
            overlay[name]["environment"]["RELAX_BROKER__REPLICATION_FACTOR"]
            for name in overlay.keys() - brokers.keys()
        }
        == {"3"}
    )
    assert overlay.keys() - brokers.keys() == {*WORKERS, "topics", "relax"}


def test_broker_maximum_lock_duration_covers_the_lease_of_a_run() -> None:
    longest_ms = int(
        SERVICES["kafka"]["environment"]["KAFKA_GROUP_SHARE_MAX_RECORD_LOCK_DURATION_MS"]
    )
    assert longest_ms >= BrokerConfig().lease_seconds * 1000


def test_prometheus_scrapes_every_worker_at_its_metrics_port() -> None:
    jobs = yaml.safe_load((COMPOSE / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert [set(found["names"]) for job in jobs for found in job["dns_sd_configs"]] == [
        set(WORKERS)
    ]
    assert {found["port"] for job in jobs for found in job["dns_sd_configs"]} == {
        int(service["environment"]["RELAX_TELEMETRY__METRICS_PORT"]) for service in WORKERS.values()
    }


def test_existing_cluster_overlay_gives_each_service_the_user_of_its_role_alone() -> None:
    overlay = yaml.safe_load((COMPOSE / "existing-cluster.yml").read_text())
    assert set(overlay["services"]) == {*WORKERS, "topics", "relax"}
    for name, service in overlay["services"].items():
        principal = name if name in WORKERS else "operator"
        environment = {key: settled(value) for key, value in service["environment"].items()}
        assert environment == {
            "RELAX_BROKER__USERNAME": build_username("quickstart", principal),
            "RELAX_BROKER__PASSWORD_FILE": "/run/secrets/broker_password",
            "RELAX_BROKER__CA_FILE": "/run/secrets/broker_ca",
        }
        own, authority = service["secrets"]
        assert own == {"source": f"broker-{principal}", "target": "broker_password"}
        folder = SecurityFolder(Path("secrets/security"))
        assert {
            settled(overlay["secrets"][secret]["file"]) for secret in (own["source"], authority)
        } == {
            f"./{folder.password_file(environment['RELAX_BROKER__USERNAME'])}",
            f"./{folder.ca_file}",
        }
