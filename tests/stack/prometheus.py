"""Query the stack's Prometheus."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from tests.stack.container_engine import StackError

PROMETHEUS = f"http://127.0.0.1:{os.environ.get('PROMETHEUS_PORT', '9090')}"
RESPONSE_SECONDS = 30.0


def query_prometheus(what: str, **parameters: object) -> Any:
    """Return the data of a response of Prometheus' HTTP API.

    Args:
        what: The path below `/api/v1/`.
        parameters: Parameters of the query. Raises: StackError: Prometheus did not respond, or
            rejected the query.
    """
    url = f"{PROMETHEUS}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=RESPONSE_SECONDS) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise StackError(f"{url}: {error.read().decode(errors='replace')}") from None
    except OSError as error:
        raise StackError(
            f"Prometheus does not answer at {PROMETHEUS}: {error}; set PROMETHEUS_PORT"
        ) from None
