"""A tiny model that was trained and published, as a run leaves it in its object store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from small_settings import small_run
from torch import Tensor

from relax_events.config import RunConfig
from relax_events.objects import ObjectStore
from relax_events.ops.model_export.versions import PublishedVersions
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.weight_stream import weight_parts
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.ranks import SingleRank
from relax_events.weights.file_content import lay_out
from relax_events.weights.transport import StorePublisher

TOKENS = [[5, 9, 2, 7, 7, 1, 30, 12, 3], [11, 4, 4, 8, 40, 2, 9, 6, 1]]


def make_base(path: Path, family: str = "qwen3", *, is_tied: bool = False) -> Path:
    """Write a tiny base model; a tied one has no tensor for its output head."""
    make_tiny(path, corpus=["12=21"], family=family, hidden_size=32, seed=3)
    if is_tied:
        config = json.loads((path / "config.json").read_text())
        for part in (config, config.get("text_config", {})):
            part["tie_word_embeddings"] = True
        (path / "config.json").write_text(json.dumps(config))
        rewrite(path, lambda tensors: tensors.pop("lm_head.weight"))
    return path


def rewrite(path: Path, change: Any) -> None:
    """Change the tensors of a model folder's only file."""
    import safetensors.torch

    file = path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


class TrainedRun:
    """A run whose trainer has made some versions of a model; each is published, and the newest has
    a checkpoint."""

    def __init__(
        self,
        folder: Path,
        base: Path,
        *,
        dtype: str = "float32",
        num_versions: int = 3,
        full_snapshot_interval: int = 1,
        **sections: Any,
    ) -> None:
        self.config: RunConfig = small_run(
            {
                "run": {"id": "trained", "directory": folder},
                "model": {
                    "path": base,
                    "device": "cpu",
                    "dtype": dtype,
                    **sections.pop("model", {}),
                },
                "data": {"source": "jsonl:unused", **sections.pop("data", {})},
                **sections,
            }
        )
        self.store = ObjectStore.open(self.config.objects_uri)
        self.backend = TorchBackend(self.config, ranks=SingleRank())
        adapters = self.backend._model.adapters
        publisher = StorePublisher(
            self.store,
            full_snapshot_interval=full_snapshot_interval,
            base_digest=adapters.base_digest if adapters is not None else b"",
        )
        artifacts, digests = {}, {}
        for version in range(num_versions):
            if version:
                change_weights(self.backend, seed=version)
            artifacts[version], digests[version] = publisher.publish(
                lay_out(weight_parts(self.backend)), policy_version=version
            )
        with Checkpoints(self.store, ranks=SingleRank(), keep=2) as checkpoints:
            reference = checkpoints.save(self.backend.state(), extra={}).wait(30)
        newest = num_versions - 1
        self.versions = PublishedVersions("trained", artifacts, {newest: reference}, digests)

    def delete_weights(self, version: int) -> None:
        """Delete a version's artifact from the store."""
        self.store.delete(self.store.list(f"weights/{version:08d}/"))

    def logprobs(self) -> Tensor:
        """Return the log-probabilities of the trainer's model for the tokens."""
        return token_logprobs(self.backend._model.module)


def change_weights(backend: TorchBackend, *, seed: int, num_changed: int = 40) -> None:
    """Change a few trained weights, as an update does, and count up the version."""
    generator = torch.Generator().manual_seed(seed)
    values = backend._parameters.values
    chosen = torch.randperm(len(values), generator=generator)[: len(values) // num_changed]
    with torch.no_grad():
        values[chosen] += 0.3 * torch.randn(len(chosen), generator=generator)
    backend._parameters.rebuild(with_gradients=True)
    backend.skip_step()


@torch.no_grad()
def token_logprobs(module: Any) -> Tensor:
    """Return the log-probability of each token after the first, computed by transformers."""
    ids = torch.tensor(TOKENS)
    logprobs = module(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[:, 1:, None])[..., 0]
