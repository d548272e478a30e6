"""`relax dashboard`: the live page of runs."""

from __future__ import annotations

from relax_events.cli.parameters import DEFAULT_BROKER, BrokerOptions

PORT = 8321


def dashboard(
    run: str = "",
    *,
    port: int = PORT,
    link: bool = False,
    broker: BrokerOptions = DEFAULT_BROKER,
) -> None:
    """Serve a page that shows runs live, or runs that are over, until Ctrl-C. Runs are not touched.

    Example: relax dashboard quickstart

    The page is served on the loopback address; from another machine forward the port, for example
    with ssh -L 8321:127.0.0.1:8321. It prints a link that opens the page once, in one browser,
    which is remembered. What changes a run needs the token of the run's API.

    Args:
        run: Id of the run to open the page with, or its run file; by default the newest run.
        port: Port to listen on; 0 uses a free one.
        link: Print another link to the page that this account serves on the port, and exit.
    """
    from relax_events.cli.run_reader import reader_may_leave
    from relax_events.packages.dashboard.access import PageAccess
    from relax_events.packages.dashboard.registry import RunRegistry
    from relax_events.packages.dashboard.server import (
        HOST,
        build_server,
        build_url,
        give_way,
        open_port,
    )

    first, cluster = broker.find(run)
    run_id = first.run.id if first else run
    access = PageAccess(cluster.directory)
    if link:
        print(access.create_link(f"http://{HOST}:{port}", run_id=run_id))
        return
    access.delete_old()
    with cluster.running(by="relax dashboard"), open_port(port) as listener:
        registry = RunRegistry(cluster, first=first)
        if run_id:
            registry.open(run_id)
        server = build_server(registry, access)
        print(access.create_link(build_url(listener), run_id=run_id), flush=True)
        give_way()  # but not the broker that was started
        try:
            with reader_may_leave():
                server.run(sockets=[listener])
        finally:
            registry.close()
