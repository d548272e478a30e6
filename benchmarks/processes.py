"""The processes of a run by role, told by their command lines."""

from __future__ import annotations

from collections import defaultdict

import psutil

BROKER, RUN, DECODER = "broker", "relax run", "decoder"


def role_of(process: psutil.Process, known: dict[psutil.Process, str]) -> str:
    """Tell a process's role; what a worker starts counts to its role, but for the decoder of media.

    Args:
        process: Of a run.
        known: Roles of those that were there before.
    """
    words: list[str] = process.cmdline()
    if "kafka.Kafka" in words:
        return BROKER
    if "relax_events.media.decoder_child" in words:
        return DECODER
    if "worker" in words[:-1]:
        return words[words.index("worker") + 1]
    return known.get(process.parent() or process, RUN)


def roles_below(root: psutil.Process, known: dict[psutil.Process, str]) -> dict[psutil.Process, str]:
    """Return the roles of a process and of all below it that live, the parents before their children; `known` keeps them for the next call."""
    living = [root, *root.children(recursive=True)]
    for process in living:
        if process not in known:
            try:
                known[process] = role_of(process, known)
            except psutil.Error:
                continue
    return {process: known[process] for process in living if process in known}


def resident_bytes(roles: dict[psutil.Process, str]) -> dict[str, int]:
    """Return the memory of each role; pages that processes share count for each of them."""
    resident: dict[str, int] = defaultdict(int)
    for process, role in roles.items():
        try:
            resident[role] += process.memory_info().rss
        except psutil.Error:
            continue
    return dict(resident)
