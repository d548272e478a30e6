"""The environment variables of a child process that runs untrusted code or reads untrusted files.

It gets the variables that are named here, and no others.
"""

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
"""Where programs, packages and caches lie, and how to compute: none of it is a secret."""
ALLOWED_PREFIXES = ("LC_", "OMP_", "MKL_", "OPENBLAS_")


def build_child_environment(
    also: Iterable[str] = (), *, prefixes: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the variables for a child: those that are no secrets, and those that its user names.

    One thread is for what computes, unless the variables say otherwise.

    Args:
        also: Names of further variables.
        prefixes: Beginnings of the names of further variables.
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
