"""The sections `model` and `engine`: what generates samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from relax_events.config.base import DERIVED, OrDerived, Positive, Seconds, Section, Threads
from relax_events.config.external_values import Addresses, Code, FilePath, Names, Text
from relax_events.config.hub_names import ModelFolder
from relax_events.config.lora import LoRAConfig
from relax_events.config.media import MediaConfig
from relax_events.config.resume_rules import SPEED, accepted, free, never

DATASET_ENGINE = "dataset"
"""The engine that hands out what a row brings."""


class TinyModelConfig(Section):
    """A small model of a real architecture, created on this machine with random weights and its own
    tokenizer.
    """

    family: Literal[
        "qwen3",
        "qwen3_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_omni_moe_thinker",
    ] = "qwen3"
    """Architecture; `qwen3_vl`, `qwen3_vl_moe`, `qwen3_5` and `qwen3_5_moe` accept images and
    videos, `qwen3_omni_moe_thinker` audio as well."""
    hidden_size: Annotated[int, Field(ge=32, multiple_of=32)] = 64
    """Width of the model, a multiple of 32."""
    num_layers: Positive = 2
    """Decoder layers."""
    vocab_size: Annotated[int, Field(ge=256)] = 256
    """Byte symbols and learned merges; 256 leaves one token per byte."""
    corpus_rows: Positive = 1000
    """Rows of prompts and answers that the tokenizer is trained on."""


class ModelConfig(Section):
    """The policy's initial weights and tokenizer."""

    path: Annotated[
        ModelFolder,
        accepted(
            "weights are those of the run; tokenizer and architecture are read there, "
            "and must be the same"
        ),
    ]
    """A folder in Hugging Face layout: config, safetensors, tokenizer. Or a name on the Hugging
    Face hub, `hf:org/name@revision`, of which the run keeps the commit."""
    dtype: OrDerived[Literal["float32", "bfloat16"]] = DERIVED
    """Type of the weights in engine and trainer. Derived: that of the checkpoint, by its
    `config.json`; `bfloat16` for one in float16."""
    device: Annotated[Text, free(SPEED)] = "auto"
    """`auto` takes a GPU where there is one, else the CPU."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of the model."""
    media: Annotated[MediaConfig, accepted("media are shown to the model in another way")] = (
        MediaConfig()
    )
    """Which media are taken, and how the model is shown them."""
    routing_replay: Annotated[
        Literal["none", "rollout"],
        never("samples under way carry the experts of their tokens, or don't"),
    ] = "none"
    """Replay the engine's expert routing in the trainer (R3), for mixture-of-experts models.
    `none`: trainer and actor-forward route by their own weights. Otherwise they use the experts
    that the rollout engine chose, weighted by their own router."""
    frozen: Annotated[
        tuple[Literal["language", "vision", "audio", "projection"], ...],
        never("the optimizer's state is that of other parameters"),
    ] = ()
    """Parts without training: the language model, the vision or audio tower, or the projector from
    a tower to the language model."""
    lora: Annotated[
        LoRAConfig | None, never("the optimizer's state is that of other parameters")
    ] = None
    """Train adapters instead of the weights in `path`; without it all weights are trained."""
    tiny: Annotated[TinyModelConfig | None, never("the model has been made")] = None
    """How `relax models prepare` makes the model where `path` does not exist; without it the folder
    must be there."""

    @property
    def replays_routing(self) -> bool:
        """Whether the engine records which experts each token goes through, and the trainer sends
        it through the same.
        """
        return self.routing_replay == "rollout"

    @model_validator(mode="after")
    def _adapters_are_all_that_is_trained(self) -> ModelConfig:
        if self.lora is not None and self.frozen:
            raise ValueError(
                f"frozen = {list(self.frozen)} has no use next to [model.lora], which freezes all "
                "weights and trains adapters of the language model; leave it out"
            )
        return self

    @property
    def without_adapters(self) -> ModelConfig:
        """The model in `path` alone."""
        return self.model_copy(update={"lora": None})

    @property
    def routing_freely(self) -> ModelConfig:
        """The same, each token sent where the router of the weights at hand chooses: for roles that
        say nothing of the policy in training.
        """
        return self.model_copy(update={"routing_replay": "none"})


