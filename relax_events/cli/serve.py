"""`relax serve`: a model without a run behind the APIs of the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from socket import socket

    from relax_events.config import EngineConfig, LoRAConfig, ModelConfig
    from relax_events.http.guard import App
    from relax_events.http.tls import TlsFiles
    from relax_events.packages.gateway.served_model import ServedModel

TOKEN_VARIABLE, OWN_TOKEN_FILE = "SERVE_TOKEN", ".relax/serve-token"
TOKEN_BYTES = 32
MAX_CONNECTIONS = 4096
DRAIN_SECONDS = 30
"""For requests in flight when the server stops."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the engine keeps and runs the model."""

    max_context_tokens: int = 4096
    """Prompt and completion together."""
    max_running_samples: int = 64
    """Decoded side by side; others wait."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights."""
    device: str = "auto"
    """Where they go; `auto` takes a GPU where there is one."""
    threads: int = 1
    """CPU threads; 0 takes all processors that the process may use."""
    enable_return_routed_experts: bool = False
    """Return with token ids which experts each token went through."""

    def model_config(self, path: Path, *, lora: LoRAConfig | None = None) -> ModelConfig:
        """Return the section of the model in this folder."""
        from relax_events.config import ModelConfig

        return ModelConfig(
            path=path,
            lora=lora,
            dtype=self.dtype,
            device=self.device,
            routing_replay="rollout" if self.enable_return_routed_experts else "none",
        )

    def open_model(
        self, path: Path, name: str, *, adapters: Path, lora: LoRAConfig | None
    ) -> ServedModel:
        """Load a model, with the adapters of a folder where their settings are given."""
        from relax_events.packages.gateway.served_model import ServedModel

        return ServedModel(
            self.model_config(path, lora=lora),
            self.engine_config(),
            name=name,
            adapters=None if lora is None else adapters,
        )

    def engine_config(self) -> EngineConfig:
        """Return the section of the engine."""
        from relax_events.config import EngineConfig

        return EngineConfig(
            max_context_tokens=self.max_context_tokens,
            max_running_samples=self.max_running_samples,
            threads=self.threads,
        )


DEFAULT_ENGINE = EngineOptions()


def serve(
    model: Path,
    *,
    base: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 30000,
    served_model_name: str = "",
    engine: EngineOptions = DEFAULT_ENGINE,
    token_file: Path | None = None,
    certificate_file: Path | None = None,
    key_file: Path | None = None,
    accept_plain: bool = False,
) -> None:
    """Serve a model by engine `transformers` behind OpenAI's and Anthropic's chat APIs and a route
    for token ids, until Ctrl-C.

    Example: relax serve .relax/models/quickstart --port 30000

    Args:
        model: A folder in Hugging Face layout, as `relax models prepare` makes it, or a folder of
            LoRA adapters, as `relax models export` and peft make it.
        base: The base model's folder of adapters, where it is not the one that they name.
        host: Address to listen on.
        port: 0 takes a free one.
        served_model_name: What clients call it; by default the folder's name.
        token_file: File with the token that every request but /health must carry. Without it the
            variable SERVE_TOKEN has the token, else the file .relax/serve-token, which is created
            where it is missing.
        certificate_file: Certificate in PEM; the server then speaks HTTPS.
        key_file: Its private key in PEM.
        accept_plain: Speak plain HTTP also where other machines reach the address: where a proxy
            or a mesh encrypts.
    """
    from relax_events.http.server import build_url, open_listener
    from relax_events.http.tls import choose_tls

    _require_packages()
    tls = choose_tls(
        host,
        certificate=certificate_file,
        key=key_file,
        accepts_plain=accept_plain,
        names=("--certificate-file", "--key-file", "--accept-plain"),
    )
    token = _open_token(token_file)
    path, lora = _find_base(model, base)
    if engine.enable_return_routed_experts:
        _require_experts(path)
    remedies = "give another --port, 0 for a free one", "give an address of this machine as --host"
    with open_listener(host, port, remedies=remedies, what="the model") as listener:
        listener.listen()
        # imported only now, as it takes seconds: what is wrong so far is said at once
        from relax_events.packages.gateway.model_app import build_model_app

        name = served_model_name or model.resolve().name
        served = engine.open_model(path, name, adapters=model, lora=lora)
        app = build_model_app(served, engine.engine_config(), token=token, host=host)
        print(build_url(listener, tls=tls), flush=True)
        _answer(app, listener, tls)


def _find_base(model: Path, base: Path | None) -> tuple[Path, LoRAConfig | None]:
    """Return the folder of the whole model, and of a folder of adapters their settings.

    Raises:
        ConfigError: The base model is not on this machine, or a whole model has none.
    """
    from relax_events.errors import ConfigError

    if not (model / "adapter_config.json").is_file() or (model / "config.json").is_file():
        if base is not None:
            raise ConfigError(f"--base {base} is for folders of adapters, and {model} is none")
        return model, None
    from relax_events.models.adapter_folder import read_adapter_config

    adapters = read_adapter_config(model)
    path = base or Path(adapters.base)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"the adapters in {model} belong to the base model {adapters.base or '(unnamed)'}, and "
            f"{path} is no folder of a model; give its folder as --base"
        )
    return path, adapters.config


def _require_packages() -> None:
    """Refuse to serve without the packages of the web server."""
    from relax_events.errors import EnvironmentProblem
    from relax_events.http.server import find_missing_package

    if missing := find_missing_package():
        raise EnvironmentProblem(
            f"relax serve needs {missing}, which is not installed; install relax-events[api]"
        )


def _open_token(file: Path | None) -> str:
    """Return the token of the server; a new one is written to its file and printed.

    Raises:
        ConfigError: The file that is named is missing or empty.
    """
    import os
    import secrets
    import sys

    from relax_events.secret_handling import hide, read_secret, write_private

    if file is None and (token := os.environ.pop(TOKEN_VARIABLE, "")):
        hide(token)
        return token
    path = file or Path(OWN_TOKEN_FILE)
    if file is None and not path.exists():
        token = secrets.token_urlsafe(TOKEN_BYTES)
        write_private(path, token.encode())
        print(f"token: {token} (in {path.absolute()}, shown once)", file=sys.stderr, flush=True)
    token = read_secret(path, key="--token-file" if file else OWN_TOKEN_FILE)
    hide(token)
    return token


def _require_experts(model: Path) -> None:
    """Refuse to record the experts of a model that has none."""
    from relax_events.errors import ConfigError
    from relax_events.model_folder import has_experts

    if not has_experts(model):
        raise ConfigError(
            f"the model in {model} is no mixture of experts; leave "
            "--enable-return-routed-experts out"
        )


def _answer(app: App, listener: socket, tls: TlsFiles | None) -> None:
    """Serve until the process receives a signal, then finish requests in flight."""
    import uvicorn

    from relax_events.http.server import build_server_config

    uvicorn.Server(
        build_server_config(
            app,
            max_connections=MAX_CONNECTIONS,
            tls=tls,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
    ).run(sockets=[listener])
