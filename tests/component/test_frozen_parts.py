"""Parts of a model that stay frozen in training."""

from pathlib import Path

import pytest
import torch
from engine_requests import finish

from relax_events.config import MediaConfig
from relax_events.errors import ConfigError
from relax_events.media.library import MediaLibrary
from relax_events.models.families import freeze, read_family
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.ranks import SingleRank
from tests.unit.image_model import image_engine, image_run, ready, request_for
from tests.unit.trainer_samples import run_config
from tests.unit.video_and_audio import omni_model

PARTS = ("language", "vision", "projection")


def part_of(name: str) -> str:
    if "merger" in name:
        return "projection"
    return "vision" if ".visual." in name else "language"


def trained(folder: Path, frozen: list[str]) -> tuple[TorchBackend, dict[str, torch.Tensor]]:
    """Take one step on samples with images."""
    config = image_run(folder, model={"frozen": frozen})
    backend, library, engine = (
        TorchBackend(config, ranks=SingleRank()),
        MediaLibrary(config),
        image_engine(),
    )
    before = collect_weights(backend)
    request = request_for(1, library)
    engine.submit(request)
    backend.accumulate(
        [ready(request, sample, index) for index, sample in enumerate(finish(engine).values())]
    )
    backend.step()
    return backend, before


@pytest.mark.parametrize(
    "frozen", [[], ["vision"], ["language"], ["vision", "projection"], ["language", "projection"]]
)
def test_frozen_parts_stay_and_the_others_learn(tmp_path: Path, frozen: list[str]) -> None:
    backend, before = trained(tmp_path, frozen)
    moved = {
        name
        for name, tensor in collect_weights(backend).items()
        if not torch.equal(tensor, before[name])
    }
    assert {part_of(name) for name in moved} == set(PARTS) - set(frozen)
    assert set(before) == set(collect_weights(backend))


def test_state_includes_frozen_parts_and_loads_into_another_backend(tmp_path: Path) -> None:
    backend, _ = trained(tmp_path, ["vision"])
    other = TorchBackend(image_run(tmp_path, model={"frozen": ["vision"]}), ranks=SingleRank())
    other.load_state(backend.state())
    for name, tensor in collect_weights(backend).items():
        assert torch.equal(collect_weights(other)[name], tensor), name


def test_freezing_a_part_that_the_model_lacks_is_rejected() -> None:
    config = run_config()
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"frozen": ("vision",)})}
    )
    with pytest.raises(
        ConfigError, match=r"model\.frozen names 'vision', but the model's parts are language"
    ):
        TorchBackend(config, ranks=SingleRank())


def test_freezing_every_part_of_a_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        TorchBackend(image_run(tmp_path, model={"frozen": list(PARTS)}), ranks=SingleRank())


@pytest.mark.parametrize(
    ("part", "frozen", "free"),
    [
        (
            "audio",
            {"audio_tower.conv2d1.weight", "audio_tower.layers.0.fc1.weight"},
            {"audio_tower.proj1.weight", "visual.pos_embed.weight"},
        ),
        (
            "vision",
            {"visual.pos_embed.weight", "visual.blocks.0.norm1.weight"},
            {"visual.merger.ln_q.weight", "audio_tower.conv2d1.weight"},
        ),
        (
            "projection",
            {"audio_tower.proj2.weight", "visual.merger_list.0.ln_q.weight"},
            {"audio_tower.conv2d1.weight", "lm_head.weight"},
        ),
        (
            "language",
            {"lm_head.weight", "model.layers.0.mlp.gate.weight"},
            {"audio_tower.proj1.weight", "visual.merger.ln_q.weight"},
        ),
    ],
)
def test_freezing_a_part_of_an_audio_model_freezes_only_its_parameters(
    part: str, frozen: set[str], free: set[str]
) -> None:
    family = read_family(omni_model(), MediaConfig())
    module = family.loader.from_pretrained(omni_model())
    freeze(module, [part], family=family)
    learns = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    assert [learns[name] for name in (*frozen, *free)] == [False] * len(frozen) + [True] * len(free)