class SamplingConfig(Section):
    """Sampling of the next token."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits; log-probabilities are those of the tempered distribution."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keeps the smallest set of tokens with at least this probability; 1 keeps all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keeps the k most probable tokens; 0 keeps all."""
    max_new_tokens: OrDerived[Positive] = DERIVED
    """Ends a sample with finish reason `length`. Derived: what `engine.max_context_tokens` leaves
    after the longest prompt (`data.max_prompt_tokens`, or a quarter of the context); 32 for a model
    that `[model.tiny]` makes."""


PARALLEL_SIZES = {
    "tensor": ("--tp", "--tp-size", "--tensor-parallel-size"),
    "pipeline": ("--pp", "--pp-size", "--pipeline-parallel-size"),
    "data": ("--dp", "--dp-size", "--data-parallel-size"),
}
"""Arguments of SGLang by which a server computes on several GPUs."""
ATTENTION_ALONE = "--enable-dp-attention"
"""With it, data parallelism is within the tensor-parallel ranks."""
BASE_GPU = "--base-gpu-id"


class ServerDevices(NamedTuple):
    """The GPUs of a server: the first one among its worker's, their number, and how many of them
    hold a copy of the model together.
    """

    first: int
    num_gpus: int
    per_copy: int


class SGLangConfig(Section):
    """Servers of engine `sglang`."""

    urls: Addresses = ()
    """URLs of running servers that no one else uses; when empty, each worker starts its own, which
    end with it."""
    token_file: FilePath | None = None
    """File with the token that running servers require, their `--api-key`. None sends none."""
    ca_file: FilePath | None = None
    """Authority of running servers whose URLs are `https`, in PEM; None takes those of the
    machine."""
    num_servers: Positive = 1
    """Servers that each worker starts."""
    python: Annotated[str, Names.PROGRAM] = ""
    """Python interpreter with SGLang that starts the servers; empty is this one."""
    arguments: Annotated[tuple[str, ...], Names.ARGUMENTS] = ()
    """Additional arguments of every server, as `["--tp-size", "2"]`."""
    server_arguments: Annotated[tuple[tuple[str, ...], ...], Names.ARGUMENTS] = ()
    """Additional arguments of each server, as `[["--tp-size", "2"], ["--tp-size", "1"]]`; as many
    as `num_servers`, or none. A server begins at the GPU behind those of the servers before it,
    unless `--base-gpu-id` names another one."""
    start_seconds: Seconds = 600.0
    """Deadline for a server to become ready, and to load or hash all weights."""
    stall_seconds: Seconds = 120.0
    """A server that returns no token of a pending request for this long counts as lost."""
    stream_interval_tokens: Positive = 16
    """Tokens of a stream chunk: what each sample loses when its server dies."""
    weight_updates: Literal["disk", "distributed"] = "disk"
    """How a policy version gets into a server. `disk`: from a folder that worker and server see.
    `distributed`: broadcast over gloo to the server's ranks, so a server on another machine needs
    no shared folder; it must reach this machine, and have one pipeline stage and one data-parallel
    part."""
    weights_directory: FilePath | None = None
    """Folder, visible to both, where policy versions are written for a server to load. Default: in
    memory (`/dev/shm`) where three models fit for each server, else among temporary files."""
    on_unverified_weights: Literal["refuse", "accept"] = "refuse"
    """What to do when a server's checksums can't be computed here (of pipeline stages, of
    quantised weights, of other architectures): refuse to start, or accept the server's word that it
    has loaded the weights."""

    @model_validator(mode="after")
    def _servers_are_as_many(self) -> SGLangConfig:
        self.place_servers()
        if self.server_arguments and len(self.server_arguments) != self.num_servers:
            raise ValueError(
                f"each server has arguments of its own: num_servers = {self.num_servers} needs as "
                f"many server_arguments, got {len(self.server_arguments)}; set "
                "engine.sglang.num_servers"
            )
        if repeated := next((url for url in self.urls if self.urls.count(url) > 1), None):
            raise ValueError(
                f"each server is to be named once, and engine.sglang.urls has {repeated} "
                "twice; leave one out"
            )
        return self

    def list_arguments(self) -> list[tuple[str, ...]]:
        """Return the additional arguments of each server that a worker starts."""
        by_server = self.server_arguments or ((),) * self.num_servers
        return [(*self.arguments, *more) for more in by_server]

    def place_servers(self) -> list[ServerDevices]:
        """Return the GPUs of each server that a worker starts. One without `--base-gpu-id` begins
        behind those before it.

        Raises:
            ValueError: A size is not a whole number.
        """
        placed: list[ServerDevices] = []
        for arguments in self.list_arguments():
            sizes = {
                axis: _read_number(arguments, *names, default=1)
                for axis, names in PARALLEL_SIZES.items()
            }
            per_copy = sizes["tensor"] * sizes["pipeline"]
            num_gpus = per_copy * (1 if ATTENTION_ALONE in arguments else sizes["data"])
            end = max((one.first + one.num_gpus for one in placed), default=0)
            first = _read_number(arguments, BASE_GPU, default=end)
            placed.append(ServerDevices(first, num_gpus, per_copy))
        return placed


