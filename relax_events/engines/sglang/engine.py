"""The engine `sglang`: generates samples with SGLang servers that this worker starts, or that
already run.

The router sends each prompt group to one server (`engines.replicas`). A lost server is restarted,
or waited for if it is external, and gets the newest version; its samples continue on another one,
or wait.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from relax_events.config import EngineConfig, ModelConfig, SGLangConfig
from relax_events.config.engine import BASE_GPU, read_argument
from relax_events.engines.replicas.router import Router
from relax_events.engines.sglang.memory import frees_memory
from relax_events.engines.sglang.server import SGLangServer


class SGLangEngine(Router):
    """Implements `engines.protocol.Engine` over one or several SGLang servers; see the module's
    docstring.
    """

    def __init__(
        self, model_path: Path, *, config: EngineConfig, model: ModelConfig, policy_version: int = 0
    ) -> None:
        """Start `engine.sglang.num_servers` servers on the model's folder, or connect to those at
        `engine.sglang.urls`.

        Args:
            model_path: A folder in Hugging Face layout.
            config: Limits on samples and context, and the servers' section.
            model: Dtype and device.
            policy_version: Version of the weights in the folder.
        Raises:
            ConfigError: The model can't be served, or a server is not supported.
            EnvironmentProblem: No server starts; the text ends with the log of the first.
        """

        def factory(section: SGLangConfig) -> Callable[[], SGLangServer]:
            server_config = config.model_copy(update={"sglang": section})
            return lambda: SGLangServer(
                model_path, config=server_config, model=model, policy_version=policy_version
            )

        factories = {name: factory(section) for name, section in servers(config.sglang).items()}
        super().__init__(factories, policy_version=policy_version)
        self.frees_memory = frees_memory(config.sglang)


def servers(config: SGLangConfig) -> dict[str, SGLangConfig]:
    """Return the config section of each server by its name."""
    if config.urls:
        return {
            url: config.model_copy(update={"urls": (url,), "num_servers": len(config.urls)})
            for url in config.urls
        }
    sections = {}
    for index, (arguments, gpus) in enumerate(
        zip(config.list_arguments(), config.place_servers(), strict=True)
    ):
        is_placed = read_argument(arguments, BASE_GPU) is not None
        base = (BASE_GPU, str(gpus.first)) if gpus.first and not is_placed else ()
        update = {"arguments": (*arguments, *base)}
        sections[f"server-{index}"] = config.model_copy(update=update)
    return sections
