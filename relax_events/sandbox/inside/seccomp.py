"""A seccomp filter that refuses system calls which an untrusted program does not need. It needs no
privileges.

It is a deny list, because Python needs most other calls. It complements Landlock or a private root.
Source: Documentation/userspace-api/seccomp_filter.rst of the Linux kernel; numbers from its system
call tables.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
ALLOW, KILL_PROCESS, FAIL_WITH = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000
SOCK_STREAM, SOCKET_TYPES = 1, 0xF
NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, -CGROUP, -UTS, -IPC, -USER, -PID and -NET."""
CLONE_THREAD = 0x00010000
TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: they insert input into a terminal."""

# name: number on x86_64, number on aarch64 (None: there is no such call)
CALLS: dict[str, tuple[int | None, int | None]] = {
    # sockets: the network, and every server of this machine with a Unix socket
    "socket": (41, 198),
    "connect": (42, 203),
    "accept": (43, 202),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept4": (288, 242),
    # namespaces, mounts and file handles
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # large attack surfaces of the kernel
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    # administration of the machine
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    # memory that no file and no process is charged for, and that stays
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "mq_open": (240, 180),
    # changes to files of the same user that Landlock does not restrict
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
SIGNALS: dict[str, tuple[int | None, int | None]] = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
PROCESSES: dict[str, tuple[int | None, int | None]] = {
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
}
CLONE, CLONE3, SOCKETPAIR, TGKILL, IOCTL, PRLIMIT = (
    (56, 220),
    (435, 435),
    (53, 199),
    (234, 131),
    (16, 29),
    (302, 261),
)


def restrict(*, may_signal: bool, may_start_processes: bool, may_connect: bool = False) -> None:
    """Refuse the calls above for this process and its children; a refused call fails with EPERM.

    Args:
        may_signal: Whether kill() is allowed; then Landlock or a namespace must confine signals.
        may_start_processes: Whether fork() and exec() are allowed.
    Raises:
        OSError: The kernel refused, or the system calls of this processor are unknown.
    """
    program = assemble(
        platform.machine(),
        own_pid=os.getpid(),
        may_signal=may_signal,
        may_start_processes=may_start_processes,
        may_connect=may_connect,
    )
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0
    ):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def assemble(
    machine: str,
    *,
    own_pid: int,
    may_signal: bool,
    may_start_processes: bool,
    may_connect: bool = False,
) -> bytes:
    """Return the filter in the kernel's format, 8 bytes an instruction.

    Raises:
        OSError: The machine's system calls are unknown.
    """
    if machine not in ARCHITECTURES:
        raise OSError(
            errno.ENOSYS,
            (
                f"seccomp: the system calls of {machine} are not known here; of "
                f"{', '.join(ARCHITECTURES)} they are"
            ),
        )
    column = list(ARCHITECTURES).index(machine)
    code = [
        *_kill_on_other_architectures(machine),
        *_refuse_calls(
            column,
            may_signal=may_signal,
            may_start_processes=may_start_processes,
            may_connect=may_connect,
        ),
        *_refuse_clones(column, may_start_processes=may_start_processes),
        *_refuse_arguments(column),
    ]
    if not may_signal:
        code += _when(
            TGKILL[column], _argument(0), [_op(JUMP_EQUAL, own_pid, 1, 0), _refuse(errno.EPERM)]
        )  # abort() stays
    return b"".join([*code, _op(RETURN, ALLOW)])


def _kill_on_other_architectures(machine: str) -> list[bytes]:
    """Return instructions that end a process which calls by the numbers of another architecture,
    and then load the call's number.
    """
    code = [
        _op(LOAD, ARCHITECTURE_AT),
        _op(JUMP_EQUAL, ARCHITECTURES[machine], 1, 0),
        _op(RETURN, KILL_PROCESS),
        _op(LOAD, NUMBER_AT),
    ]
    if machine == "x86_64":
        code += [_op(JUMP_AT_LEAST, X32_BIT, 0, 1), _op(RETURN, KILL_PROCESS)]
    return code


def _refuse_calls(
    column: int, *, may_signal: bool, may_start_processes: bool, may_connect: bool
) -> list[bytes]:
    """Return instructions that refuse calls whatever their arguments are."""
    calls = {
        **CALLS,
        **({} if may_signal else SIGNALS),
        **({} if may_start_processes else PROCESSES),
    }
    return [
        op
        for name, numbers in calls.items()
        if not (may_connect and name in {"socket", "connect"})
        if (number := numbers[column]) is not None
        for op in (_op(JUMP_EQUAL, number, 0, 1), _refuse(errno.EPERM))
    ]


def _refuse_clones(column: int, *, may_start_processes: bool) -> list[bytes]:
    """Return instructions that refuse new namespaces, and new processes unless allowed."""
    code = [
        _op(JUMP_EQUAL, CLONE3[column], 0, 1),
        _refuse(errno.ENOSYS),
    ]  # its flags are in memory; the C library falls back to clone
    code += _when(
        CLONE[column], _argument(0), [_op(JUMP_ANY_BIT, NEW_NAMESPACES, 0, 1), _refuse(errno.EPERM)]
    )
    if not may_start_processes:
        code += _when(
            CLONE[column],
            _argument(0),
            [_op(JUMP_ANY_BIT, CLONE_THREAD, 1, 0), _refuse(errno.EPERM)],
        )
    return code


def _refuse_arguments(column: int) -> list[bytes]:
    """Return instructions that refuse datagram sockets, input into a terminal, and the limits of
    other processes.
    """
    datagrams = [
        _op(AND, SOCKET_TYPES),
        _op(JUMP_EQUAL, SOCK_STREAM, 1, 0),
        _refuse(errno.EPERM),
    ]  # they could be sent to any path
    typing = [
        op
        for request in TERMINAL_INPUT
        for op in (_op(JUMP_EQUAL, request, 0, 1), _refuse(errno.EPERM))
    ]
    own_limits = [_op(JUMP_EQUAL, 0, 1, 0), _refuse(errno.EPERM)]
    return [
        *_when(SOCKETPAIR[column], _argument(1), datagrams),
        *_when(IOCTL[column], _argument(1), typing),
        *_when(PRLIMIT[column], _argument(0), own_limits),
    ]


def _when(number: int, load: bytes, body: list[bytes]) -> list[bytes]:
    """Return instructions that run for one call only, and then load the call's number again."""
    return [_op(JUMP_EQUAL, number, 0, len(body) + 2), load, *body, _op(LOAD, NUMBER_AT)]


def _argument(index: int) -> bytes:
    return _op(LOAD, ARGUMENTS_AT + 8 * index)


def _refuse(number: int) -> bytes:
    return _op(RETURN, FAIL_WITH | number)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
