"""A teacher on SGLang servers: log-probabilities of samples that other processes compute."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import orjson
import structlog
from numpy.typing import NDArray

from relax_events.config import TeacherModelConfig
from relax_events.errors import EngineFailed, EnvironmentProblem, PoisonSample
from relax_events.events.types import SampleRolledOut
from relax_events.training.backend.protocol import IdsOf, SampleScores
from relax_events.training.backend.scoring import join_paths
from relax_events.training.batch.paths import count_paths, split_paths
from relax_events.training.batch.row_layout import TokenSequence, read_array

log = structlog.get_logger()
CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 600.0
"""Deadline of a request, which scores the samples of a record batch."""
ERROR_CHARACTERS = 500


class ServerLost(Exception):
    """A server does not answer; the text names it."""


@dataclass(slots=True)
class Share:
    """The samples that one server scores, by their index."""

    url: str
    indices: list[int] = field(default_factory=list)
    num_tokens: int = 0


class ServedTeacher:
    """Scores samples on servers, which must hold the teacher's model; see
    `training.backend.protocol.Scorer`.

    A server that fails is left out of the call, and its samples go to the others. In the next call
    it is asked again.
    """

    def __init__(self, config: TeacherModelConfig, *, section: str) -> None:
        """Connect to nothing yet.

        Args:
            config: The teacher's servers and deadline.
            section: The teacher's section, for errors.
        Raises:
            EnvironmentProblem: The HTTP client is not installed.
        """
        try:
            import httpx2
        except ImportError as error:
            raise EnvironmentProblem(
                f"{section}.urls needs httpx2 ({error}); install relax-events[sglang]"
            ) from None
        self._http, self._config, self._section = httpx2, config, section

    def score(self, samples: Sequence[SampleRolledOut]) -> list[NDArray[np.float32]]:
        """Return the log-probability of every loss token, in nats, and 0 elsewhere: an array for
        each sample, as long as its tokens.

        Raises:
            PoisonSample: A server refuses a sample, or its temperature is not 1; the text names it.
            EngineFailed: No server answers.
        """
        return [scores.logprobs for scores in self._score(samples, num_top=0)]

    def score_topk(
        self, samples: Sequence[SampleRolledOut], *, num_ids: int, ids_of: IdsOf
    ) -> list[SampleScores]:
        """Return the same, with the teacher's most probable ids at each loss token.

        Args:
            samples: In any number.
            num_ids: Ids at each loss token.
            ids_of: `model`: servers score no given ids.
        Raises:
            PoisonSample: A server refuses a sample; the text names it.
            EngineFailed: No server answers.
        """
        if ids_of != "model":
            raise ValueError(f"a served teacher scores its own ids alone, got {ids_of}")
        return self._score(samples, num_top=num_ids)

    def _score(self, samples: Sequence[SampleRolledOut], *, num_top: int) -> list[SampleScores]:
        paths = split_paths(samples)
        scores = asyncio.run(self._score_paths(paths, num_top=num_top))
        ordered = iter(scores)
        return [join_paths(list(islice(ordered, number))) for number in count_paths(samples)]

    async def _score_paths(
        self, samples: Sequence[TokenSequence], *, num_top: int
    ) -> list[SampleScores]:
        scores: dict[int, SampleScores] = {}
        missing, urls = list(range(len(samples))), list(self._config.urls)
        losses: list[str] = []
        timeout = self._http.Timeout(REQUEST_SECONDS, connect=CONNECT_SECONDS)
        async with self._http.AsyncClient(timeout=timeout, trust_env=False) as client:
            while missing:
                if not urls:
                    raise EngineFailed(
                        f"no server of {self._section}.urls answers: {'; '.join(losses)}"
                    )
                shares = share_samples(missing, samples, urls)
                answers = await asyncio.gather(
                    *(self._ask(client, share, samples, num_top=num_top) for share in shares),
                    return_exceptions=True,
                )
                for share, answer in zip(shares, answers, strict=True):
                    if isinstance(answer, ServerLost):
                        log.warning("teacher_server.lost", url=share.url, error=str(answer))
                        urls.remove(share.url)
                        losses.append(str(answer))
                    elif isinstance(answer, BaseException):
                        raise answer
                    else:
                        scores |= zip(share.indices, answer, strict=True)
                missing = [index for index in missing if index not in scores]
        return [scores[index] for index in range(len(samples))]

    async def _ask(
        self, client: Any, share: Share, samples: Sequence[TokenSequence], *, num_top: int
    ) -> list[SampleScores]:
        sent_samples = [samples[index] for index in share.indices]
        what = f"POST {share.url}/generate"
        try:
            response = await client.post(
                f"{share.url.rstrip('/')}/generate",
                content=orjson.dumps(build_body(sent_samples, num_top=num_top)),
                headers={"Content-Type": "application/json"},
            )
        except self._http.RequestError as error:
            raise ServerLost(f"{what}: {type(error).__name__}: {error}") from error
        if response.is_server_error:
            raise ServerLost(f"{what}: status {response.status_code}")
        if response.is_error:
            text = response.text[:ERROR_CHARACTERS]
            raise PoisonSample(
                f"sample {sent_samples[0].sample_id} or one sent with it: the teacher's server "
                f"refuses it: {what}: status {response.status_code}: {text}"
            )
        answers: list[dict[str, Any]] = orjson.loads(response.content)
        if len(answers) != len(sent_samples):
            raise ServerLost(f"{what}: {len(answers)} answers to {len(sent_samples)} samples")
        return [
            read_scores(sample, answer["meta_info"], num_top=num_top)
            for sample, answer in zip(sent_samples, answers, strict=True)
        ]


def share_samples(
    indices: Sequence[int], samples: Sequence[TokenSequence], urls: Sequence[str]
) -> list[Share]:
    """Divide samples over servers: the longest first, each to the server with the fewest tokens.
    Servers without a sample are left out.
    """
    shares = [Share(url) for url in urls]
    length = {index: len(read_array(samples[index], "tokens")) for index in indices}
    for index in sorted(indices, key=lambda index: -length[index]):
        least = min(shares, key=lambda share: share.num_tokens)
        least.indices.append(index)
        least.num_tokens += length[index]
    return [share for share in shares if share.indices]


def build_body(samples: Sequence[TokenSequence], *, num_top: int) -> dict[str, Any]:
    """Build a request that generates nothing, and returns the log-probabilities of the tokens from
    the one before the first loss token on. A server gives them at temperature 1,
    whatever temperature the request names.

    Raises:
        PoisonSample: A sample has another temperature; the text names it.
    """
    if tempered := next((one for one in samples if one.temperature != 1), None):
        raise PoisonSample(
            f"sample {tempered.sample_id}: a teacher on servers scores at temperature 1, and the "
            f"sample's is {tempered.temperature:g}; sample at 1, or leave the teacher's urls out"
        )
    return {
        "input_ids": [read_array(sample, "tokens").tolist() for sample in samples],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": [True] * len(samples),
        "logprob_start_len": [max(_first_loss_token(sample) - 1, 0) for sample in samples],
        "top_logprobs_num": [num_top] * len(samples),
    }


def _first_loss_token(sample: TokenSequence) -> int:
    return int(np.argmax(read_array(sample, "loss_mask").astype(bool)))


def read_scores(sample: TokenSequence, answer: Mapping[str, Any], *, num_top: int) -> SampleScores:
    """Read a server's log-probabilities of a sample.

    Args:
        sample: What was sent.
        answer: `meta_info` of the response.
        num_top: Most probable ids at each token.
    Raises:
        PoisonSample: The server aborted it, or its answer is about other tokens.
    """
    tokens, mask = read_array(sample, "tokens"), read_array(sample, "loss_mask").astype(bool)
    where = f"sample {sample.sample_id}: the teacher's server"
    reason = answer.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise PoisonSample(f"{where} refuses it: {reason.get('message', reason)}")
    entries = answer["input_token_logprobs"]
    start = len(tokens) - len(entries)
    loss_indices = np.flatnonzero(mask)
    if len(loss_indices) and (start < 0 or loss_indices[0] < start):
        raise PoisonSample(f"{where} scored {len(entries)} of {len(tokens)} tokens")
    chosen = [entries[index - start] for index in loss_indices]
    # a server writes the last id of the vocabulary as 0
    if any(
        one[1] not in (token, 0) for one, token in zip(chosen, tokens[loss_indices], strict=True)
    ):
        raise PoisonSample(f"{where} scored other tokens than it was sent")
    logprobs = np.zeros(len(tokens), np.float32)
    logprobs[loss_indices] = [one[0] for one in chosen]
    if not num_top:
        return SampleScores(logprobs)
    best = [answer["input_top_logprobs"][index - start][:num_top] for index in loss_indices]
    shape = (len(loss_indices), num_top)
    return SampleScores(
        logprobs,
        np.array([[one[1] for one in row] for row in best], np.int32).reshape(shape),
        np.array([[one[0] for one in row] for row in best], np.float32).reshape(shape),
    )
