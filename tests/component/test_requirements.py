"""A run file's requirements: each missing one is reported with its remedy, without loading
anything.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_events.config import RunConfig
from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.launcher.checked_run import CheckedRun
from relax_events.launcher.file_checks import check_model, check_roles, check_teacher
from relax_events.launcher.machine_checks import check_metrics_ports
from relax_events.model_folder import read_model_json
from relax_events.model_folder.tensors import TensorLayout, render_header
from relax_events.models.token_table import read_vocabulary

MakeRunConfig = Callable[..., RunConfig]
SEVEN_ROLES = (
    "controller x 1, metrics x 1, prompter x 1, rollout x 1, reward x 1, advantage x 1, trainer x 1"
)


def whole_model(folder: Path) -> Path:
    """Make a folder with the files of a checkpoint."""
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).touch()
    layouts = {"a": TensorLayout("uint8", (1,))}
    (folder / "model.safetensors").write_bytes(render_header(layouts) + b"\0")
    return folder


def test_role_check_reports_the_number_of_workers_per_role(make_run_config: MakeRunConfig) -> None:
    assert check_roles(CheckedRun(make_run_config())) == SEVEN_ROLES
    both = make_run_config(
        algorithm={"kl_coefficient": 0.1, "old_logprobs": "actor"},
        workers={"rollout": 3, "reference": 2},
    )
    assert "rollout x 3" in check_roles(CheckedRun(both))
    assert "reference x 2, actor-forward x 1" in check_roles(CheckedRun(both))


def test_error_names_setting_of_an_engine_or_backend_that_is_not_installed(
    make_run_config: MakeRunConfig,
) -> None:
    with pytest.raises(
        ConfigError, match=r"^engine.name = 'vroom' is not installed; installed are .*transformers"
    ):
        check_roles(CheckedRun(make_run_config(engine={"name": "vroom"})))
    with pytest.raises(
        ConfigError, match=r"^trainer.backend = 'abacus' is not installed; installed are .*torch"
    ):
        check_roles(CheckedRun(make_run_config(trainer={"backend": "abacus"})))


def test_attaching_several_workers_to_the_same_servers_is_rejected(
    make_run_config: MakeRunConfig,
) -> None:
    attached = {"name": "sglang", "sglang": {"urls": ["http://host:30000"]}}
    assert "rollout x 1" in check_roles(CheckedRun(make_run_config(engine=attached)))
    with pytest.raises(
        ConfigError,
        match=r"2 rollout workers would attach to all of engine.sglang.urls; set workers.rollout = 1",
    ):
        check_roles(CheckedRun(make_run_config(engine=attached, workers={"rollout": 2})))


def test_model_check_accepts_complete_model_or_recipe(
    make_run_config: MakeRunConfig, tmp_path: Path
) -> None:
    assert (
        check_model(CheckedRun(make_run_config(model={"tiny": {}})))
        == f"{tmp_path / 'model'} will be made by the run"
    )
    whole_model(tmp_path / "model")
    assert check_model(CheckedRun(make_run_config())) == f"{tmp_path / 'model'} is complete"


def test_missing_model_error_asks_for_a_checkpoint_folder_or_a_recipe(
    make_run_config: MakeRunConfig,
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"model does not exist; give the folder of a checkpoint, or a \[model.tiny\] section",
    ):
        check_model(CheckedRun(make_run_config()))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_model_folder_that_lacks_a_file_is_refused_with_its_name(
    make_run_config: MakeRunConfig, tmp_path: Path, name: str
) -> None:
    (whole_model(tmp_path / "model") / name).unlink()
    with pytest.raises(ConfigError, match=f"model (has no|holds neither) {name}"):
        check_model(CheckedRun(make_run_config(model={"tiny": {}})))


def test_routing_replay_requires_a_mixture_of_experts(
    make_run_config: MakeRunConfig, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^model.routing_replay = 'rollout' is for mixtures .* model.tiny.family = 'qwen3' is none; leave it out",
    ):
        check_model(CheckedRun(make_run_config(model={"tiny": {}, "routing_replay": "rollout"})))
    tiny = {"family": "qwen3_omni_moe_thinker"}
    assert check_model(
        CheckedRun(make_run_config(model={"tiny": tiny, "routing_replay": "rollout"}))
    ).endswith("will be made by the run")
    whole_model(tmp_path / "model")
    settings = {"model": {"routing_replay": "rollout"}}
    for config in (
        {"num_experts_per_tok": 2, "num_experts": 8},
        {"text_config": {"num_experts_per_tok": 2, "num_local_experts": 8}},
    ):
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        assert check_model(CheckedRun(make_run_config(**settings))).endswith("is complete")
    for config in ({}, {"text_config": {"num_experts": 0, "num_experts_per_tok": 2}}):
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        with pytest.raises(
            ConfigError,
            match=r"is for mixtures of experts, and the model in model.path .*model is none; leave it out",
        ):
            check_model(CheckedRun(make_run_config(**settings)))


def test_malformed_model_config_is_rejected_with_its_path(
    make_run_config: MakeRunConfig, tmp_path: Path
) -> None:
    (whole_model(tmp_path / "model") / "config.json").write_text('{"num_experts": 8, "num_exp')
    with pytest.raises(
        ConfigError,
        match=r"model/config.json can't be read: unexpected end of data.*; use the model folder as published",
    ):
        check_model(CheckedRun(make_run_config(model={"routing_replay": "rollout"})))
    (tmp_path / "model" / "config.json").write_text("[8]")
    with pytest.raises(
        ConfigError,
        match=r"model/config.json holds no JSON object; use the model folder as published",
    ):
        check_model(CheckedRun(make_run_config(model={"routing_replay": "rollout"})))


def test_critic_model_is_required_only_if_the_algorithm_has_a_critic(
    make_run_config: MakeRunConfig, tmp_path: Path
) -> None:
    whole_model(tmp_path / "model")
    critic = {"model_path": str(tmp_path / "critic")}
    assert (
        check_model(CheckedRun(make_run_config(critic=critic)))
        == f"{tmp_path / 'model'} is complete"
    )
    with pytest.raises(
        ConfigError,
        match=r"critic holds no config.json; give a folder in Hugging Face layout, or leave it out",
    ):
        check_model(CheckedRun(make_run_config(critic=critic, algorithm={"name": "ppo"})))
    whole_model(tmp_path / "critic")
    assert (
        check_model(CheckedRun(make_run_config(critic=critic, algorithm={"name": "ppo"})))
        == f"{tmp_path / 'model'} is complete"
    )


def write_vocabulary(folder: Path, *tokens: str, added: str = "<end>") -> Path:
    """Write a tokenizer as the tokenizers library does, with one token added later."""
    later = [{"id": len(tokens), "content": added}]
    tree = {
        "model": {"vocab": {token: number for number, token in enumerate(tokens)}},
        "added_tokens": later,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return folder


def test_teacher_must_be_complete_and_share_the_policy_vocabulary(
    make_run_config: MakeRunConfig, tmp_path: Path
) -> None:
    assert (
        check_teacher(CheckedRun(make_run_config())) == "none: algorithm.distill_coefficient is 0"
    )
    assert (
        check_teacher(CheckedRun(make_run_config(algorithm={"name": "opd"}, parent={"run": "old"})))
        == "none: a replay reads what was recorded"
    )
    teacher = write_vocabulary(whole_model(tmp_path / "teacher"), "a", "b")
    config = make_run_config(algorithm={"name": "opd"}, teacher={"model_path": teacher})
    assert check_teacher(CheckedRun(config)).startswith(
        f"{teacher}; its vocabulary is compared by the teacher role"
    )
    policy = write_vocabulary(whole_model(tmp_path / "model"), "a", "b")
    assert check_teacher(CheckedRun(config)) == f"{teacher} has the vocabulary of {policy}"
    write_vocabulary(policy, "a", "c")
    with pytest.raises(
        ConfigError,
        match=rf"token id 1 is 'b' in teacher.model_path = {teacher} and 'c' in model.path = {policy}; use a teacher",
    ):
        check_teacher(CheckedRun(config))
    write_vocabulary(policy, "a", "b", added="<stop>")
    with pytest.raises(ConfigError, match="token id 2 is '<end>' in teacher"):
        check_teacher(CheckedRun(config))
    (policy / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(
        ConfigError,
        match=r"model/tokenizer.json is not a file of the tokenizers library \(KeyError\('vocab'\)\)",
    ):
        check_teacher(CheckedRun(config))
    (teacher / "tokenizer.json").unlink()
    write_vocabulary(policy, "a", "b")
    with pytest.raises(
        ConfigError,
        match=f"{teacher} has no tokenizer.json, which is needed to compare vocabularies",
    ):
        check_teacher(CheckedRun(config))
    (teacher / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=rf"teacher.model_path {teacher} holds no config.json with \*.safetensors"
    ):
        check_teacher(CheckedRun(config))


def test_vocabulary_may_be_a_list_of_tokens_with_their_scores(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": [["<unk>", 0.0], ["a", -1.5]]}})
    )
    assert read_vocabulary(tmp_path) == {0: "<unk>", 1: "a"}


def test_error_names_missing_package(
    make_run_config: MakeRunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "relax_events.launcher.file_checks.MODEL_PACKAGES", ("a_package_that_is_not_there",)
    )
    with pytest.raises(
        EnvironmentProblem,
        match=r"a_package_that_is_not_there is not installed; install relax-events\[model\]",
    ):
        check_model(CheckedRun(make_run_config()))


def test_metrics_take_free_ports_unless_configured(make_run_config: MakeRunConfig) -> None:
    assert check_metrics_ports(CheckedRun(make_run_config())) == "127.0.0.1, free ports"


def test_metrics_need_a_port_for_every_worker_and_rank(make_run_config: MakeRunConfig) -> None:
    first = 65_535 - 8  # seven workers and two more ranks take 9 ports
    sections = {"trainer": {"ranks": 3}, "broker": {"partitions_per_version": 3}}
    assert (
        check_metrics_ports(
            CheckedRun(make_run_config(telemetry={"metrics_port": first}, **sections))
        )
        == f"127.0.0.1, ports {first} to 65535"
    )
    with pytest.raises(ConfigError, match=rf"would serve on 65536; set it to {first} or less"):
        check_metrics_ports(
            CheckedRun(make_run_config(telemetry={"metrics_port": first + 1}, **sections))
        )


def test_error_names_metrics_port_already_in_use(make_run_config: MakeRunConfig) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = "|".join(
            str(port - back) for back in range(4)
        )  # another program may hold the others
        with pytest.raises(
            EnvironmentProblem,
            match=rf"can't serve metrics on 127.0.0.1:({ports}): Address already in use; set telemetry.metrics_port = 0",
        ):
            check_metrics_ports(CheckedRun(make_run_config(telemetry={"metrics_port": port - 3})))


def test_metrics_address_of_another_machine_is_rejected(make_run_config: MakeRunConfig) -> None:
    with pytest.raises(
        EnvironmentProblem,
        match=r"can't serve metrics on 192.0.2.1:0: .*; set telemetry.metrics_host",
    ):
        check_metrics_ports(CheckedRun(make_run_config(telemetry={"metrics_host": "192.0.2.1"})))


@pytest.mark.parametrize("name", ["tokenizer.json", "model-2.safetensors", "config.json"])
def test_model_folder_with_a_pipe_is_refused(
    make_run_config: MakeRunConfig, tmp_path: Path, name: str
) -> None:
    """A library that opens it would block without end."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in ("config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"):
        (folder / file).write_text("{}")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(
        ConfigError, match=rf"^model\.path {folder} holds {name}, which is no regular file"
    ):
        check_model(CheckedRun(make_run_config()))
    with pytest.raises(ConfigError, match=r"can't be read: .*it is no regular file"):
        read_model_json(folder / name)
