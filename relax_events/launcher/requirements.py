"""What a run requires of this machine, checked without a broker and without loading anything heavy.
`relax run` and the doctor check it first.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from relax_events.config import ModelConfig, RunConfig, TeacherModelConfig
from relax_events.config.algorithm_spec import find_algorithm
from relax_events.controller.api_server import require_api_port
from relax_events.data.prompt_filter import build_length_filter, needs_token_counts
from relax_events.data.rendering import PromptRenderer, load_judge_renderer
from relax_events.data.sources import is_generated, media_modalities, named_sources, open_source
from relax_events.engines.sglang.checkpoint import MEDIA_MODELS, UNTESTED_MEDIA_MODELS
from relax_events.errors import ConfigError, EnvironmentProblem, PoisonSample
from relax_events.gateway.program import resolve_command
from relax_events.http.server import open_listener
from relax_events.http.tls import choose_run_tls
from relax_events.media.token_layout import MEDIA_FAMILIES, MediaLayout
from relax_events.model_folder import has_experts, read_model_json
from relax_events.model_folder.tensors import read_layouts, require_layouts
from relax_events.models.token_table import require_same_vocabulary
from relax_events.plugins import (
    ENGINES,
    ENVIRONMENTS,
    FUNCTION,
    OPTIMIZERS,
    ROLES,
    TRAINER_BACKENDS,
    find_plugin,
)
from relax_events.regular_files import require_regular_files
from relax_events.rewards.run_judge import load_grading, load_judge_rewards
from relax_events.secret_handling import read_secret
from relax_events.telemetry.traces import require_tracing
from relax_events.telemetry.trackers import require_trackers

MODEL_PACKAGES = ("torch", "transformers", "safetensors")
MODEL_FILES = ("config.json", "tokenizer_config.json")
MAX_PORT = 65_535
NUM_RENDERED = 100
"""Rows that are rendered before a run starts; it takes a moment."""
ENGINE_MEDIA_FAMILIES = {"sglang": MEDIA_MODELS}
"""Model families whose media an engine supports, where it does not support all of them."""


def require_roles(config: RunConfig) -> str:
    """Return the roles with their worker counts, once every role, engine, environment, backend and
    algorithm is installed.

    Raises:
        ConfigError: One is not installed; the text names its key and the installed ones.
    """
    for role in config.roles():
        find_plugin(ROLES, role, what=f"role {role!r}")
    for engine in dict.fromkeys((config.engine.name, config.rollout_engine)):
        find_plugin(ENGINES, engine, what=f"engine.name = {engine!r}")
    if config.has_judge:
        find_plugin(
            ENGINES,
            config.judge.engine.name,
            what=f"judge.engine.name = {config.judge.engine.name!r}",
        )
    if environment := config.environment.function:
        find_plugin(
            ENVIRONMENTS,
            environment,
            what=f"environment.function = {environment!r}",
            accepts=FUNCTION,
        )
    if config.environment.command:
        resolve_command(config.environment.command)
    if (token_file := config.environment.harness.token_file) is not None:
        read_secret(token_file, key="environment.harness.token_file")
    _require_own_servers(config)
    find_plugin(
        TRAINER_BACKENDS,
        config.trainer.backend,
        what=f"trainer.backend = {config.trainer.backend!r}",
    )
    find_plugin(
        OPTIMIZERS,
        config.trainer.optimizer,
        what=f"trainer.optimizer = {config.trainer.optimizer!r}",
    )
    find_algorithm(config.algorithm.name)
    return ", ".join(f"{role} x {count}" for role, count in config.roles().items())


def _require_own_servers(config: RunConfig) -> None:
    """Refuse several workers that attach to the same servers: each would change the weights under
    the others' samples.
    """
    engines = {("engine", "rollout"): config.engine} | (
        {("judge.engine", "judge"): config.judge.engine} if config.has_judge else {}
    )
    for (section, role), engine in engines.items():
        if (
            engine.name == "sglang"
            and engine.sglang.urls
            and (count := config.roles().get(role, 0)) > 1
        ):
            raise ConfigError(
                f"servers serve one worker each, and {count} {role} workers would attach to all "
                f"of {section}.sglang.urls; set workers.{role} = 1, whose worker shares its "
                "samples out among them"
            )


def require_model(config: RunConfig) -> str:
    """Return the model's origin: its folder is complete, or the run will make it.

    Raises:
        ConfigError: The folder is missing and not configured to be made, or lacks a file; the text
            names it.
        EnvironmentProblem: A library is not installed.
    """
    if missing := [name for name in MODEL_PACKAGES if importlib.util.find_spec(name) is None]:
        raise EnvironmentProblem(f"{missing[0]} is not installed; install relax-events[model]")
    if config.model.lora is not None and importlib.util.find_spec("peft") is None:
        raise EnvironmentProblem("[model.lora] needs peft; install relax-events[lora]")
    _require_media_support(config)
    _require_routing_replay(config.model)
    path = config.model.path
    if not path.exists():
        if config.model.tiny is None:
            raise ConfigError(
                f"model.path {path} does not exist; give the folder of a checkpoint, or a "
                "[model.tiny] section to make a small model"
            )
        return f"{path} will be made by the run"
    require_regular_files(path, key="model.path")
    for name in MODEL_FILES:
        if not (path / name).is_file():
            raise ConfigError(
                f"model.path {path} has no {name}; give a complete folder in Hugging Face "
                "layout, or a path that does not exist yet"
            )
    require_layouts(path)
    _require_critic(config)
    return f"{path} is complete"


def _require_media_support(config: RunConfig) -> None:
    """Refuse media in the data that the engine, or the model, does not read."""
    required = {
        modality
        for part in (*config.data.parts, *config.evaluation.datasets)
        for modality in media_modalities(part)
    }
    if not required:
        return
    path, tiny = config.model.path, config.model.tiny
    if path.exists() or tiny is not None:
        layout = (
            MediaLayout.from_folder(path, config.model.media)
            if path.exists()
            else MEDIA_FAMILIES.get(tiny.family if tiny else "")
        )
        if unread := sorted(required - set(layout.MODALITIES if layout else ())):
            model = (
                f"model.path {path}"
                if path.exists()
                else f"model.tiny.family = {tiny.family if tiny else ''!r}"
            )
            reads = " and ".join(layout.MODALITIES) if layout else "text only"
            families = ", ".join(
                name
                for name, family in MEDIA_FAMILIES.items()
                if required <= set(family.MODALITIES)
            )
            raise ConfigError(
                f"the data contains media of kind {unread[0]} and {model} reads {reads}; take a "
                f"model of one of the families {families}"
            )
        family, shown = (
            _read_family(path) if path.exists() else tiny.family if tiny else "",
            ENGINE_MEDIA_FAMILIES.get(config.engine.name),
        )
        if shown is not None and family not in shown:
            explanation = (
                f", {UNTESTED_MEDIA_MODELS[family]}" if family in UNTESTED_MEDIA_MODELS else ""
            )
            raise ConfigError(
                f"the data contains media of kind {min(required)}: engine "
                f"{config.engine.name!r} supports media for models of the families "
                f"{', '.join(shown)} alone, and {path} is of {family}{explanation}; set "
                "engine.name = 'transformers'"
            )
    if config.algorithm.needs_critic and (critic := config.critic.model_path) is not None:
        layout = MediaLayout.from_folder(critic, config.model.media)
        if unread := sorted(required - set(layout.MODALITIES if layout else ())):
            raise ConfigError(
                f"the data contains media of kind {unread[0]}, and critic.model_path {critic} "
                "does not read such; leave it out"
            )
    if missing := [name for name in ("PIL", "av") if importlib.util.find_spec(name) is None]:
        raise EnvironmentProblem(
            f"{'pillow' if missing[0] == 'PIL' else missing[0]} is not installed; install "
            "relax-events[media]"
        )


def _read_family(path: Path) -> str:
    """Return the model type of a folder; `MediaLayout` has read it before."""
    return str(read_model_json(path / "config.json").get("model_type"))


def _require_routing_replay(model: ModelConfig) -> None:
    """Refuse routing replay for a model without experts."""
    if not model.replays_routing:
        return
    path, tiny = model.path, model.tiny
    if (path / "config.json").is_file():
        if not has_experts(path):
            raise ConfigError(
                "model.routing_replay = 'rollout' is for mixtures of experts, and the model in "
                f"model.path {path} is none; leave it out"
            )
    elif tiny is not None and "moe" not in tiny.family:
        raise ConfigError(
            "model.routing_replay = 'rollout' is for mixtures of experts, and model.tiny.family = "
            f"{tiny.family!r} is none; leave it out"
        )


def _require_critic(config: RunConfig) -> None:
    path = config.critic.model_path
    if path is not None:
        require_regular_files(path, key="critic.model_path")
    if config.algorithm.needs_critic and path is not None and not (path / "config.json").is_file():
        raise ConfigError(
            f"critic.model_path {path} holds no config.json; give a folder in Hugging Face "
            "layout, or leave it out for the policy's own"
        )


def require_teacher(config: RunConfig) -> str:
    """Return the teacher, once its folder is complete and it has the policy's vocabulary.

    Raises:
        ConfigError: The folder is missing, lacks a file, or holds another tokenizer; the text names
            both.
    """
    if not config.algorithm.distills or config.is_replay:
        return (
            "none: algorithm.distill_coefficient is 0"
            if not config.algorithm.distills
            else "none: a replay reads what was recorded"
        )
    teachers = config.list_teachers()
    if not teachers:
        raise ConfigError(
            "algorithm.distill_coefficient needs a teacher; set teacher.model_path to the "
            "folder of its checkpoint"
        )
    descriptions = {_require_teacher(config, name, one): None for name, one in teachers.items()}
    return "; ".join(descriptions)


def _require_teacher(config: RunConfig, section: str, teacher: TeacherModelConfig) -> str:
    path = teacher.model_path
    assert path is not None, "checked by the configuration"
    require_regular_files(path, key=f"{section}.model_path")
    if not teacher.urls and not ((path / "config.json").is_file() and read_layouts(path)):
        raise ConfigError(
            f"{section}.model_path {path} holds no config.json with *.safetensors; give a "
            "complete folder in Hugging Face layout"
        )
    media = {kind for _, part in named_sources(config.data) for kind in media_modalities(part)}
    if teacher.urls and media:
        raise ConfigError(
            f"{section}.urls: a teacher on servers reads text only, and the data bring "
            f"{', '.join(sorted(media))}; leave urls out"
        )
    if not config.model.path.exists():
        return (
            f"{path}; its vocabulary is compared by the teacher role, once the policy's model is "
            "made"
        )
    require_same_vocabulary(config.model.path, path, section=section)
    where = f" on {len(teacher.urls)} servers" if teacher.urls else ""
    return f"{path}{where} has the vocabulary of {config.model.path}"


def require_judge(config: RunConfig) -> str:
    """Return the LLM judge, once its model is complete and its prompts can be rendered.

    Raises:
        ConfigError: The folder is missing or lacks a file or a chat template, or an option does not
            fit; the text names it.
    """
    path = config.judge.model_path
    if path is None or not (config.has_judge or config.judged_datasets):
        return (
            "none: judge.model_path is not given"
            if path is None
            else "none: nothing is rewarded here"
        )
    require_regular_files(path, key="judge.model_path")
    if not (path / "config.json").is_file() or not read_layouts(path):
        raise ConfigError(
            f"judge.model_path {path} holds no config.json with *.safetensors; give a "
            "complete folder in Hugging Face layout"
        )
    for source in config.judged_sources:
        load_grading(config.reward.chosen[source])
    for dataset in config.evaluation.datasets:
        if dataset.name in config.judged_datasets:
            load_judge_rewards(config, dataset.reward or config.reward)
    load_judge_renderer(config.judge, config.data)
    num_judged, num_all = len(config.judged_sources), len(config.reward.chosen)
    scope = f", for {num_judged} of {num_all} sources" if num_judged < num_all else ""
    return f"{path} on engine {config.judge.engine.name}{scope}"


def require_metrics_ports(config: RunConfig) -> str:
    """Return the ports of the workers' metrics, once the address is this machine's and the ports
    are free.

    Raises:
        EnvironmentProblem: A port is taken or the address is not this machine's; the text names
            both.
    """
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


def require_folder(config: RunConfig) -> str:
    """Return the run's folder, once this user may write it.

    Raises:
        EnvironmentProblem: The folder, or its nearest existing parent, can't be written.
    """
    run_folder = config.run_directory.absolute()
    there = next(path for path in (run_folder, *run_folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise EnvironmentProblem(
            f"the run's folder {run_folder} can't be made or written: {there} is not a folder "
            "that this user may write to; set run.directory"
        )
    return f"{run_folder} can be written"


def require_context_length(
    config: RunConfig, *, num_rows: int = NUM_RENDERED, with_generated: bool = False
) -> str:
    """Return how many of the first prompts leave the engine no token to generate. Only text prompts
    are checked, and only where the model exists.

    Args:
        config: The run.
        num_rows: Rows of each source that are rendered.
        with_generated: Check generated problems too, whose libraries take seconds to import.
    Raises:
        ConfigError: No prompt leaves a token; the text names the shortest.
    """
    limit = config.engine.max_context_tokens
    if config.is_replay or not config.model.path.exists():
        return "not compared with the prompts yet"
    renderer = PromptRenderer.from_folder(config.model.path, config.data, media=config.model.media)
    length_filter = (
        build_length_filter(renderer, config.data) if needs_token_counts(config.data) else None
    )
    lengths = []
    for section, part in named_sources(config.data):
        if media_modalities(part) or (is_generated(part) and not with_generated):
            continue
        source = open_source(part, seed=config.run.seed, section=section)
        for row in islice(map(source.row, range(source.num_rows)), num_rows):
            if length_filter is None or not isinstance(
                length_filter(row, mean_rewards=(), train_step=0), str
            ):
                with suppress(
                    PoisonSample
                ):  # the template refuses the row; only its prompt group fails
                    lengths.append(len(renderer.prompt_tokens(row.messages, tools=row.tools)))
    if lengths and min(lengths) >= limit:
        raise ConfigError(
            f"engine.max_context_tokens = {limit} leaves no token for a completion: the shortest "
            f"of the first {len(lengths)} prompts has {min(lengths)}; set "
            f"engine.max_context_tokens to {max(lengths) + config.engine.sampling.max_new_tokens} "
            "or so"
        )
    num_long = sum(length >= limit for length in lengths)
    return (
        f"{limit} tokens; {num_long or 'none'} of the first {len(lengths)} prompts "
        f"leave{'s' if num_long == 1 else ''} none for a completion"
    )


def require_harness_address(config: RunConfig) -> str:
    """Return where harnesses find rollout worker 0, once their keys stay secret on the way.

    Raises:
        ConfigError: The address needs encryption.
    """
    harness = config.environment.harness
    if not harness.is_served:
        return "none: environment.harness.port = 0"
    tls = choose_run_tls(config.http, harness.host)
    return f"{'HTTP' if tls is None else 'HTTPS'}, {harness.host}, port {harness.port}"


REQUIREMENTS: Mapping[str, Callable[[RunConfig], str]] = {
    "folder": require_folder,
    "roles": require_roles,
    "metrics": require_metrics_ports,
    "traces": lambda config: require_tracing(config.telemetry.traces),
    "trackers": lambda config: require_trackers(config.telemetry),
    "scaling API": require_api_port,
    "harness": require_harness_address,
    "model": require_model,
    "teacher": require_teacher,
    "judge": require_judge,
}
"""Checked by `relax run` before it starts anything, in this order, and by the doctor."""
