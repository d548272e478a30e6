"""In-flight requests to a server: the tokens received of each, and which of them are certain if the
server is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_events.engines.requests import SampleState, merge_segments
from relax_events.events.parts import VersionSegment

BAD_REQUEST = 400


class UnknownVersion(Exception):
    """A server reports tokens of weights that it was never given."""


@dataclass(slots=True, eq=False)
class InflightRequest:
    """One request for one sample.

    Attributes:
        sample: The sample, with the tokens of all earlier requests.
        rid: Its id in the server.
        policy_version: Served when it was sent.
        tokens: Received so far.
        logprobs: Of each.
        top_tokens: Most probable ids with each, if requested.
        version_spans: Runs of tokens by the name of their weights, once the server has reported
            them.
        num_certain: Tokens received before other weights were loaded; None while none were.
        num_prompt_tokens: Length of the prompt by the server's count; 0 before its first event.
        num_cached_tokens: How many of these the server did not compute.
        experts: Of the tokens of prompt and completion, all but the last, and the index of the
            first one; if the server records them.
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
            remedy = "run servers that take prompts as they are"
            self.rejection = (
                f"the server read {self.num_prompt_tokens} tokens, and the prompt has {num_sent}; "
                f"{remedy}"
            )

    def mark_weight_update(self) -> None:
        """Mark that other weights are about to be loaded: only the server knows the version of
        later tokens.
        """
        if self.num_certain is None:
            self.num_certain = len(self.tokens)

    def update_sample(self, *, versions: Mapping[str, int], swapped: Collection[int]) -> None:
        """Append this request's tokens to the sample; without the server's last event, only the
        certain ones.

        Args:
            versions: Policy versions by the names that the server was given for them.
            swapped: Versions loaded while samples ran and kept their cache.
        Raises:
            UnknownVersion: The server names another.
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
        if (
            self.experts is not None
        ):  # without this, the next server records them when it prefills the tokens
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
            VersionSegment(version, count, place > 0 and version in swapped)
            for place, (version, count) in enumerate(runs)
        ]
