"""`relax plan`: what a run takes on given devices, before anything is started or bought."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from relax_events.cli.parameters import Output, Overrides, RunFile
from relax_events.errors import CheckFailed

if TYPE_CHECKING:
    from relax_events.planning.run_plan import PlannedDevice, RunPlan, StageSeconds
    from relax_events.session.planned import PlannedRun

GB = 1e9


def plan(
    config: RunFile,
    *overrides: Overrides,
    devices: str = "",
    sample_tokens: int = 0,
    output: Output = "table",
) -> int:
    """Show which worker computes on which device, what each takes by part, and an estimate of a
    step's time; exit code 6 and the smallest change that fits when a device is too small.

    Example: relax plan configs/dapo-math.toml --devices 8xH100-80GB

    Only the model's `config.json` is read, so its weights need not be here; of a name on the hub
    only the small files are fetched.

    Args:
        devices: Number and kind, such as 8xH100-80GB; by default those of this machine.
        sample_tokens: Mean tokens of a sample, prompt included; by default half of
            engine.max_context_tokens.
    """
    from relax_events.cli.output import print_json, print_progress
    from relax_events.config import load_run_config
    from relax_events.launcher.hub_download import fetch_models, find_commit
    from relax_events.session.planned import plan_devices

    settings = load_run_config(config, overrides, find_commit=find_commit)
    fetch_models(settings.list_models(), with_weights=False, report=print_progress)
    planned = plan_devices(settings, devices=devices, sample_tokens=sample_tokens)
    if output == "json":
        print_json(_as_tree(planned))
    else:
        _print(planned)
    return 0 if planned.plan.fits else CheckFailed.exit_code


def _print(planned: PlannedRun) -> None:
    from relax_events.cli.output import print_rows
    from relax_events.planning.derived import compute_log_bytes
    from relax_events.planning.inventory import format_bytes
    from relax_events.planning.run_plan import NO_CHANGE

    model, device, plan = planned.facts, planned.device, planned.plan
    print(
        f"{planned.config.model.path}: {model.num_parameters / GB:.2f} B parameters, "
        f"{model.num_active_parameters / GB:.2f} B for a token, in {planned.config.model.dtype}"
    )
    print(
        f"{planned.num_devices} x {device.name} of {device.num_bytes / GB:.1f} GB; the largest "
        f"pass of the trainer has {plan.tokens:,} tokens\n"
    )
    print_rows(["device", "worker", "GB", "of it"], _rows(plan))
    print()
    for role, (fitting, most) in _rooms(plan).items():
        key = "judge.engine" if role == "judge" else "engine"
        is_key = role != "rollout" or most == planned.config.engine.max_running_samples
        reason = f"{key}.max_running_samples" if is_key else "all that can be in flight"
        print(
            f"{role}: room for {fitting} of {most} samples of the longest length at a time "
            f"({reason})"
        )
    if plan.host_bytes:
        print(
            f"the optimizers of all ranks take {plan.host_bytes / GB:.1f} GB of the memory of "
            "their hosts (trainer.offload_optimizer)"
        )
    if plan.version_bytes:
        print(
            f"the copy of a version takes {plan.version_bytes / GB:.1f} GB of the memory of the "
            "host of the trainer's first rank (weights.async_publish)"
        )
    if episode := plan.episode:
        passes = f"{episode.num_passes} passes of at most {plan.tokens:,} tokens"
        print(
            f"an episode of up to {episode.num_paths} paths of {episode.path_tokens:,} tokens "
            f"(environment.max_turns, engine.max_context_tokens) is trained in "
            f"{passes if episode.num_passes > 1 else 'one pass'}; its arrays take at most "
            f"{format_bytes(episode.host_bytes)} of host memory"
        )
    if step_bytes := compute_log_bytes(planned.config):
        whole = step_bytes * planned.config.num_train_steps
        print(
            f"of each broker's disk the log takes at most {format_bytes(step_bytes)} a step and "
            f"{format_bytes(whole)} in all, unless run.retain_versions bounds it"
        )
    used = {device.index for device in plan.devices}
    if unused := [index for index in range(planned.num_devices) if index not in used]:
        named = f"{unused[0]} to {unused[-1]}" if len(unused) > 1 else str(unused[0])
        print(f"no worker computes on device {named}: set trainer.ranks or workers.rollout")
    _print_seconds(planned)
    if not plan.fits:
        print(f"\nIt does not fit: {plan.change or NO_CHANGE}")


def _rows(plan: RunPlan) -> list[list[str]]:
    """Lay out the devices; neighbours that hold the same are one row a worker."""
    rows = []
    for _, group in groupby(plan.devices, key=_contents):
        alike = list(group)
        first, last = alike[0], alike[-1]
        index = str(first.index) if len(alike) == 1 else f"{first.index} to {last.index}"
        for worker, other in zip(first.workers, last.workers, strict=True):
            parts = ", ".join(
                f"{name} {num_bytes / GB:.1f}"
                for name, num_bytes in worker.memory.parts.items()
                if num_bytes >= GB / 20
            )
            name = (
                worker.worker_id
                if worker.worker_id == other.worker_id
                else f"{worker.worker_id} to {other.worker_id}"
            )
            rows.append([index, name, f"{worker.memory.total / GB:.1f}", parts])
        rest = first.num_bytes - first.needed
        free = f"{rest / GB:.1f} free" if rest >= 0 else f"{-rest / GB:.1f} TOO MUCH"
        rows.append([index, "all", f"{first.needed / GB:.1f}", free])
    return rows


def _contents(device: PlannedDevice) -> list[Any]:
    return [
        (worker.worker_id.rpartition("-")[0], dict(worker.memory.parts))
        for worker in device.workers
    ]


def _rooms(plan: RunPlan) -> dict[str, tuple[int, int]]:
    """Return, by role, how many samples of the longest length the smallest cache holds, and how
    many the engine would run.
    """
    rooms: dict[str, tuple[int, int]] = {}
    for device in plan.devices:
        for worker in device.workers:
            if worker.num_samples < worker.most_samples and device.fits:
                role = worker.worker_id.rpartition("-")[0]
                room = worker.num_samples, worker.most_samples
                rooms[role] = min(room, rooms.get(role, room))
    return rooms


def _print_seconds(planned: PlannedRun) -> None:
    seconds = planned.plan.seconds
    if seconds is None:
        print(f"no estimate of the time: nothing is known of the speed of {planned.device.name}")
        return
    stages = _stages(seconds)
    slowest = max(stages, key=lambda name: stages[name])
    is_sync = planned.config.run.mode == "sync"
    whole = sum(stages.values()) if is_sync else stages[slowest]
    listed = ", ".join(f"{name} {value:.0f} s" for name, value in stages.items())
    print(
        f"a step of {planned.config.run.prompts_per_step} x "
        f"{planned.config.run.samples_per_prompt} samples of {planned.sample_tokens:,} tokens: "
        f"{listed}; about {whole:.0f} s {'in turn' if is_sync else 'side by side'}, and most of it "
        f"is {slowest}. An estimate, from data sheets: 40 % of the speed, 60 % of the bandwidth"
    )


def _stages(seconds: StageSeconds) -> dict[str, float]:
    return {
        "rollout": seconds.rollout,
        "scoring": seconds.scoring,
        "training": seconds.training,
    }


def _as_tree(planned: PlannedRun) -> dict[str, Any]:
    plan = planned.plan
    return {
        "fits": plan.fits,
        "change": plan.change,
        "device": planned.device.name,
        "num_devices": planned.num_devices,
        "pass_tokens": plan.tokens,
        "sample_tokens": planned.sample_tokens,
        "host_bytes": plan.host_bytes,
        "version_bytes": plan.version_bytes,
        "episode": None if plan.episode is None else asdict(plan.episode),
        "seconds": None if plan.seconds is None else _stages(plan.seconds),
        "devices": [
            {
                "index": device.index,
                "bytes": device.num_bytes,
                "needed": device.needed,
                "workers": {
                    worker.worker_id: dict(worker.memory.parts) for worker in device.workers
                },
            }
            for device in plan.devices
        ],
    }
