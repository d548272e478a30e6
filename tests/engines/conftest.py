"""A real SGLang server, one for the session, that the tests share; and engines of all kinds over
the same tiny model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from engine_requests import MakeEngine, make_engine, tiny_model
from routed_engines import make_router, make_sites
from sglang_servers import BOUNDS, engines_at, started_server


@pytest.fixture(scope="session")
def server_url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Yield the address of the session's server, which was started on the tiny model."""
    if given := request.config.getoption("--sglang-url"):
        yield given
        return
    sglang_python = request.getfixturevalue("sglang_python")
    with started_server(
        tiny_model(), tmp_path_factory.mktemp("server"), python=sglang_python
    ) as url:
        yield url


@pytest.fixture
def make_sglang(server_url: str) -> Iterator[MakeEngine]:
    """Return a maker of engines on the session's server: one at a time."""
    with engines_at(server_url) as make:
        yield make


@pytest.fixture
def make_routed() -> Iterator[MakeEngine]:
    """Return a maker of routers over two engines."""
    with ExitStack() as stack:
        yield lambda path=None, **settings: stack.enter_context(
            closing(make_router(make_sites(2, path=path, **BOUNDS | settings)))
        )


@pytest.fixture(params=["transformers", "sglang", "routed"])
def make(request: pytest.FixtureRequest) -> MakeEngine:
    """Return a maker of engines, of each kind in turn."""
    if request.param == "transformers":
        return lambda path=None, **settings: make_engine(path, **BOUNDS | settings)
    maker: MakeEngine = request.getfixturevalue(f"make_{request.param}")
    return maker
