"""Decode untrusted files in a child process: one that hangs, grows or crashes fails its file, and
never the worker.
"""

from __future__ import annotations

from dataclasses import asdict

from relax_events.config.media import MediaConfig
from relax_events.confinement import ChildLost, ChildPool, ChildSettings, Reply
from relax_events.confinement.entry_points import MEDIA_DECODER
from relax_events.confinement.frames import FrameLimits
from relax_events.errors import EnvironmentProblem, MediaError
from relax_events.events.parts import Modality
from relax_events.media.facts import MediaFacts, require_bytes
from relax_events.media.preprocessing import DecodePlan

START_SECONDS = 60.0
HEAD_BYTES = 1024**2
DECODER_MEMORY_BYTES = 4 * 1024**3


class Decoder:
    """A child process, started with the first file and restarted after a crash. It ends with the
    worker.
    """

    def __init__(self, limits: MediaConfig) -> None:
        """Create the decoder; the child starts later.

        Args:
            limits: Limits of files and of decoding.
        """
        self._limits = limits
        self._children = ChildPool(
            ChildSettings(
                entry_point=MEDIA_DECODER,
                setup=limits.model_dump(mode="json") | {"memory_bytes": DECODER_MEMORY_BYTES},
                start_seconds=START_SECONDS,
                limits=FrameLimits(HEAD_BYTES, DECODER_MEMORY_BYTES),
            )
        )

    @property
    def pid(self) -> int | None:
        """Process id of the child; None without one."""
        return next(iter(self._children.pids), None)

    def inspect(self, data: bytes, modality: Modality, *, location: str) -> MediaFacts:
        """Check a file and return its facts.

        Args:
            data: The file.
            modality: The expected modality.
            location: File and row, for errors.
        Raises:
            MediaError: The file is too large, too long, of no supported format, truncated or
                damaged, or decoding needs too much time or memory.
            EnvironmentProblem: A library is not installed.
        """
        return MediaFacts(**self._request(data, modality, None, location).head["facts"])

    def decode(self, data: bytes, modality: Modality, plan: DecodePlan, *, location: str) -> bytes:
        """Decode a file by a plan; errors as for `inspect`.

        Returns:
            The bytes of the plan's array, followed by those of a video's audio if the plan includes
            it.
        """
        return b"".join(self._request(data, modality, plan, location).contents)

    def _request(
        self, data: bytes, modality: Modality, plan: DecodePlan | None, location: str
    ) -> Reply:
        require_bytes(data, self._limits, location)
        request = {
            "modality": modality,
            "location": location,
            "plan": None if plan is None else asdict(plan),
        }
        seconds = self._limits.decode_seconds
        try:
            reply = self._children.call(request, [data], seconds=seconds).result()
        except ChildLost as lost:
            raise self._lost_error(lost, location) from None
        if "error" in reply.head:
            raise MediaError(**reply.head["error"])
        if "problem" in reply.head:
            raise EnvironmentProblem(reply.head["problem"]["text"])
        return reply

    def _lost_error(self, lost: ChildLost, location: str) -> MediaError:
        if lost.is_late:
            rule = f"model.media.decode_seconds = {self._limits.decode_seconds:g}"
            return MediaError(f"{location} was not decoded within {rule}", reason="too_slow")
        return MediaError(
            f"{location} ended the process that decoded it ({lost.ending})",
            reason="crashed_decoder",
        )
