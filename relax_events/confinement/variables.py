"""Environment variables of child processes: the variables listed here, which hold no secret."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
LOGIN = re.compile(r"^((?:[\w+.-]+:)?//)?.*@")
"""Of an address, with the scheme before it."""
ALLOWED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM"),
        *(
            "PYTHONPATH",
            "PYTHONHOME",
            "PYTHONHASHSEED",
            "PYTHONUNBUFFERED",
            "PYTHONDONTWRITEBYTECODE",
            "PYTHONPYCACHEPREFIX",
            "PYTHONWARNINGS",
        ),
        *(
            "VIRTUAL_ENV",
            "LD_LIBRARY_PATH",
            "XDG_CACHE_HOME",
            "SSL_CERT_FILE",
            "SSL_CERT_DIR",
            "REQUESTS_CA_BUNDLE",
        ),
        *PROXIES,
        *("NO_PROXY", "no_proxy"),
        *(
            "HF_HOME",
            "HF_HUB_CACHE",
            "HF_HUB_OFFLINE",
            "HF_DATASETS_OFFLINE",
            "TRANSFORMERS_OFFLINE",
            "TOKENIZERS_PARALLELISM",
        ),
        *("CUDA_VISIBLE_DEVICES", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"),
        *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    }
)
"""Paths of programs, packages and caches, and settings of computation: none is a secret."""
ALLOWED_PREFIXES = ("LC_", "OMP_", "MKL_", "OPENBLAS_")


def build_child_environment(
    also: Iterable[str] = (), *, prefixes: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the variables for a child process: the allowed ones, and the ones the caller names.

    `OMP_NUM_THREADS` is 1 unless it is set. The address of a proxy has no login, unless the caller
    names its variable: the proxy then says that it wants one.

    Args:
        also: Names of further variables.
        prefixes: Prefixes of the names of further variables.
    """
    names = frozenset(also)
    named, begin = ALLOWED | names, (*ALLOWED_PREFIXES, *prefixes)
    without_login = set(PROXIES) - names
    return {
        "OMP_NUM_THREADS": "1",
        **{
            name: LOGIN.sub(r"\1", value) if name in without_login else value
            for name, value in os.environ.items()
            if name in named or name.startswith(begin)
        },
    }
