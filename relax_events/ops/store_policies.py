"""The bucket policies of a run's object store, one for each role and person."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.objects.rights import STORE_RIGHTS, build_bucket_policy


def build_store_policies(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the S3 policy of each principal whose role the run has, and of its persons.

    Raises:
        ConfigError: The run's store is no S3 bucket.
    """
    bucket, prefix = _split(config.objects_uri)
    parent = config.parent.objects_uri if config.parent.run else ""
    parent_prefix = _split(parent)[1] if parent and _split(parent)[0] == bucket else None
    return {
        principal: build_bucket_policy(
            principal, bucket=bucket, prefix=prefix, parent_prefix=parent_prefix
        )
        for principal in STORE_RIGHTS
    }


def write_store_policies(config: RunConfig, folder: Path) -> list[Path]:
    """Write a policy file for each principal; return the files.

    Raises:
        ConfigError: As `build_store_policies`.
    """
    policies = build_store_policies(config)
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{principal}.json": policy for principal, policy in policies.items()}
    for file, policy in files.items():
        file.write_bytes(orjson.dumps(policy, option=orjson.OPT_INDENT_2))
    return list(files)


def _split(uri: str) -> tuple[str, str]:
    """Return the bucket of a store, and its prefix without slashes at its ends."""
    parts = urlsplit(uri)
    if parts.scheme != "s3":
        raise ConfigError(
            f"policies are for S3, and the run's object store is {uri}; set objects.uri to "
            "s3://bucket/prefix, or see `relax store` for what each role needs"
        )
    return parts.netloc, parts.path.strip("/")
