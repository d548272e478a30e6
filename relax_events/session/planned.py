"""Plans a run file for devices that are named, or for this machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from relax_events.config import RunConfig
from relax_events.config.unset_keys import missing_keys, with_values
from relax_events.model_folder.tensors import list_weight_files
from relax_events.planning.derived import MEAN_OF_LONGEST, derive
from relax_events.planning.device_specs import DeviceSpec, parse_devices
from relax_events.planning.inventory import CheckpointFacts, Machine, num_processors
from relax_events.planning.run_plan import CPU, RunPlan, plan_run
from relax_events.session.defaults import inspect_machine, read_checkpoint_facts


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A plan and what it was made from."""

    plan: RunPlan
    config: RunConfig
    facts: CheckpointFacts
    device: DeviceSpec
    num_devices: int
    sample_tokens: int


def plan_devices(config: RunConfig, *, devices: str = "", sample_tokens: int = 0) -> PlannedRun:
    """Plan a run.

    Args:
        config: The run file as read, or with its defaults.
        devices: Such as `8xH100-80GB`, or `2x8xH100-80GB` for two hosts; empty for the GPUs or the
            memory of this machine, and of as many others like it as `hosts.addresses` has.
        sample_tokens: Mean tokens of a sample, prompt included; 0 takes half of
            `engine.max_context_tokens`.
    Raises:
        ConfigError: The devices are not understood or too few, or the model is not there.
    """
    roles = config.separate_processes()
    machine = inspect_machine(roles, num_hosts=config.hosts.num_hosts)
    if devices:
        num_hosts, share, device = parse_devices(devices)
        count = num_hosts * share
        config = _with_hosts(config, num_hosts)
        machine = Machine(
            num_processors() * num_hosts,
            machine.memory_bytes,
            (device.num_bytes,) * count,
            roles,
            num_hosts=num_hosts,
        )
    elif machine.gpu_bytes and config.model.device != "cpu":
        count, device = len(machine.gpu_bytes), DeviceSpec("GPU", min(machine.gpu_bytes))
    else:
        count, device = 1, DeviceSpec(CPU, machine.memory_bytes)
    facts = read_checkpoint_facts(config)
    if "model" in facts and not list_weight_files(config.model.path) and config.model.tiny is None:
        # towers and the norms of layers are not in an estimate from the sizes
        facts["model"] = replace(facts["model"], num_parameters=_count_parameters(config))
    if missing_keys(config):
        values = derive(config, facts, machine)
        config = with_values(config, {one.key: one.value for one in values})
    tokens = sample_tokens or int((config.engine.max_context_tokens or 0) * MEAN_OF_LONGEST)
    plan = plan_run(config, facts, device=device, num_devices=count, sample_tokens=tokens)
    return PlannedRun(plan, config, facts["model"], device, count, tokens)


def _with_hosts(config: RunConfig, num_hosts: int) -> RunConfig:
    """Return a configuration with names for so many hosts, unless it names as many."""
    if num_hosts == config.hosts.num_hosts:
        return config
    names = tuple(f"host-{index}" for index in range(num_hosts)) if num_hosts > 1 else ()
    return config.model_copy(update={"hosts": config.hosts.model_copy(update={"addresses": names})})


def plan_engine_shares(config: RunConfig) -> dict[str, float]:
    """Return the share of a GPU of this machine that a server may take, by worker, where its worker
    is not alone on it; none for a plan that does not fit, and where devices are held in turn.
    """
    engines = (config.engine, config.judge.engine)
    if config.devices.time_share or not any(engine.starts_servers for engine in engines):
        return {}
    plan = plan_devices(config).plan
    return plan.compute_engine_shares() if plan.fits else {}


def _count_parameters(config: RunConfig) -> int:
    """Count the parameters of a model that has no weights here: on the meta device, so this loads
    torch.
    """
    from relax_events.models.parameters import read_parameters

    return sum(
        prod(shape) for shape in read_parameters(config.model.path, config.model).shapes.values()
    )
