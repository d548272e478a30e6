"""The message graph of a session: the tokens that the policy read and sampled, each once.

    root: messages, then a sampled turn --> messages, sampled turn --> ...
                                       `--> other messages, sampled turn --> ...    a fork

A node is one call of the model: the messages that are new since its parent's turn, as the tokens
that the model read, and the turn that it sampled. A call whose history is the messages along a path
continues that path, and the path's tokens stay as they are. A history that was edited, shortened or
rendered in another way matches an earlier node or none, and so forks.

A path becomes a training row (`Row`). The arrays of an aborted attempt become a path again
(`split_attempt`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from relax_events.data.conversations import ASSISTANT, begins_turn
from relax_events.data.messages import continue_turn
from relax_events.engines.protocol import GeneratedSample, SampleRequest
from relax_events.episodes.messages import extend_digest, path_digests
from relax_events.errors import PoisonSample
from relax_events.events.parts import ChatMessage, MediaRef, VersionSegment, merge_segments
from relax_events.objects.store import list_message_media


@dataclass(slots=True, eq=False)
class Node:
    """A call of the model.

    Attributes:
        parent: The call that it continues; None for the first of a conversation.
        messages: The messages since the parent's turn.
        tools: JSON list of the tools of the conversation; empty if it has none.
        input_tokens: The tokens of those messages, int32 [n], which the policy did not sample.
        sample: What the engine sampled.
        reply: The turn as the program received it.
        digest: Of the path with the reply.
    """

    parent: Node | None
    messages: tuple[ChatMessage, ...]
    tools: str
    input_tokens: NDArray[np.int32]
    sample: GeneratedSample
    reply: ChatMessage
    digest: bytes

    def path(self) -> list[Node]:
        """Return the nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where a call attaches to the graph.

    Attributes:
        parent: The call that it continues, or None.
        rest: The messages that the graph does not have on that path.
        digest: Of the path with the rest.
        begun_digest: Of the path without its last message, where that begins the turn; else empty.
    """

    parent: Node | None
    rest: tuple[ChatMessage, ...]
    digest: bytes
    begun_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Row:
    """A path from root to leaf as a training row.

    Attributes:
        prompt_tokens: int32 [prompt], before the first sampled token.
        tokens: int32 [n], everything after it.
        loss_mask: uint8 [n], 1 where the policy sampled the token and no row before trains it.
        logprobs: float32 [n], in nats; 0 where `loss_mask` is 0.
        segments: Runs of the tokens with `loss_mask` 1, by policy version.
        nodes: The path.
        trained: The nodes whose sampled tokens have `loss_mask` 1.
    """

    prompt_tokens: NDArray[np.int32]
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    segments: tuple[VersionSegment, ...]
    nodes: tuple[Node, ...]
    trained: tuple[Node, ...]

    def __len__(self) -> int:
        """Return the number of its tokens."""
        return len(self.prompt_tokens) + len(self.tokens)


@dataclass(slots=True)
class MessageGraph:
    """The calls of a session; see the module's docstring."""

    nodes: list[Node] = field(default_factory=list)
    num_forks: int = 0
    _by_digest: dict[bytes, Node] = field(default_factory=dict)
    _continued: set[Node] = field(default_factory=set)

    def find(self, messages: Sequence[ChatMessage], *, tools: str) -> Continuation:
        """Find the longest path whose messages begin a history."""
        digests = path_digests(messages, tools=tools)
        lengths = range(len(messages), 0, -1)
        count = next((length for length in lengths if digests[length] in self._by_digest), 0)
        parent, rest = self._by_digest.get(digests[count]), tuple(messages[count:])
        return Continuation(
            parent,
            rest,
            digests[-1],
            begun_digest=digests[-2] if begins_turn(rest) else b"",
        )

    def add(
        self,
        continuation: Continuation,
        *,
        tools: str,
        input_tokens: NDArray[np.int32],
        sample: GeneratedSample,
        reply: ChatMessage,
    ) -> Node:
        """Add a sampled turn, a fork if another turn continues its parent already, or if it begins
        another conversation. Of several equal turns, a later history continues the last.

        A program may send a turn that it began, and what it received, as one message or as two.
        """
        digests = [extend_digest(continuation.digest, reply)]
        if continuation.begun_digest:
            turn = continue_turn(continuation.rest[-1], reply)
            digests.append(extend_digest(continuation.begun_digest, turn))
        parent = continuation.parent
        node = Node(
            parent,
            continuation.rest,
            tools,
            input_tokens,
            sample,
            reply,
            digests[0],
        )
        self.num_forks += bool(self.nodes) if parent is None else parent in self._continued
        self.nodes.append(node)
        self._by_digest |= dict.fromkeys(digests, node)
        if parent is not None:
            self._continued.add(parent)
        return node

    def leaves(self) -> list[Node]:
        """Return the calls that nothing continues, in the order of their turns."""
        return [node for node in self.nodes if node not in self._continued]

    def rows(self) -> list[Row]:
        """Return a row for each leaf, the last turn's row last; each sampled token is trained in
        the first row that has it.
        """
        trained: set[Node] = set()
        rows = []
        for leaf in self.leaves():
            rows.append(_build_row(leaf.path(), trained))
            trained.update(rows[-1].nodes)
        return rows

    def last_row(self) -> Row:
        """Return the row of the last turn alone."""
        return _build_row(self.nodes[-1].path(), set())


