"""In-flight requests to a server: the tokens received, and which of them have a known policy
version if the server is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_events.engines.requests import SampleState
from relax_events.events.parts import VersionSegment, merge_segments

BAD_REQUEST = 400


class UnknownVersion(Exception):
    """A server reports tokens of weights that the engine never loaded into it."""


@dataclass(slots=True, eq=False)
class InflightRequest:
    """One request for one sample.

    Attributes:
        sample: The sample, with the tokens of all earlier requests.
        rid: The request's id in the server.
        policy_version: The version that was served when the request was sent.
        tokens: Tokens received so far.
        logprobs: Log-probability of each token, in nats.
        top_tokens: The most probable ids at each token, if requested.
        version_spans: Spans of tokens by the name of their weights; None until the server reports
            them with its last event.
        has_finished: Whether the last event has arrived.
        num_certain: Tokens received before other weights were loaded, and so of `policy_version`;
            None if none were loaded.
        num_prompt_tokens: Length of the prompt as the server counts it; 0 before its first event.
        num_cached_tokens: Prompt tokens that the server took from its cache.
        experts: The index of the first token with experts, and the experts of all tokens from there
            to the last but one; None if the server does not record them.
        rejection: Why the server rejected the request; empty if it did not.
    """

    sample: SampleState
    rid: str
    policy_version: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_tokens: list[list[int]] = field(default_factory=list)
    version_spans: list[dict[str, Any]] | None = None
    has_finished: bool = False
    num_certain: int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    experts: tuple[int, NDArray[np.generic]] | None = None
    rejection: str = ""

    @property
    def prompt(self) -> dict[str, Any]:
        """Return the request's prompt: all tokens so far."""
        sample = self.sample
        return {
            "rid": self.rid,
            "input_ids": sample.sequence.tolist(),
            "max_new_tokens": sample.max_new_tokens - len(sample.tokens),
            "stop_token_ids": list(sample.stop_token_ids),
            "num_routed": len(sample.experts),
            "seed": sample.seed,
        }

    def add_event(self, event: dict[str, Any]) -> None:
        """Add an event: tokens since the last one and, at the end, the versions of all of them."""
        meta = event["meta_info"]
        if not self.num_prompt_tokens:
            self._check_prompt_length(meta)
        if self.rejection:
            self.has_finished = meta["finish_reason"] is not None
            return
        self.tokens += event["output_ids"]
        self.logprobs += [
            np.nan if entry[0] is None else entry[0] for entry in meta["output_token_logprobs"]
        ]
        if num_top := self.sample.top_tokens.shape[1]:
            self.top_tokens += [
                [entry[1] for entry in entries[:num_top]] for entries in meta["output_top_logprobs"]
            ]
        if (reason := meta["finish_reason"]) is not None:
            self.has_finished = True
            self.version_spans = meta["weight_versions"]
            self.experts = event.get("routed_experts")
            if reason["type"] == "abort" and reason.get("status_code") == BAD_REQUEST:
                self.rejection = reason["message"]

    def _check_prompt_length(self, meta: Mapping[str, Any]) -> None:
        """Reject the request if the server read a prompt of another length: its tokens could not be
        trained on.
        """
        self.num_prompt_tokens, self.num_cached_tokens = (
            meta.get("prompt_tokens", 0),
            meta.get("cached_tokens", 0),
        )
        num_sent = len(self.sample.sequence)
        if self.num_prompt_tokens not in (0, num_sent):
            self.rejection = (
                f"the server read {self.num_prompt_tokens} tokens, but the prompt has {num_sent}; "
                "use servers that do not change prompts"
            )

    def mark_weight_update(self) -> None:
        """Record that other weights are about to be loaded: only the server knows the version of
        later tokens.
        """
        if self.num_certain is None:
            self.num_certain = len(self.tokens)

    def update_sample(self, *, versions: Mapping[str, int], swapped: Collection[int]) -> None:
        """Append this request's tokens to the sample; without the server's last event, only the
        certain ones.

        Args:
            versions: Policy version by the name under which the server loaded it.
            swapped: Versions loaded while samples ran and kept their cache.
        Raises:
            UnknownVersion: The server reports another name.
        """
        version_spans = self._segments(versions, swapped)
        sample, count = self.sample, sum(span.num_tokens for span in version_spans)
        sample.tokens = np.concatenate([sample.tokens, np.array(self.tokens[:count], np.int32)])
        sample.logprobs = np.concatenate(
            [sample.logprobs, np.array(self.logprobs[:count], np.float32)]
        )
        if num_top := sample.top_tokens.shape[1]:
            tops = np.array(self.top_tokens[:count], np.int32).reshape(count, num_top)
            sample.top_tokens = np.concatenate([sample.top_tokens, tops])
        sample.segments = merge_segments(sample.segments, version_spans)
        if self.experts is not None:  # else the next server records them in its prefill
            start, experts = self.experts
            sample.experts = np.concatenate(
                [sample.experts, experts[len(sample.experts) - start :]]
            )

    def _segments(
        self, versions: Mapping[str, int], swapped: Collection[int]
    ) -> list[VersionSegment]:
        if not self.tokens:
            return []
        if self.version_spans is None:
            return [
                VersionSegment(
                    self.policy_version,
                    len(self.tokens) if self.num_certain is None else self.num_certain,
                )
            ]
        if unknown := [
            span["version"] for span in self.version_spans if span["version"] not in versions
        ]:
            raise UnknownVersion(
                f"the server reports tokens of weights {unknown[0]!r}, which were never loaded"
            )
        runs = [
            (versions[span["version"]], span["end"] - span["start"]) for span in self.version_spans
        ]
        return [
            VersionSegment(version, count, index > 0 and version in swapped)
            for index, (version, count) in enumerate(runs)
        ]
