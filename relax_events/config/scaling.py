"""The section `scaling`: scaling of workers at runtime."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax_events.config.base import Positive, Seconds, Section
from relax_events.config.external_values import FilePath, Listener


class AutoscalerConfig(Section):
    """Automatic scaling of rollout workers, one request at a time, between `workers.rollout` and
    `scaling.max_workers`. It scales out when any of three conditions holds, unless the trainer is
    the bottleneck: workers hold more than 85 % of the prompt groups that they have room for
    (`engine.max_prompt_groups`), the queue is long, or the trainer waits for samples for more than
    half of a train step. It scales in while the queue is empty, workers hold less than 30 %, those
    that would stay less than 50 %, and their throughput is steady. Defaults are Relax's.
    """

    enabled: bool = False
    """Whether the autoscaler runs."""
    out_queue_prompt_groups: Annotated[float, Field(ge=0)] = 10.0
    """The queue is long when its consumer lag exceeds this many prompt groups per worker."""
    out_seconds: Seconds = 30.0
    """Time for which a condition must hold to scale out. Metrics are observed three times in it,
    and scale-outs are at least twice as far apart."""
    in_seconds: Seconds = 120.0
    """Time for which the conditions must hold to scale in. A scale-in follows any change after 2.5
    times this time at the earliest."""


class ScalingConfig(Section):
    """Scaling of workers at runtime, and its HTTP API (extra `api`, ADR 16)."""

    api: Literal["auto", "on", "off"] = "auto"
    """Whether the controller serves the API; `auto` serves it when the extra `api` is installed."""
    host: Listener = "127.0.0.1"
    """Address on which the API listens."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the API; 0 takes a free port, which `relax scale` reads from the run's folder."""
    token_file: FilePath | None = None
    """File with the token that every request must carry; by default `api-token` in the run's
    folder, created at the start."""
    max_workers: Positive = 32
    """Maximum workers of a role."""
    on_partial_failure: Literal["rollback", "keep"] = "rollback"
    """What happens to the other workers of a request when one fails to start: they are removed, or
    stay."""
    external_autoscaler: bool = False
    """Whether an autoscaler outside the run, such as KEDA, sets the number of a role's pods to
    `relax_workers_desired`. A worker's index is then its pod's ordinal. Our chart sets it."""
    autoscaler: AutoscalerConfig = AutoscalerConfig()
    """When the number of rollout workers is changed by itself."""

    @model_validator(mode="after")
    def _fits_stateful_sets(self) -> ScalingConfig:
        if self.external_autoscaler and self.on_partial_failure == "keep":
            raise ValueError(
                "scaling.on_partial_failure = 'keep' and scaling.external_autoscaler exclude each "
                "other: a StatefulSet removes only its last pods, so one that failed in the middle "
                "can't leave; set scaling.on_partial_failure = 'rollback'"
            )
        return self
