"""The processes of a run by role, recognized by their command lines."""

from __future__ import annotations

import psutil

BROKER, RUN, DECODER = "broker", "relax run", "decoder"


def read_role(process: psutil.Process, earlier_roles: dict[psutil.Process, str]) -> str:
    """Tell a process's role by its command line; what a worker starts counts to its role, but for
    the decoder of media.

    Args:
        process: Of a run.
        earlier_roles: Roles of the processes that ran before.
    """
    words: list[str] = process.cmdline()
    if "kafka.Kafka" in words:
        return BROKER
    if "relax_events.media.decoder_child" in words:
        return DECODER
    if "worker" in words[:-1]:
        return words[words.index("worker") + 1]
    return earlier_roles.get(process.parent() or process, RUN)


def roles_below(
    root: psutil.Process, earlier_roles: dict[psutil.Process, str]
) -> dict[psutil.Process, str]:
    """Return the roles of a process and of all below it that live, the parents before their
    children.

    Args:
        root: The process.
        earlier_roles: Keeps the roles for the next call, without processes that were just forked:
            these still have their parent's command line.
    """
    living, passing = [root, *root.children(recursive=True)], dict[psutil.Process, str]()
    for process in living:
        if process not in earlier_roles:
            try:
                kept = passing if is_as_forked(process) else earlier_roles
                kept[process] = read_role(process, earlier_roles | passing)
            except psutil.Error:
                continue
    roles = earlier_roles | passing
    return {process: roles[process] for process in living if process in roles}


def is_as_forked(process: psutil.Process) -> bool:
    """Tell whether a process may still be about to become another program."""
    parent = process.parent()
    return parent is not None and process.cmdline() == parent.cmdline()
