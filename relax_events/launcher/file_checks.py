"""Checks of a run file and of what it names: roles, models, judge, data and reward. Only the doctor
loads code of the user or anything heavy.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from relax_events.config import ModelConfig, RunConfig, TeacherModelConfig
from relax_events.config.algorithm_spec import find_algorithm
from relax_events.data.prompt_filter import (
    FunctionFilter,
    LengthFilter,
    build_length_filter,
    find_hook,
    needs_token_counts,
)
from relax_events.data.rendering import PromptRenderer, load_judge_renderer, read_chat_template
from relax_events.data.rows import PromptRow, PromptSource, build_checking_reader
from relax_events.data.sft_targets import tokenize_targets
from relax_events.data.sources import media_modalities, named_sources
from relax_events.engines.sglang.checkpoint import MEDIA_MODELS, UNTESTED_MEDIA_MODELS
from relax_events.errors import (
    CheckFailed,
    ConfigError,
    EnvironmentProblem,
    PoisonSample,
    RelaxError,
    RewardError,
)
from relax_events.events.json_text import parse_json
from relax_events.events.parts import Modality
from relax_events.launcher.checked_run import CheckedRun
from relax_events.media.library import MediaLibrary
from relax_events.media.token_layout import MEDIA_FAMILIES, MediaLayout
from relax_events.model_folder import has_experts, read_model_json
from relax_events.model_folder.tensors import read_layouts, require_layouts
from relax_events.models.checkpoint_facts import require_fetched
from relax_events.models.token_table import require_same_vocabulary
from relax_events.plugins import (
    DRIVERS,
    ENGINES,
    ENVIRONMENTS,
    FUNCTION,
    OPTIMIZERS,
    ROLES,
    TRAINER_BACKENDS,
    find_plugin,
)
from relax_events.regular_files import require_regular_files
from relax_events.rewards.pool import RewardItem, RewardPool
from relax_events.rewards.run_judge import load_grading, load_judge_rewards
from relax_events.rewards.scores import Score
from relax_events.secret_handling import read_secret

MODEL_PACKAGES = ("torch", "transformers", "safetensors", "accelerate")
MODEL_FILES = ("config.json", "tokenizer_config.json")
ENGINE_MEDIA_FAMILIES = {"sglang": MEDIA_MODELS}
"""Model families whose media an engine supports, where it does not support all of them."""
NO_PROMPTS = "none needed: a replay trains what was generated and scored before"


def check_roles(run: CheckedRun) -> str:
    """Return the roles with their worker counts, once every role, engine, environment, backend and
    algorithm is installed.

    Raises:
        ConfigError: One is not installed; the text names its key and the installed ones.
    """
    config = run.config
    for role in config.roles():
        find_plugin(ROLES, role, what=f"role {role!r}")
    for engine in dict.fromkeys((config.engine.name, config.rollout_engine)):
        _require_plugin(ENGINES, engine, key="engine.name")
    if config.has_judge:
        _require_plugin(ENGINES, config.judge.engine.name, key="judge.engine.name")
    if environment := config.environment.function:
        find_plugin(
            ENVIRONMENTS,
            environment,
            what=f"environment.function = {environment!r}",
            accepts=FUNCTION,
        )
    config.environment.resolve_command()
    if config.environment.has_programs:
        _require_plugin(DRIVERS, "program", key="the driver of command and harness")
    if (token_file := config.environment.harness.token_file) is not None:
        read_secret(token_file, key="environment.harness.token_file")
    _require_own_servers(config)
    _require_plugin(TRAINER_BACKENDS, config.trainer.backend, key="trainer.backend")
    _require_plugin(OPTIMIZERS, config.trainer.optimizer, key="trainer.optimizer")
    find_algorithm(config.algorithm.name)
    return ", ".join(f"{role} x {count}" for role, count in config.roles().items())


def _require_plugin(group: str, name: str, *, key: str) -> None:
    find_plugin(group, name, what=f"{key} = {name!r}")


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


def check_model(run: CheckedRun) -> str:
    """Return the model's origin: its folder is complete, or the run will make it.

    Raises:
        ConfigError: The folder is missing and not configured to be made, or lacks a file; the text
            names it.
        EnvironmentProblem: A library is not installed.
    """
    config = run.config
    if missing := [name for name in MODEL_PACKAGES if importlib.util.find_spec(name) is None]:
        raise EnvironmentProblem(f"{missing[0]} is not installed; install relax-events[model]")
    if config.model.lora is not None and importlib.util.find_spec("peft") is None:
        raise EnvironmentProblem("[model.lora] needs peft; install relax-events[lora]")
    _require_media_support(config, _declared_media(config))
    _require_routing_replay(config.model)
    path = config.model.path
    require_fetched(path, key="model.path")
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


def _declared_media(config: RunConfig) -> set[Modality]:
    """Return the modalities of media that the run file names."""
    parts = (*config.data.parts, *config.evaluation.datasets)
    return {modality for part in parts for modality in media_modalities(part)}


def _require_media_support(config: RunConfig, required: set[Modality]) -> None:
    """Refuse media in the data that the engine, or the model, does not read."""
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
        require_fetched(path, key="critic.model_path")
        require_regular_files(path, key="critic.model_path")
    if config.algorithm.needs_critic and path is not None and not (path / "config.json").is_file():
        raise ConfigError(
            f"critic.model_path {path} holds no config.json; give a folder in Hugging Face "
            "layout, or leave it out for the policy's own"
        )


def check_teacher(run: CheckedRun) -> str:
    """Return the teacher, once its folder is complete and it has the policy's vocabulary.

    Raises:
        ConfigError: The folder is missing, lacks a file, or holds another tokenizer; the text names
            both.
    """
    config = run.config
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
    require_fetched(path, key=f"{section}.model_path", needs_weights=not teacher.urls)
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


def check_judge(run: CheckedRun) -> str:
    """Return the LLM judge, once its model is complete and its prompts can be rendered.

    Raises:
        ConfigError: The folder is missing or lacks a file or a chat template, or an option does not
            fit; the text names it.
    """
    config = run.config
    path = config.judge.model_path
    if path is None or not (config.has_judge or config.judged_datasets):
        return (
            "none: judge.model_path is not given"
            if path is None
            else "none: nothing is rewarded here"
        )
    require_fetched(path, key="judge.model_path")
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


def check_tensors(run: CheckedRun) -> str:
    """Return the model folders that hold every tensor of their models, by the headers of the files.

    Raises:
        ConfigError: A folder lacks a tensor, or holds one of another shape, or the model has no
            layer of a name in model.lora.target_modules; the text names it.
    """
    from relax_events.models.adapters import find_targets  # imports torch
    from relax_events.models.causal_lm import require_all_tensors
    from relax_events.models.families import read_family

    model, backend = run.config.model, run.config.trainer.backend
    folders = _list_model_folders(run.config)
    for path, needs_head in folders.items():
        family = read_family(path, model.media)
        module = require_all_tensors(path, loader=family.loader, needs_head=needs_head)
        if path == model.path and model.lora is not None and backend == "torch":
            find_targets(module, model.lora, language_model=family.language_model(module))
    return f"all in {', '.join(map(str, folders))}" if folders else "the run will make its model"


def _list_model_folders(config: RunConfig) -> dict[Path, bool]:
    """Return the folders of the run's models, and whether their output heads are used."""
    teachers = config.list_teachers().values() if config.algorithm.distills else ()
    critic = config.critic.model_path if config.algorithm.needs_critic else None
    others = [one.model_path for one in teachers if not one.urls]
    others += [config.judge.model_path] if config.has_judge else []
    heads = {path: True for path in (config.model.path, *others) if path is not None}
    folders = heads if critic is None else {critic: False} | heads
    return {path: needs_head for path, needs_head in folders.items() if path.exists()}


