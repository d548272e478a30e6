"""Tests this machine's isolation with all known escapes, for `relax doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from relax_events.attacks.escapes import ATTEMPTS, ESCAPES
from relax_events.attacks.targets import create_targets
from relax_events.errors import CheckFailed
from relax_events.sandbox import Isolation, require_isolation
from relax_events.sandbox.runner import Limits
from relax_events.sandbox.sandbox import Sandbox

CHECK_SECONDS = 120.0


def check_isolation(*, allow_unprotected: bool = False) -> str:
    """Try every known escape; return a description of the isolation and the number of escapes.

    Raises:
        EnvironmentProblem: There is no sufficient isolation.
        CheckFailed: An escape succeeds; the text names it.
    """
    isolation = require_isolation(allow_unprotected=allow_unprotected)
    codes = {name: escape.code for name, escape in ESCAPES.items()}
    with create_targets() as targets:
        succeeded = [*try_escapes(isolation, codes, targets.outside), *targets.list_changes()]
    if succeeded:
        raise CheckFailed(
            f"a program isolated by {isolation.describe()} escapes: {', '.join(succeeded)}"
        )
    return (
        f"programs are isolated by {isolation.describe()}; {len(codes)} known escapes tried, "
        "none succeeds"
    )


def try_escapes(
    isolation: Isolation, codes: Mapping[str, str], outside: Mapping[str, Any]
) -> list[str]:
    """Try escapes in an isolation; return the names of the escapes that succeed.

    Args:
        isolation: The isolation.
        codes: The statements of each escape, by its name.
        outside: The targets, see `Targets.outside`.
    Raises:
        CheckFailed: The program ended before all were tried.
    """
    with Sandbox(ATTEMPTS, Limits(seconds=CHECK_SECONDS), isolation=isolation) as sandbox:
        verdict, printed = sandbox.run_with_input(
            f"{orjson.dumps(outside).decode()}\n{orjson.dumps(codes).decode()}\n"
        )
    *successes, last = printed.splitlines() or [""]
    if last != f"tried {len(codes)}":
        raise CheckFailed(
            f"the program that tests the isolation ({isolation.describe()}) ended before it had "
            f"tried all escapes: {verdict}; see `relax_events.attacks.escapes`"
        )
    return [line.removeprefix("ESCAPED ") for line in successes if line.startswith("ESCAPED ")]