def path_tokens(node: Node | None) -> NDArray[np.int32]:
    """Return all tokens up to the end of a node's turn."""
    parts = [] if node is None else node.path()
    pieces = [piece for one in parts for piece in (one.input_tokens, one.sample.tokens)]
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)


def path_messages(node: Node) -> list[ChatMessage]:
    """Return the conversation up to the end of a node's turn."""
    return [message for one in node.path() for message in (*one.messages, one.reply)]


def path_media(node: Node | None) -> list[MediaRef]:
    """Return the media files of `path_tokens`, in order."""
    return (
        []
        if node is None
        else [one for each in node.path() for one in list_message_media(each.messages)]
    )


def sampled_mask(node: Node | None) -> NDArray[np.bool_]:
    """Return which of `path_tokens` the policy sampled."""
    parts = [] if node is None else node.path()
    pieces = [
        piece
        for one in parts
        for piece in (np.zeros(len(one.input_tokens), bool), np.ones(len(one.sample.tokens), bool))
    ]
    return np.concatenate(pieces) if pieces else np.empty(0, bool)


def _build_row(path: list[Node], trained: set[Node]) -> Row:
    tokens = path_tokens(path[-1])
    num_prompt = len(path[0].input_tokens)
    loss_mask, logprobs = np.zeros(len(tokens), np.uint8), np.zeros(len(tokens), np.float32)
    segments: tuple[VersionSegment, ...] = ()
    end = 0
    for node in path:
        start = end + len(node.input_tokens)
        end = start + len(node.sample.tokens)
        if node not in trained:
            loss_mask[start:end] = 1
            logprobs[start:end] = node.sample.logprobs
            segments = merge_segments(segments, node.sample.segments)
    return Row(
        tokens[:num_prompt],
        tokens[num_prompt:],
        loss_mask[num_prompt:],
        logprobs[num_prompt:],
        segments,
        tuple(path),
        tuple(node for node in path if node not in trained),
    )


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A finished turn of the policy, and the replies that followed it.

    Attributes:
        message: The turn.
        tokens: The turn's tokens; with the experts of the whole attempt.
        replies: The messages up to the next turn.
        reply_tokens: int32 [n], of those messages.
    """

    message: ChatMessage
    tokens: SampleRequest
    replies: tuple[ChatMessage, ...]
    reply_tokens: NDArray[np.int32]


def split_attempt(sample: SampleRequest) -> tuple[list[PastTurn], SampleRequest]:
    """Split an attempt into its finished turns, and the first tokens of its last turn.

    Raises:
        PoisonSample: Turns, tokens and loss mask contradict each other.
    """
    if not sample.turns:
        return [], sample
    name, mask = f"sample {sample.sample_id}", sample.loss_mask
    if mask is None or len(mask) != len(sample.tokens):
        raise PoisonSample(
            f"{name}: a prefix with turns needs a loss mask as long as its {len(sample.tokens)} "
            "tokens"
        )
    turns = _split_turns(sample.turns)
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    runs = list(zip(edges[0::2], edges[1::2], edges[2::2], strict=False))
    if len(runs) != len(turns) or not mask[0]:
        raise PoisonSample(
            f"{name}: its loss mask has {len(runs)} turns with a reply, and its messages have "
            f"{len(turns)}"
        )
    past, num_sampled = [], 0
    for (message, replies), (start, end, next_start) in zip(turns, runs, strict=True):
        turn = _cut(sample, start, end, num_sampled=num_sampled)
        past.append(PastTurn(message, turn, replies, sample.tokens[end:next_start]))
        num_sampled += end - start
    return past, _cut(sample, runs[-1][2], len(mask), num_sampled=num_sampled)


def _split_turns(
    messages: Sequence[ChatMessage],
) -> list[tuple[ChatMessage, tuple[ChatMessage, ...]]]:
    """Return each turn of the policy with the messages after it."""
    starts = [index for index, one in enumerate(messages) if one.role == ASSISTANT]
    ends = [*starts[1:], len(messages)]
    return [
        (messages[start], tuple(messages[start + 1 : end]))
        for start, end in zip(starts, ends, strict=True)
    ]


def _cut(sample: SampleRequest, start: int, end: int, *, num_sampled: int) -> SampleRequest:
    """Return the sampled tokens from `start` to `end`; `num_sampled` were sampled before."""
    last = num_sampled + end - start
    return replace(
        sample,
        tokens=sample.tokens[start:end],
        logprobs=sample.logprobs[start:end],
        segments=_cut_segments(sample.segments, num_sampled, last),
        top_tokens=None if sample.top_tokens is None else sample.top_tokens[num_sampled:last],
        loss_mask=None,
        turns=(),
    )


def _cut_segments(
    segments: Sequence[VersionSegment], start: int, end: int
) -> tuple[VersionSegment, ...]:
    """Return the part of segments between two counts of sampled tokens."""
    parts, first = [], 0
    for segment in segments:
        num_tokens = min(first + segment.num_tokens, end) - max(first, start)
        if num_tokens > 0:
            parts.append(replace(segment, num_tokens=num_tokens))
        first += segment.num_tokens
    return tuple(parts)
