"""Which GPUs a process may use."""

import pytest

from relax_events.session.gpus import Gpu, parse_gpus

pytestmark = pytest.mark.unit
OUTPUT = "0, GPU-aa, 81559\n1, GPU-bb, 40960\n2, GPU-cc, [N/A]\n"
FIRST, SECOND = 81559 * 2**20, 40960 * 2**20


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, (Gpu("0", FIRST), Gpu("1", SECOND))),
        ("1", (Gpu("1", SECOND),)),
        ("1, 0", (Gpu("1", SECOND), Gpu("0", FIRST))),
        ("GPU-aa", (Gpu("GPU-aa", FIRST),)),
        ("0,7,1", (Gpu("0", FIRST),)),
        ("", ()),
        ("-1", ()),
    ],
)
def test_gpus_are_those_that_are_visible_in_their_order(
    visible: str | None, found: tuple[Gpu, ...]
) -> None:
    assert parse_gpus(OUTPUT, visible=visible) == found
