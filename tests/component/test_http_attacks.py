"""Bodies of callers without a key stay unread by each of our HTTP servers; `test_attacks` makes the
other attacks on them.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from relax_events.attacks.doors.http import SERVERS, Serve
from relax_events.attacks.http_requests import http_attacks
from relax_events.attacks.http_sender import send
from relax_events.confinement.entry_points import BoundedPoint

MAX_GROWTH_BYTES = 8 * 1024**2


def name_of(value: object) -> str | None:
    return value.name if isinstance(value, BoundedPoint) else None


@pytest.mark.parametrize(("point", "serve"), SERVERS.items(), ids=name_of)
def test_bodies_without_a_key_cost_no_memory(
    point: BoundedPoint, serve: Serve, tmp_path: Path
) -> None:
    """Twenty bodies of 64 MB, one after the other: the first ones warm up what is allocated once."""
    with serve(tmp_path) as (url, target):
        port = int(url.rpartition(":")[2])
        attacks = http_attacks(target)
        assert len({attack.name for attack in attacks}) == len(attacks)
        unread = [one for one in attacks if 401 in one.statuses and one.body]
        for attack in unread:
            send(attack, port=port)
        before = psutil.Process().memory_info().rss
        for _ in range(5):
            for attack in unread[:4]:
                assert send(attack, port=port).status == 401
        assert psutil.Process().memory_info().rss - before < MAX_GROWTH_BYTES
