"""Samples on their way through a server: what has come of each, and what of it is certain when the
server goes down.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_events.engines.transformers.rows import Sample, joined_segments
from relax_events.events.parts import VersionSegment

BAD_REQUEST = 400


class UnknownVersion(Exception):
    """A server says that tokens are of weights that it was never given."""


@dataclass(slots=True, eq=False)
class Flight:
    """One request for one sample.

    Attributes:
        sample: What it is for, with all that earlier requests brought.
        rid: Its id in the server.
        policy_version: Served when it was sent.
        tokens: That have come.
        logprobs: Of each.
        top_tokens: Most probable ids with each, where some are wanted.
        spans: Runs of tokens by the name of their weights, once the server has said so.
        num_certain: Tokens that came before other weights were loaded; None while none were.
        num_prompt_tokens: What the server read before its first token, by its own count; 0 while it
            has said nothing.
        num_cached_tokens: How many of these it did not compute.
        experts: Which the tokens of prompt and completion went through, all but the last, and from
            which token on; where the server tells.
    """

    sample: Sample
    rid: str
    policy_version: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_tokens: list[list[int]] = field(default_factory=list)
    spans: list[dict[str, Any]] | None = None
    has_landed: bool = False
    num_certain: int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    experts: tuple[int, NDArray[np.generic]] | None = None
    refusal: str = ""

    @property
    def prompt(self) -> dict[str, Any]:
        """Give what the server is to go on from."""
        sample = self.sample
        return {
            "rid": self.rid,
            "input_ids": sample.sequence.tolist(),
            "max_new_tokens": sample.max_new_tokens - len(sample.tokens),
            "stop_token_ids": list(sample.stop_token_ids),
            "num_routed": len(sample.experts),
        }

    def take(self, event: dict[str, Any]) -> None:
        """Take what came: tokens since the last event and, at the end, whose they are."""
        meta = event["meta_info"]
        if not self.num_prompt_tokens:
            self._note_reading(meta)
        if self.refusal:
            self.has_landed = meta["finish_reason"] is not None
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
            self.has_landed = True
            self.spans = meta["weight_versions"]
            self.experts = event.get("routed_experts")
            if reason["type"] == "abort" and reason.get("status_code") == BAD_REQUEST:
                self.refusal = reason["message"]

    def _note_reading(self, meta: Mapping[str, Any]) -> None:
        """Note how long the prompt was that the server read; of another than ours it would draw
        tokens that nobody can train on.
        """
        self.num_prompt_tokens, self.num_cached_tokens = (
            meta.get("prompt_tokens", 0),
            meta.get("cached_tokens", 0),
        )
        num_sent = len(self.sample.sequence)
        if self.num_prompt_tokens not in (0, num_sent):
            remedy = "run servers that take prompts as they are"
            self.refusal = (
                f"it read {self.num_prompt_tokens} tokens, and its prompt has {num_sent}; {remedy}"
            )

    def note_change(self) -> None:
        """Other weights are about to be loaded: of what comes from now on only the server knows
        whose it is.
        """
        if self.num_certain is None:
            self.num_certain = len(self.tokens)

    def land(self, *, versions: Mapping[str, int], swapped: Collection[int]) -> None:
        """Give the sample what this request brought; without the server's last word, only what is
        certain.

        Args:
            versions: Policy versions by the names that the server was given for them.
            swapped: Those that were loaded under running samples, which kept their cache.
        Raises:
            UnknownVersion: The server names another.
        """
        spans = self._runs(versions, swapped)
        sample, count = self.sample, sum(span.num_tokens for span in spans)
        sample.tokens = np.concatenate([sample.tokens, np.array(self.tokens[:count], np.int32)])
        sample.logprobs = np.concatenate(
            [sample.logprobs, np.array(self.logprobs[:count], np.float32)]
        )
        if num_top := sample.top_tokens.shape[1]:
            tops = np.array(self.top_tokens[:count], np.int32).reshape(count, num_top)
            sample.top_tokens = np.concatenate([sample.top_tokens, tops])
        sample.segments = joined_segments(sample.segments, spans)
        if (
            self.experts is not None
        ):  # of tokens that a server told nothing of before it went, the next one tells: it reads them again
            start, experts = self.experts
            sample.experts = np.concatenate(
                [sample.experts, experts[len(sample.experts) - start :]]
            )

    def _runs(self, versions: Mapping[str, int], swapped: Collection[int]) -> list[VersionSegment]:
        if not self.tokens:
            return []
        if self.spans is None:
            return [
                VersionSegment(
                    self.policy_version,
                    len(self.tokens) if self.num_certain is None else self.num_certain,
                )
            ]
        if unknown := [span["version"] for span in self.spans if span["version"] not in versions]:
            raise UnknownVersion(
                f"its tokens are of weights {unknown[0]!r}, which we never gave it"
            )
        runs = [(versions[span["version"]], span["end"] - span["start"]) for span in self.spans]
        return [
            VersionSegment(version, count, place > 0 and version in swapped)
            for place, (version, count) in enumerate(runs)
        ]