def check_data(run: CheckedRun) -> str:
    """Check every row of every file that the run will read, and the templates and filters that will
    process them; when it is thorough, also that the first row can be processed.

    Raises:
        ConfigError: A file, a row, a template or a filter is missing or invalid.
    """
    config = run.config
    if not config.is_replay or config.evaluation.datasets:
        read_chat_template(config.data)
    if not config.is_replay and config.data.prompt_filter:
        find_hook(config.data.prompt_filter)
    prompts, evaluated = run.prompts, run.evaluated
    first_rows = [source.row(0) for _, source in (*prompts, *evaluated)]
    _require_media_support(config, {item.modality for row in first_rows for item in row.media})
    if run.is_thorough:
        run.first_prompt = first_rows[0] if first_rows else None
    texts = [
        f"{source.num_rows} prompts in {part.source}{_left_out(source)}" for part, source in prompts
    ]
    if run.is_thorough and prompts:
        texts += _try_first_rows(run)
    texts += [
        f"{source.num_rows} to evaluate {part.name} on{_left_out(source)}"
        for part, source in evaluated
    ]
    return "; ".join(texts) or NO_PROMPTS


def _try_first_rows(run: CheckedRun) -> Iterator[str]:
    """Say what filter, lengths and answers of the first rows are."""
    config, first = run.config, run.first_prompt
    assert first is not None, "there are prompts"
    if config.data.prompt_filter:
        verdict = FunctionFilter(config.data.prompt_filter)(first, mean_rewards=(), train_step=0)
        yield f"{config.data.prompt_filter} gives {verdict} for the first"
    if not config.model.path.exists():
        return
    renderer = PromptRenderer.from_folder(config.model.path, config.data, media=config.model.media)
    if needs_token_counts(config.data):
        length_filter = build_length_filter(
            renderer, config.data, read_messages=build_checking_reader(MediaLibrary(config))
        )
        for _, source in run.prompts:
            yield _describe_lengths(source, length_filter, run.num_rows)
    if not config.algorithm.has_rewards:
        answers = tokenize_targets(first, renderer=renderer)
        counts = (f"{int(answer.loss_mask.sum())} tokens to learn" for answer in answers)
        yield f"the first brings {' and '.join(counts)}"


