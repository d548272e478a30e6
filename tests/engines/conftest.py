"""A real SGLang server, one for the session, that the tests take turns at; and engines of all kinds over the same tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from engine_requests import MakeEngine, make_engine, tiny_model
from routed_engines import make_router, make_sites
from served_model import served
from sglang_servers import await_ready

from relax_events.config import EngineConfig, ModelConfig, SGLangConfig
from relax_events.engines.protocol import Engine
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.sglang.engine import SGLangEngine
from relax_events.engines.sglang.process import ServerProcess

BOUNDS: dict[str, Any] = {"max_running_samples": 16, "max_context_tokens": 512}


@pytest.fixture(scope="session")
def server_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give the address of the session's server, which was started on the tiny model."""
    if given := request.config.getoption("--sglang-url"):
        yield given
        return
    sglang_python = request.getfixturevalue("sglang_python")
    path = tiny_model()
    config = EngineConfig(**BOUNDS, sglang=SGLangConfig(python=sglang_python))
    process = ServerProcess(ModelFolder.read(path), tmp_path_factory.mktemp("server"), config=config, settings=ModelConfig(path=path))
    process.start(path, name="session")
    try:
        await_ready(process)
        yield process.url
    finally:
        process.kill()


@pytest.fixture(scope="session")
def our_url() -> Iterator[str]:
    """Give the address of our own server of the tiny model, which speaks as SGLang does."""
    with served(is_incremental=True) as url:
        yield url


@pytest.fixture
def make_sglang(server_url: str) -> Iterator[MakeEngine]:
    """Return a maker of engines on the session's server: one at a time."""
    yield from makers_of(server_url)


@pytest.fixture
def make_served(our_url: str) -> Iterator[MakeEngine]:
    """Return a maker of engines on our own server: one at a time."""
    yield from makers_of(our_url)


def makers_of(url: str) -> Iterator[MakeEngine]:
    """Give a maker of engines that take a server over, and close them."""
    engines: list[SGLangEngine] = []

    def make(path: Path | None = None, **settings: Any) -> Engine:
        path = path or tiny_model()
        config = EngineConfig(**BOUNDS | settings, sglang=SGLangConfig(urls=(url,)))
        engines.append(SGLangEngine(path, config=config, model=ModelConfig(path=path)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.abort()
        engine.close()


@pytest.fixture
def make_routed() -> Iterator[MakeEngine]:
    """Return a maker of routers over two engines."""
    with ExitStack() as stack:
        yield lambda path=None, **settings: stack.enter_context(closing(make_router(make_sites(2, path=path, **BOUNDS | settings))))


@pytest.fixture(params=["transformers", "sglang", "served", "routed"])
def make(request: pytest.FixtureRequest) -> MakeEngine:
    """Return a maker of engines, of each kind in turn."""
    if request.param == "transformers":
        return lambda path=None, **settings: make_engine(path, **BOUNDS | settings)
    maker: MakeEngine = request.getfixturevalue(f"make_{request.param}")
    return maker
