"""A seccomp filter that allows the system calls which an untrusted program needs, and refuses all
others. It needs no privileges.

It complements Landlock or a private root: it allows calls on files, and those decide which files.
A refused call fails with EPERM. A call that is newer than the table, or that the C library and
others replace, fails with ENOSYS, as on a kernel without it.
Source: Documentation/userspace-api/seccomp_filter.rst of the Linux kernel; numbers from its system
call tables (`system_calls.txt`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parent / "system_calls.txt"
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
ALLOW, KILL_PROCESS, FAIL_WITH = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000
ALL_BITS = 0xFFFFFFFF

ALWAYS = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek sendfile
copy_file_range creat close close_range dup dup2 dup3 pipe pipe2 flock fsync
fdatasync sync_file_range readahead fadvise64 ftruncate cachestat
stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat
getdents getdents64 getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr getxattrat
listxattrat file_getattr
mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat
chdir fchdir getcwd umask
poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime
recvfrom recvmsg recvmmsg getsockname getpeername setsockopt getsockopt shutdown
mmap munmap mremap mprotect madvise msync mincore brk mlock mlock2 munlock munlockall
pkey_alloc pkey_free pkey_mprotect map_shadow_stack mseal membarrier get_mempolicy
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack
pause alarm getitimer setitimer timer_create timer_settime timer_gettime timer_getoverrun
timer_delete nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times
futex futex_waitv futex_wake futex_wait futex_requeue set_robust_list set_tid_address rseq
restart_syscall arch_prctl set_thread_area get_thread_area
exit exit_group wait4 waitid getpid getppid gettid getpgid setpgid getpgrp getsid setsid
getuid geteuid getgid getegid getresuid getresgid getgroups capget
setuid setgid setreuid setregid setresuid setresgid
getrlimit setrlimit getrusage getpriority ioprio_get getcpu sysinfo uname getrandom
sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_getattr
sched_get_priority_max sched_get_priority_min sched_rr_get_interval
landlock_create_ruleset landlock_add_rule landlock_restrict_self
""".split()  # noqa: SIM905 the list has 190 names
"""Calls on a process's own memory, time, threads and open files, and on files by path."""
SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
PROCESSES = ("execve", "execveat", "fork", "vfork")
REPLACED = """
clone3 openat2 splice tee vmsplice io_setup io_uring_setup memfd_secret statmount listmount
quotactl_fd set_mempolicy_home_node lsm_get_self_attr lsm_set_self_attr lsm_list_modules
""".split()  # noqa: SIM905 as above
"""Refused calls for which libraries have a replacement if the kernel has no such call. The flags of
clone3 and openat2 are in memory, where a filter can't read them."""