def _describe_lengths(source: PromptSource, length_filter: LengthFilter, num_rows: int) -> str:
    """Say how many of a source's first rows the length filter takes."""
    rows = range(min(source.num_rows, num_rows))
    reasons = Counter(
        verdict
        for row in rows
        if isinstance(verdict := length_filter(source.row(row), mean_rewards=(), train_step=0), str)
    )
    counts = [f"{count} {reason.replace('_', ' ')}" for reason, count in sorted(reasons.items())]
    return f"of its first {len(rows)} are passed over: {', '.join(counts) or 'none'}"


def _left_out(source: PromptSource) -> str:
    invalid = source.invalid_rows
    return (
        f", {invalid.count} invalid left out, first {invalid.examples[0]}" if invalid.count else ""
    )


def check_context_length(run: CheckedRun) -> str:
    """Return how many of the first prompts leave the engine no token to generate. Only text prompts
    are checked, and only where the model exists.

    Raises:
        ConfigError: No prompt leaves a token, or a checkpoint can't be read; the text names the
            shortest prompt, or the file.
    """
    if run.config.is_replay or not run.config.model.path.exists():
        return "not compared with the prompts yet"
    config, _ = run.resolution
    limit = config.engine.max_context_tokens
    renderer = PromptRenderer.from_folder(config.model.path, config.data, media=config.model.media)
    length_filter = (
        build_length_filter(renderer, config.data) if needs_token_counts(config.data) else None
    )
    lengths, refusals = [], []
    for _, source in run.prompts:
        for row in islice(map(source.row, range(source.num_rows)), run.num_rows):
            if row.media or (
                length_filter is not None
                and isinstance(length_filter(row, mean_rewards=(), train_step=0), str)
            ):
                continue
            try:
                lengths.append(len(renderer.row_tokens(row.messages, tools=row.tools)))
            except PoisonSample as error:  # of some rows, only their prompt groups fail
                refusals.append(str(error))
    if refusals and not lengths:
        raise ConfigError(f"all of the first {len(refusals)} rows are refused: {refusals[0]}")
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


def check_reward(run: CheckedRun) -> str:
    """Check that the reward function loads, and scores the reference answer of the first prompt
    in time.
    """
    config = run.config
    if not config.algorithm.has_rewards and not config.evaluation.datasets:
        return f"algorithm {config.algorithm.name} needs none"
    if config.is_replay and not config.evaluation.datasets:
        return NO_PROMPTS
    texts = [_try_reward(config, run.first_prompt)]
    rewards = [part.reward for part in config.evaluation.datasets if part.reward is not None]
    for reward in rewards:
        RewardPool(reward).close()
    if rewards:
        texts.append(f"{', '.join(reward.function for reward in rewards)} for evaluation loads")
    return "; ".join(texts)


def _try_reward(config: RunConfig, first_prompt: PromptRow | None) -> str:
    if (computed := config.computed_reward) is None:
        return "the judge scores all samples"
    with RewardPool(computed) as pool:
        if first_prompt is None:
            raise CheckFailed(
                f"{computed.function} loads, but was not tried: there is no prompt to try it on; "
                "see data"
            )
        if config.reward.find_source(parse_json(first_prompt.metadata)) in config.judged_sources:
            return f"{computed.function} loads; the first prompt is the judge's"
        item = RewardItem(
            "of-the-doctor",
            first_prompt.answer,
            answer=first_prompt.answer,
            metadata=first_prompt.metadata,
            prompt="\n".join(message.text for message in first_prompt.messages),
        )
        num_items = 2 if pool.takes_prompt_group else 1
        result = pool.score_batch([item] * num_items)[0]
        empty = pool.score_batch([replace(item, completion="")] * num_items)[0]
    if isinstance(result, RelaxError):
        raise result
    text = f"{computed.function} gives {result.reward:g} for the reference answer"
    return f"{text} of the first prompt{_describe_reward_of_late(config, empty)}"


def _describe_reward_of_late(config: RunConfig, empty: Score | RewardError) -> str:
    """Say that being late pays off, if it gets more than an empty answer."""
    late = config.reward.on_timeout
    if isinstance(empty, RewardError) or not config.environment.name or late == "none":
        return ""
    if late <= empty.reward:
        return ""
    return (
        f", and {empty.reward:g} for an empty one: less than a late sample gets "
        f"(reward.on_timeout = {late:g}), so that the policy may learn to be late; set "
        f"reward.on_timeout to the lowest reward, {empty.reward:g} or less"
    )
