"""Checks of this machine: folders and disk, ports, isolation, and memory of its devices."""

from __future__ import annotations

import os
import shutil

from relax_events.attacks.isolation_check import check_isolation
from relax_events.config import RunConfig
from relax_events.config.addresses import EMBEDDED
from relax_events.confinement.profiles import describe_missing
from relax_events.errors import CheckFailed, ConfigError, EnvironmentProblem
from relax_events.http.server import open_listener
from relax_events.http.tls import choose_run_tls
from relax_events.launcher.checked_run import CheckedRun
from relax_events.planning.derived import compute_log_bytes
from relax_events.planning.inventory import format_bytes, get_value_bytes
from relax_events.planning.run_plan import CPU, NO_CHANGE, PLANNED_BACKENDS
from relax_events.session.defaults import find_parent, read_checkpoint_facts
from relax_events.session.planned import plan_devices

MAX_PORT = 65_535
MIN_FREE_BYTES = 1024**3
CHECKPOINT_BYTES_PER_PARAMETER = 12
"""Weights in float32 and AdamW's two moments."""
PROGRAM_REWARD = "code"
"""The reward that runs programs that the model wrote."""


def check_metrics_ports(run: CheckedRun) -> str:
    """Return the ports of the workers' metrics, once the address is this machine's and the ports
    are free.

    Raises:
        EnvironmentProblem: A port is taken or the address is not this machine's; the text names
            both.
    """
    config = run.config
    host, first = config.telemetry.metrics_host, config.telemetry.metrics_port
    last = config.telemetry.worker_port(sum(config.processes().values()) - 1)
    if last > MAX_PORT:
        raise ConfigError(
            f"telemetry.metrics_port = {first} is too high: the last worker would serve on "
            f"{last}; set it to {first + MAX_PORT - last} or less"
        )
    remedies = "set telemetry.metrics_port = 0 for free ones", "set telemetry.metrics_host"
    for port in range(first, last + 1):
        open_listener(host, port, remedies=remedies, what="metrics").close()
    return f"{host}, ports {first} to {last}" if first else f"{host}, free ports"


def check_folder(run: CheckedRun) -> str:
    """Return the run's folder, once this user may write it.

    Raises:
        EnvironmentProblem: The folder, or its nearest existing parent, can't be written.
    """
    run_folder = run.config.run_directory.absolute()
    there = find_parent(run_folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise EnvironmentProblem(
            f"the run's folder {run_folder} can't be made or written: {there} is not a folder "
            "that this user may write to; set run.directory"
        )
    return f"{run_folder} can be written"


def check_harness_address(run: CheckedRun) -> str:
    """Return where harnesses find rollout worker 0, once their keys stay secret on the way.

    Raises:
        ConfigError: The address needs encryption.
    """
    harness = run.config.environment.harness
    if not harness.is_served:
        return "none: environment.harness.port = 0"
    tls = choose_run_tls(run.config.http, harness.host)
    return f"{'HTTP' if tls is None else 'HTTPS'}, {harness.host}, port {harness.port}"


def check_disk(run: CheckedRun) -> str:
    """Check that the run's directory has enough space."""
    folder = find_parent(run.config.run.directory)
    free, least = shutil.disk_usage(folder).free, MIN_FREE_BYTES + _stored_bytes(run.config)
    if free < least:
        raise EnvironmentProblem(
            f"{folder} has {free / 1e9:.2f} GB free, a run wants at least {least / 1e9:.2f}; free "
            "some space or set run.directory"
        )
    return f"{free / 1e9:.0f} GB free in {folder}{_growth(run.config, free)}"


def _stored_bytes(config: RunConfig) -> int:
    """Return the size of checkpoints and weight versions in the run's own folder; 0 where they are
    stored elsewhere, or the model is not here yet.
    """
    facts = (
        read_checkpoint_facts(config).get("model")
        if not config.objects.uri and config.model.path.exists()
        else None
    )
    if facts is None or config.model.dtype is None:
        return 0
    checkpoints = (
        (config.trainer.keep_checkpoints + 1)
        * facts.num_parameters
        * CHECKPOINT_BYTES_PER_PARAMETER
    )
    return checkpoints + (config.run.max_staleness + 2) * facts.num_parameters * get_value_bytes(
        config.model.dtype
    )


def _growth(config: RunConfig, free: int) -> str:
    """Describe what the log takes of this disk at most, where the broker is the embedded one."""
    step = compute_log_bytes(config)
    if config.is_replay or config.broker.bootstrap_servers != EMBEDDED or not step:
        return ""
    retained = config.run.retain_versions or 0
    num_steps = min(
        config.num_train_steps,
        retained + config.trainer.checkpoint_every if retained else config.num_train_steps,
    )
    total = step * num_steps
    kept = f"the newest {retained} versions" if retained else "all records"
    remedy = (
        ": more than is free; take more disk, or set run.retain_versions"
        if total > free
        else " (run.retain_versions bounds it)"
    )
    return (
        f"; the log keeps {kept} and grows by up to {step / 1e9:.3g} GB a step, "
        f"{total / 1e9:.3g} GB in all{remedy}"
    )


def check_walls(run: CheckedRun) -> str:
    """Check the sandbox of programs that the model wrote, and say what the kernel lacks to confine
    verifiers and readers of untrusted files.
    """
    missing = describe_missing()
    confinement = (
        f"this kernel can't restrict {missing} of verifiers and readers of untrusted files; run "
        "untrusted data on another machine"
        if missing
        else "verifiers and readers of untrusted files are confined"
    )
    return f"{_check_sandbox(run.config)}; {confinement}"


def _check_sandbox(config: RunConfig) -> str:
    """Try known escapes from the sandbox, where rewards run programs."""
    options = [
        one.options for one in config.reward.chosen.values() if one.function == PROGRAM_REWARD
    ]
    if not options:
        return "no reward runs programs"
    return check_isolation(
        allow_unprotected=all(one.get("allow_unprotected") is True for one in options)
    )


def check_devices(run: CheckedRun) -> str:
    """Return a line about the fullest device of this machine.

    Raises:
        CheckFailed: It can't hold the models that `relax run` places on it; the text says what to
            change.
    """
    config = run.config
    is_known = config.trainer.backend in PLANNED_BACKENDS
    if not is_known or "model" not in read_checkpoint_facts(config):
        return "not planned: the model is not here yet, or trainer.backend is another one"
    planned = plan_devices(config)
    fullest = max(planned.plan.devices, key=lambda device: device.needed / device.num_bytes)
    where = CPU if planned.device.name == CPU else f"device {fullest.index}"
    names = ", ".join(worker.worker_id for worker in fullest.workers)
    text = (
        f"{where} has {format_bytes(fullest.num_bytes)}, and {names} need "
        f"{format_bytes(fullest.needed)}"
    )
    if not planned.plan.fits:
        raise CheckFailed(f"{text}; {planned.plan.change or NO_CHANGE}")
    return f"{text}; relax plan shows their parts"
