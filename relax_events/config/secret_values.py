"""Tells values that look like secrets: a run file's text is written to the log, to reports and to
every fork.

Found are tokens of known forms, `NAME=VALUE` and headers with the name of a secret, and values
under such a name. References such as `$TOKEN`, and paths of files, are none.
"""

from __future__ import annotations

import re

_NAMES = (
    r"(?:api|access|secret|private|auth|account|subscription)[_-]?key"
    r"|(?:(?:api|access|auth|bearer|refresh|session|hf|github)[_-]?)?token"
    r"|pass(?:word|wd|phrase)|(?:client[_-]?)?secret|credentials?|authorization|cookie"
)
_VALUE = r"[\"']?(?![\"'$<{(\[\\%/~.])[^\s\"'&,;]"
_NAME = re.compile(rf"(?:--?(?:\w+-)*|x[_-])?(?:{_NAMES})", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"(?<![\w-])(?:--?(?:\w+-)*|x-)?(?i:{_NAMES}|key)={_VALUE}{{4,}}"
    rf"|(?<!\w)[A-Z][A-Z0-9_]*(?:TOKEN|KEY|PASSWORD|PASSWD|SECRET)={_VALUE}{{4,}}"
    rf"|(?<![\w-])(?i:authorization|(?:x-)?api-key|cookie)\s*:\s*(?!\w+\s+\$){_VALUE}{{4,}}"
)
_DIGIT = r"(?=\S*\d)"
_TOKEN = re.compile(
    rf"\b(?i:bearer|basic)\s+{_DIGIT}(?!\$)[\w.~+/-]{{8,}}"
    rf"|\bsk-{_DIGIT}[\w-]{{8,}}"
    r"|\b(?:gh[pousr]_|github_pat_|hf_|glpat-|xox[abeprs]-)[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)


def find_secret(value: str, *, name: str = "") -> str | None:
    """Return what secret a value seems to hold, `a token` or `a secret`; None for any other text.

    Args:
        value: Any text.
        name: Of the option, the header, or the argument before the value.
    """
    if _TOKEN.search(value):
        return "a token"
    is_named = _NAME.fullmatch(name) and re.match(_VALUE, value)
    return "a secret" if is_named or _ASSIGNED.search(value) else None
