"""Explains deaths by SIGKILL: whether the kernel killed processes because memory ran out."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

OWN_CGROUP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
VMSTAT = Path("/proc/vmstat")
REMEDY = (
    "`relax plan` with the run file shows what each worker takes; lower "
    "engine.max_running_samples or trainer.max_tokens_per_micro_batch, or provide more memory"
)


@dataclass(frozen=True, slots=True)
class MemoryKills:
    """How many processes the kernel has killed by now because memory ran out: of this process's
    cgroup, or of the whole machine where the cgroup does not count them.
    """

    num_kills: int
    is_of_cgroup: bool

    @classmethod
    def read(cls) -> Self:
        """Read the kernel's count; 0 where the system has none."""
        for line in _read_lines(OWN_CGROUP):
            hierarchy, _, cgroup = line.partition("::")
            events = CGROUPS / cgroup.strip("/") / "memory.events"
            if hierarchy == "0" and (count := _find_count(events)) is not None:
                return cls(count, is_of_cgroup=True)
        return cls(_find_count(VMSTAT) or 0, is_of_cgroup=False)

    def explain(self) -> str:
        """Return why a process was killed that ran since this count, and the remedy; empty where no
        process was killed for lack of memory since.
        """
        num_kills = self.read().num_kills - self.num_kills
        if num_kills <= 0:
            return ""
        likely, scope = ("", "container") if self.is_of_cgroup else ("probably ", "machine")
        return (
            f"{likely}because memory ran out: the kernel has killed processes of this {scope} "
            f"for it since this one started ({num_kills} in number); {REMEDY}"
        )


def _find_count(path: Path) -> int | None:
    for line in _read_lines(path):
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return None


def _read_lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().splitlines()
    return []
