"""The sections `model` and `engine`: what generates samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax_events.config.base import DERIVED, OrDerived, Positive, Seconds, Section
from relax_events.config.external_values import Addresses, Code, FilePath, Names, Text
from relax_events.config.media import MediaConfig


class TinyModelConfig(Section):
    """A small model of a real architecture, made on this machine with random weights and a
    tokenizer of its own.
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
    """Architecture; `qwen3_vl`, `qwen3_vl_moe`, `qwen3_5` and `qwen3_5_moe` read pictures and
    clips, `qwen3_omni_moe_thinker` sounds as well."""
    hidden_size: Annotated[int, Field(ge=32, multiple_of=32)] = 64
    """Width of the model, a multiple of 32."""
    num_layers: Positive = 2
    """Decoder layers."""
    vocab_size: Annotated[int, Field(ge=256)] = 256
    """Byte symbols and learnt merges; 256 leaves one token per byte."""
    corpus_rows: Positive = 1000
    """Prompts and answers of the data that the tokenizer is trained on."""


class ModelConfig(Section):
    """The policy's initial weights and tokenizer."""

    path: FilePath
    """A folder in Hugging Face layout: config, safetensors, tokenizer."""
    dtype: OrDerived[Literal["float32", "bfloat16"]] = DERIVED
    """Type of the weights in engine and trainer. Derived: that of the checkpoint, by its
    `config.json`; `bfloat16` for one in float16."""
    device: Text = "auto"
    """`auto` takes a GPU where there is one, else the CPU."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of the model."""
    media: MediaConfig = MediaConfig()
    """Which media are taken, and how the model is shown them."""
    routing_replay: Literal["none", "rollout"] = "none"
    """Which experts trainer and actor-forward send a token through, where the model is a mixture of
    experts: those that the router of their own weights chooses, or those that the rollout engine
    sent it through, weighed by that router (rollout routing replay, R3)."""
    frozen: tuple[Literal["language", "vision", "audio", "projection"], ...] = ()
    """Parts that training leaves as they are: the language model, the vision or audio tower, or
    what leads from them to the language model."""
    tiny: TinyModelConfig | None = None
    """How `relax models prepare` makes the model where `path` does not exist; without it the folder
    must be there."""

    @property
    def replays_routing(self) -> bool:
        """Whether the engine records which experts each token goes through, and the trainer sends
        it through the same.
        """
        return self.routing_replay == "rollout"

    @property
    def routing_freely(self) -> ModelConfig:
        """The same, each token sent where the router of the weights at hand chooses: for roles that
        say nothing of the policy in training.
        """
        return self.model_copy(update={"routing_replay": "none"})


class SamplingConfig(Section):
    """How the next token is drawn."""

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


class SGLangConfig(Section):
    """The servers of engine `sglang`."""

    urls: Addresses = ()
    """Of servers that run already and serve nobody else; without any, each worker starts its own,
    which end with it."""
    num_servers: Positive = 1
    """Servers that each worker starts."""
    python: Annotated[str, Names.PROGRAM] = ""
    """Interpreter with SGLang in it, by which servers are started; empty is this one."""
    arguments: Annotated[tuple[str, ...], Names.ARGUMENTS] = ()
    """Further arguments of every server, as `["--tp-size", "2"]`."""
    server_arguments: Annotated[tuple[tuple[str, ...], ...], Names.ARGUMENTS] = ()
    """Further arguments of each server by itself, as `[["--base-gpu-id", "0"], ["--base-gpu-id",
    "2"]]`; as many as `num_servers`, or none."""
    start_seconds: Seconds = 600.0
    """How long a server may take until it is ready, and to load or hash all weights."""
    stall_seconds: Seconds = 120.0
    """A server that gives no token for so long, though it was asked for some, is lost."""
    stream_interval_tokens: Positive = 16
    """Tokens that come at a time: what is lost of each sample when its server dies."""
    weights_directory: FilePath | None = None
    """Where policy versions are written for a server to load: a folder that both see. By default in
    memory (`/dev/shm`) where three models fit for each server, else among temporary files."""
    on_unverified_weights: Literal["refuse", "accept"] = "refuse"
    """What to do with a server whose checksums can't be computed here (on GPUs, of several ranks,
    of other architectures): not start, or take its word that it has loaded what it was told to."""

    @model_validator(mode="after")
    def _servers_are_as_many(self) -> SGLangConfig:
        if self.server_arguments and len(self.server_arguments) != self.num_servers:
            need = (
                f"num_servers = {self.num_servers} needs as many server_arguments, got "
                f"{len(self.server_arguments)}"
            )
            raise ValueError(
                f"each server has arguments of its own: {need}; set engine.sglang.num_servers"
            )
        if repeated := next((url for url in self.urls if self.urls.count(url) > 1), None):
            raise ValueError(
                f"each server is to be named once, and engine.sglang.urls has {repeated} "
                "twice; leave one out"
            )
        return self


class EngineConfig(Section):
    """The inference engine of a rollout worker."""

    name: Code = "transformers"
    """Entry point in the group `relax_events.engines`, or `path/to/file.py:Class`."""
    max_prompt_groups: Annotated[int, Field(ge=0)] = 0
    """Prompt groups that one worker holds at a time; 0 stands for as many as fill the engine,
    `max_running_samples` by `run.samples_per_prompt`. Each is leased by a member of a share
    group of its own, and the brokers bound the members of all workers together
    (`group.share.max.size`)."""
    max_running_samples: Positive = 256
    """Samples decoded side by side."""
    max_context_tokens: OrDerived[Positive] = DERIVED
    """Prompt and completion together; longer prompts fail with a reason. Derived: the model's
    `max_position_embeddings`, at most 8,192, or the longest prompt and
    `engine.sampling.max_new_tokens` where that is given; 512 for a model that `[model.tiny]`
    makes."""
    threads: OrDerived[Annotated[int, Field(ge=0)]] = DERIVED
    """CPU threads of the engine; 0 takes all processors that the process may use. Derived as
    `trainer.threads`."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training rollouts."""
    sglang: SGLangConfig = SGLangConfig()
    """Of engine `sglang` alone."""

    @property
    def start_limit_seconds(self) -> float:
        """How long a server of the engine may take to start and to load a version; 0 where the
        engine sets no limit of its own.
        """
        return 2 * self.sglang.start_seconds if self.name == "sglang" else 0.0

    def num_lanes(self, *, samples_per_prompt: int) -> int:
        """Return how many prompt groups one worker holds at a time."""
        return self.max_prompt_groups or max(-(-self.max_running_samples // samples_per_prompt), 1)