SAFE_FCNTL = (0, 1, 2, 3, 5, 6, 7, 9, 11, 16, 36, 37, 38, 1025, 1027, 1028, 1030, 1032, 1034)
"""Duplicates, flags, locks and queries: not F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY
and F_SETPIPE_SZ, by which a process signals others, or takes memory that it is not charged for."""
F_SETFL, O_ASYNC = 4, 0x2000
SAFE_IOCTL = (0x5401, 0x802C542A, 0x540F, 0x5411, 0x5413, 0x5429, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TCGETS2, TIOCGPGRP, TIOCOUTQ, TIOCGWINSZ, TIOCGSID, FIONREAD, FIONBIO, FIONCLEX and
FIOCLEX."""
SAFE_PRCTL = (1, 2, 3, 7, 15, 16, 21, 23, 25, 27, 29, 30, 37, 38, 39, 40, 41, 42, 51, 52, 54, 56)
"""Queries, PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_TIMERSLACK, PR_SET_NO_NEW_PRIVS,
PR_SET_THP_DISABLE and PR_PAC_RESET_KEYS."""
PR_SET_VMA = 0x53564D41
O_WRONLY, O_RDWR, O_ACCMODE, O_TRUNC = 1, 2, 3, 0o1000
FILE_TYPES, REGULAR_FILE, PIPE = 0xF000, 0x8000, 0x1000
NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, -CGROUP, -UTS, -IPC, -USER, -PID and -NET."""
CLONE_PIDFD, CLONE_PTRACE, CLONE_PARENT, CLONE_THREAD = 0x1000, 0x2000, 0x8000, 0x00010000
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
SOCK_STREAM, SOCK_DGRAM, SOCKET_TYPES = 1, 2, 0xF
IPPROTO_TCP, IPPROTO_UDP = 6, 17
MSG_FASTOPEN = 0x20000000
"""Connects without connect(), and so without Landlock's rules on ports."""


class Argument(NamedTuple):
    """A condition on the low 32 bits of an argument of a call."""

    position: int
    values: tuple[int, ...]
    mask: int = ALL_BITS


class Rule(NamedTuple):
    """A call that is allowed if all conditions of one of the alternatives hold."""

    name: str
    alternatives: tuple[tuple[Argument, ...], ...]
    error: int = errno.EPERM


def restrict(*, may_signal: bool, may_start_processes: bool, may_connect: bool = False) -> None:
    """Refuse all but the calls above for this process and its children.

    Args:
        may_signal: Whether kill() is allowed; then Landlock or a namespace must confine signals.
        may_start_processes: Whether fork() and exec() are allowed.
        may_connect: Whether TCP and UDP sockets are allowed, as clients; Landlock restricts the
            ports of TCP.
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
    numbers = read_numbers(machine)
    allowed = [
        *ALWAYS,
        *(SIGNALS if may_signal else ()),
        *(PROCESSES if may_start_processes else ()),
        *(("connect",) if may_connect else ()),
    ]
    rules = [*_argument_rules(may_start_processes), *_socket_rules(may_connect)]
    if not may_signal:  # abort() stays
        rules.append(Rule("tgkill", ((Argument(0, (own_pid,)),),)))
    return b"".join(
        [
            *_kill_on_other_architectures(machine),
            *(op for rule in rules for op in _check(rule, numbers)),
            *_allow({numbers[name] for name in allowed if name in numbers}),
            *_refuse_the_rest(numbers),
        ]
    )


@cache
def read_numbers(machine: str) -> dict[str, int]:
    """Return the numbers of all system calls that a processor has, by name."""
    column = list(ARCHITECTURES).index(machine)
    numbers = {}
    for line in TABLE.read_text().splitlines():
        name, *fields = line.split()
        if name != "#" and fields[column] != "-":
            numbers[name] = int(fields[column])
    return numbers


def _argument_rules(may_start_processes: bool) -> list[Rule]:
    """Return the rules of calls on files, terminals, limits, and new threads and processes."""
    regular_file_or_pipe = (0, REGULAR_FILE, PIPE)
    forbidden = NEW_NAMESPACES | CLONE_PIDFD | CLONE_PTRACE | CLONE_PARENT
    thread = 0 if may_start_processes else CLONE_THREAD
    return [
        # Landlock before version 3 lets a program empty files that it may only read
        *(
            Rule(
                name,
                (
                    (Argument(flags, (0,), O_TRUNC),),
                    (Argument(flags, (O_WRONLY, O_RDWR), O_ACCMODE),),
                ),
            )
            for name, flags in (("open", 1), ("openat", 2))
        ),
        Rule("clone", ((Argument(0, (thread,), forbidden | thread),),)),
        Rule(
            "fcntl",
            (
                (Argument(1, SAFE_FCNTL),),
                (Argument(1, (F_SETFL,)), Argument(2, (0,), O_ASYNC)),
            ),
        ),
        Rule("ioctl", ((Argument(1, SAFE_IOCTL),),), errno.ENOTTY),
        Rule("prctl", ((Argument(0, (*SAFE_PRCTL, PR_SET_VMA)),),)),
        Rule("prlimit64", ((Argument(0, (0,)),),)),
        Rule("mknod", ((Argument(1, regular_file_or_pipe, FILE_TYPES),),)),
        Rule("mknodat", ((Argument(2, regular_file_or_pipe, FILE_TYPES),),)),
        # other modes of fallocate take blocks beyond the limit on a file's size
        Rule("fallocate", ((Argument(1, (0,)),),), errno.EOPNOTSUPP),
    ]


def _socket_rules(may_connect: bool) -> list[Rule]:
    """Return the rules of sockets: connected pairs, and clients of TCP and UDP if allowed.

    Datagrams of a Unix socket could be sent to any path.
    """
    pair = (Argument(0, (AF_UNIX,)), Argument(1, (SOCK_STREAM,), SOCKET_TYPES))
    client = tuple(
        (
            Argument(0, (AF_INET, AF_INET6)),
            Argument(1, (kind,), SOCKET_TYPES),
            Argument(2, (0, protocol)),
        )
        for kind, protocol in ((SOCK_STREAM, IPPROTO_TCP), (SOCK_DGRAM, IPPROTO_UDP))
    )
    return [
        Rule("socketpair", (pair,)),
        *([Rule("socket", client)] if may_connect else []),
        *(
            Rule(name, ((Argument(flags, (0,), MSG_FASTOPEN),),))
            for name, flags in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3))
        ),
    ]


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


def _check(rule: Rule, numbers: dict[str, int]) -> list[bytes]:
    """Return instructions that decide about one call by its arguments, and pass on others."""
    if rule.name not in numbers:
        return []
    body = [op for checks in rule.alternatives for op in _allow_if(checks)]
    body.append(_refuse(rule.error))
    return [_op(JUMP_EQUAL, numbers[rule.name], 0, len(body)), *body]


def _allow_if(conditions: Sequence[Argument]) -> list[bytes]:
    """Return instructions that allow the call if all conditions hold, and else pass on."""
    code = [_op(RETURN, ALLOW)]
    for position, values, mask in reversed(conditions):
        last = len(values) - 1
        jumps = [
            _op(JUMP_EQUAL, value, last - index, len(code) if index == last else 0)
            for index, value in enumerate(values)
        ]
        code = [_op(LOAD, ARGUMENTS_AT + 8 * position), _op(AND, mask), *jumps, *code]
    return code


def _allow(numbers: set[int]) -> list[bytes]:
    """Return instructions that allow calls whatever their arguments are."""
    return [
        op
        for first, last in _ranges(sorted(numbers))
        for op in (
            _op(JUMP_AT_LEAST, first, 0, 2),
            _op(JUMP_AT_LEAST, last + 1, 1, 0),
            _op(RETURN, ALLOW),
        )
    ]


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last number of each gapless range of sorted numbers."""
    first = numbers[0]
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        if following != number + 1:
            yield first, number
            first = following or 0


def _refuse_the_rest(numbers: dict[str, int]) -> list[bytes]:
    """Return instructions that refuse a call which was not allowed before."""
    newest = max(numbers.values())
    missing = [numbers[name] for name in REPLACED if name in numbers]
    return [
        *(
            op
            for number in missing
            for op in (_op(JUMP_EQUAL, number, 0, 1), _refuse(errno.ENOSYS))
        ),
        _op(JUMP_AT_LEAST, newest + 1, 0, 1),
        _refuse(errno.ENOSYS),
        _refuse(errno.EPERM),
    ]


def _refuse(number: int) -> bytes:
    return _op(RETURN, FAIL_WITH | number)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
