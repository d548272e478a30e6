"""`relax alerts`: forwards Prometheus alerts."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

app = App(
    name="alerts",
    help=(
        "Hand alerts on to people.\n\nExample: relax alerts forward --urls notification_urls "
        "--port 9095"
    ),
)


@app.command
def forward(*, urls: Path | None = None, host: str = "127.0.0.1", port: int = 9095) -> None:
    """Take what Alertmanager posts to its webhook and send it on by Apprise, until SIGTERM or
    SIGINT.

    Example: relax alerts forward --urls notification_urls --port 9095

    Args:
        urls: File with the Apprise URLs to send to, one a line; RELAX_NOTIFICATION_URLS in the
            environment stands in for it.
        host: Where to listen.
        port: Likewise.
    """
    import signal
    import threading

    from relax_events.config import TelemetryConfig
    from relax_events.errors import ConfigError
    from relax_events.notifications.alert_receiver import AlertReceiver
    from relax_events.notifications.services import VARIABLE, open_targets

    targets = open_targets(TelemetryConfig(notification_urls_file=urls))
    if not targets:
        raise ConfigError(
            "no Apprise URL is given, so no one would be notified; name a file with --urls, or "
            f"set {VARIABLE}"
        )
    with AlertReceiver((host, port), targets) as receiver:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: threading.Thread(target=receiver.shutdown).start())
        receiver.serve_forever()
