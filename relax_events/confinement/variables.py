"""Environment variables of child processes: those that are listed here, which hold no secret."""

from __future__ import annotations

import os
from collections.abc import Iterable

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
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
        *(
            "HF_HOME",
            "HF_HUB_CACHE",
            "HF_HUB_OFFLINE",
            "HF_DATASETS_OFFLINE",
            "TRANSFORMERS_OFFLINE",
            "TOKENIZERS_PARALLELISM",
        ),
        *("CUDA_VISIBLE_DEVICES", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"),
    }
)
"""Paths of programs, packages and caches, and settings of computation: none is a secret."""
ALLOWED_PREFIXES = ("LC_", "OMP_", "MKL_", "OPENBLAS_")


def build_child_environment(
    also: Iterable[str] = (), *, prefixes: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the variables for a child process: the allowed ones, and those that the caller names.

    `OMP_NUM_THREADS` is 1 unless it is set.

    Args:
        also: Names of further variables.
        prefixes: Prefixes of the names of further variables.
    """
    named, begin = ALLOWED.union(also), (*ALLOWED_PREFIXES, *prefixes)
    return {
        "OMP_NUM_THREADS": "1",
        **{
            name: value
            for name, value in os.environ.items()
            if name in named or name.startswith(begin)
        },
    }