def read_argument(arguments: Sequence[str], *names: str) -> str | None:
    """Return the value of an argument of SGLang by any of its names, `--name 2` or `--name=2`: the
    last one counts. None where it is not given.
    """
    last = None
    for word, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, has_value, value = word.partition("=")
        if name in names:
            last = value if has_value else following
    return last


def _read_number(arguments: Sequence[str], *names: str, default: int) -> int:
    text = read_argument(arguments, *names)
    if text is not None and not text.isdecimal():
        raise ValueError(
            f"engine.sglang.arguments: {' or '.join(names)} takes a whole number, got {text!r}"
        )
    return default if text is None else int(text)


class EngineConfig(Section):
    """The inference engine of a rollout worker."""

    name: Code = "transformers"
    """Entry point in the group `relax_events.engines`, or `path/to/file.py:Class`."""
    max_prompt_groups: Annotated[int, Field(ge=0), free(SPEED)] = 0
    """Prompt groups that one worker holds at a time; 0 is as many as fill the engine,
    `max_running_samples` divided by `run.samples_per_prompt`, and more while samples of running
    ones have ended. They take members of the share group, and brokers limit those of all workers
    (`group.share.max.size`)."""
    max_running_samples: Annotated[Positive, free(SPEED)] = 256
    """Samples decoded concurrently."""
    max_context_tokens: OrDerived[Positive] = DERIVED
    """Maximum tokens of prompt and completion together; longer prompts fail with a reason. Derived:
    the model's `max_position_embeddings`, at most 8,192, or the longest prompt and
    `engine.sampling.max_new_tokens` where that is given; 512 for a model made by `[model.tiny]`."""
    threads: Annotated[Threads, free(SPEED)] = DERIVED
    """CPU threads of the engine; 0 takes all processors that the process may use. Derived as
    `trainer.threads`."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training rollouts."""
    sglang: Annotated[SGLangConfig, free("how the servers are run")] = SGLangConfig()
    """Of engine `sglang` alone."""

    @property
    def start_limit_seconds(self) -> float:
        """How long a server of the engine may take to start and to load a version; 0 where the
        engine sets no limit of its own.
        """
        return 2 * self.sglang.start_seconds if self.name == "sglang" else 0.0

    @property
    def starts_servers(self) -> bool:
        """Whether a worker starts SGLang servers of its own."""
        return self.name == "sglang" and not self.sglang.urls

    @property
    def num_devices(self) -> int:
        """GPUs on which the engine of one worker computes."""
        return max(one.first + one.num_gpus for one in self._placed)

    @property
    def devices_per_copy(self) -> int:
        """GPUs that hold a copy of the model together; the fewest of any server."""
        return min(one.per_copy for one in self._placed)

    @property
    def _placed(self) -> list[ServerDevices]:
        return self.sglang.place_servers() if self.starts_servers else [ServerDevices(0, 1, 1)]

    def num_lanes(self, *, samples_per_prompt: int) -> int:
        """Return how many prompt groups one worker holds at a time."""
        return self.max_prompt_groups or max(-(-self.max_running_samples // samples_per_prompt), 1)
