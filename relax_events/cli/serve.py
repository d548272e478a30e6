"""`relax serve`: a model behind SGLang's HTTP API, without SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from socket import socket

    from relax_events.http.server import App

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_CONNECTIONS = 4096
"""Every sample of an engine's that is under way has one."""
DRAIN_SECONDS = 30
"""For requests in flight when the server stops."""


def serve(
    model: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    served_model_name: str = "",
    max_context_tokens: int = 4096,
    max_running_samples: int = 64,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: str = "auto",
    threads: int = 1,
    incremental_streaming_output: bool = False,
    enable_return_routed_experts: bool = False,
    token_file: Path | None = None,
    weights_root: Path | None = None,
) -> None:
    """Serve a model by engine `transformers` behind SGLang's HTTP API and a part of OpenAI's, until
    Ctrl-C.

    Example: relax serve .relax/models/quickstart --port 30000

    Args:
        model: A folder in Hugging Face layout, as `relax models prepare` makes it.
        host: Address to listen on; other machines get in only with a token.
        port: 0 takes a free one.
        served_model_name: What OpenAI's clients call it; by default the folder's name.
        max_context_tokens: Prompt and completion together.
        max_running_samples: Decoded side by side; others wait.
        dtype: Of the weights.
        device: Where they go; `auto` takes a GPU where there is one.
        threads: CPU threads; 0 takes all processors that the process may use.
        incremental_streaming_output: Let streamed events have what is new, as engine `sglang` needs
            it, not all so far.
        enable_return_routed_experts: Tell who asks which experts each token went through, as
            `model.routing_replay` needs it.
        token_file: File with the token that every request must carry.
        weights_root: Folder that weights may be loaded from. Without it any folder will do for
            those who bring the token, and none where there is no token.
    """
    from relax_events.errors import ConfigError, EnvironmentProblem
    from relax_events.http.server import build_url, find_missing_package, open_listener
    from relax_events.kafka.security.folder import read_secret
    from relax_events.model_folder import has_experts

    if missing := find_missing_package():
        raise EnvironmentProblem(
            f"relax serve needs {missing}, which is not installed; install relax-events[api]"
        )
    token = read_secret(token_file, key="--token-file") if token_file else ""
    if not token and host not in LOOPBACK:
        raise ConfigError(
            f"--host {host} lets other machines load weights from any folder here; give a "
            f"--token-file, or listen on {LOOPBACK[0]}"
        )
    if enable_return_routed_experts and not has_experts(model):
        raise ConfigError(
            f"the model in {model} is no mixture of experts; leave "
            "--enable-return-routed-experts out"
        )
    remedies = "give another --port, 0 for a free one", "give an address of this machine as --host"
    with open_listener(host, port, remedies=remedies, what="the model") as listener:
        listener.listen()
        from relax_events.config import EngineConfig, ModelConfig
        from relax_events.serving.app import (
            build_app,  # only now, as it takes seconds: what is wrong so far is said at once
        )

        app = build_app(
            ModelConfig(
                path=model,
                dtype=dtype,
                device=device,
                routing_replay="rollout" if enable_return_routed_experts else "none",
            ),
            EngineConfig(
                max_context_tokens=max_context_tokens,
                max_running_samples=max_running_samples,
                threads=threads,
            ),
            model_name=served_model_name or model.resolve().name,
            is_incremental=incremental_streaming_output,
            host=host,
            token=token,
            weights_root=weights_root,
        )
        print(build_url(listener), flush=True)
        _answer(app, listener)


def _answer(app: App, listener: socket) -> None:
    """Serve until the process receives a signal, then finish requests in flight."""
    import uvicorn

    from relax_events.http.server import build_server_config

    uvicorn.Server(
        build_server_config(
            app, max_connections=MAX_CONNECTIONS, timeout_graceful_shutdown=DRAIN_SECONDS
        )
    ).run(sockets=[listener])
