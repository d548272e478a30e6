"""The filter of system calls, run by an interpreter of its instructions: what it decides on each
processor, also on those that no test runs on.
"""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from relax_events.sandbox.inside import seccomp

MACHINES = ("x86_64", "aarch64")
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64 of linux/audit.h."""
HEADERS = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
OWN_PID, OTHER_PID = 4242, 4243
REFUSED = """
accept accept4 bind listen unshare setns mount umount2 pivot_root chroot open_tree move_mount fsopen
fsconfig fsmount fspick mount_setattr open_tree_attr name_to_handle_at open_by_handle_at ptrace
process_vm_readv process_vm_writev kcmp pidfd_open pidfd_getfd pidfd_send_signal process_madvise
process_mrelease get_robust_list setpriority ioprio_set sched_setaffinity sched_setattr
sched_setparam sched_setscheduler migrate_pages move_pages mbind set_mempolicy bpf userfaultfd
perf_event_open fanotify_init fanotify_mark inotify_init1 inotify_add_watch io_uring_enter
io_uring_register io_submit keyctl add_key request_key init_module finit_module delete_module
kexec_load kexec_file_load personality seccomp reboot swapon swapoff acct quotactl syslog
settimeofday clock_settime adjtimex clock_adjtime sethostname setdomainname vhangup memfd_create
shmget shmat shmctl semget semop semctl semtimedop msgget msgsnd msgrcv msgctl mq_open mq_unlink
mq_timedsend mq_timedreceive mq_notify fchmod fchmodat fchmodat2 fchown fchownat setxattr lsetxattr
fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat file_setattr utimensat
truncate sync syncfs capset setgroups mlockall remap_file_pages
"""
LEGACY_REFUSED = "iopl ioperm modify_ldt chmod chown lchown utime utimes futimesat inotify_init"
MISSING = "clone3 openat2 splice tee vmsplice io_setup io_uring_setup memfd_secret"
NEEDED = """
read write close mmap munmap mprotect brk futex rt_sigaction rt_sigprocmask exit exit_group wait4
openat newfstatat statx getdents64 readlinkat unlinkat renameat2 mkdirat pipe2 dup3 epoll_pwait
getrandom rseq set_robust_list set_tid_address getcwd chdir ftruncate copy_file_range clone fcntl
setresuid sched_getaffinity close_range faccessat2 membarrier
"""


def decide(program: bytes, number: int, *arguments: int, architecture: int) -> int:
    """Run a filter; return 0 if it allows the call, -1 if it kills, or else the error number."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    place, value = 0, 0
    while True:
        code, if_true, if_false, operand = struct.unpack_from("=HBBI", program, 8 * place)
        place += 1
        if code == 0x20:  # load
            (value,) = struct.unpack_from("=I", data, operand)
        elif code == 0x54:
            value &= operand
        elif code in (0x15, 0x35):
            holds = value == operand if code == 0x15 else value >= operand
            place += if_true if holds else if_false
        else:
            assert code == 0x06  # return
            return {0x7FFF0000: 0, 0x80000000: -1}.get(operand, operand & 0xFFFF)


class Filter:
    """A filter of a processor, asked by the names of calls."""

    def __init__(self, machine: str, **may: bool) -> None:
        permissions = {"may_signal": False, "may_start_processes": True} | may
        self.numbers = seccomp.read_numbers(machine)
        self._program = seccomp.assemble(machine, own_pid=OWN_PID, **permissions)
        self._architecture = ARCHITECTURES[machine]

    def ask(self, name: str, *arguments: int) -> int:
        number = self.numbers[name]
        return decide(self._program, number, *arguments, architecture=self._architecture)

    def ask_number(self, number: int, architecture: int | None = None) -> int:
        found = self._architecture if architecture is None else architecture
        return decide(self._program, number, architecture=found)


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_filter_allows_what_programs_need(machine: str) -> None:
    asked = Filter(machine)
    assert [name for name in NEEDED.split() if asked.ask(name) != 0] == []


@pytest.mark.parametrize("may", [True, False])
def test_filter_refuses_risky_calls_whatever_a_program_may(machine: str, may: bool) -> None:
    asked = Filter(machine, may_signal=may, may_start_processes=may, may_connect=may)
    legacy = LEGACY_REFUSED.split() if machine == "x86_64" else []
    answers = {name: asked.ask(name) for name in [*REFUSED.split(), *legacy]}
    assert answers == dict.fromkeys(answers, errno.EPERM)


def test_filter_refuses_every_call_that_no_list_allows(machine: str) -> None:
    asked = Filter(machine)
    with_rules = {"open", "openat", "clone", "fcntl", "ioctl", "prctl", "prlimit64", "mknod"}
    with_rules |= {"mknodat", "fallocate", "socketpair", "sendto", "sendmsg", "sendmmsg", "tgkill"}
    allowed = {*seccomp.ALWAYS, *seccomp.PROCESSES, *with_rules}
    assert not [n for n in asked.numbers if n not in allowed and asked.ask(n) == 0]


def test_filter_answers_as_a_kernel_without_calls_that_libraries_replace(machine: str) -> None:
    asked = Filter(machine)
    assert {asked.ask(name) for name in MISSING.split()} == {errno.ENOSYS}
    assert asked.ask_number(max(asked.numbers.values()) + 1) == errno.ENOSYS
    assert asked.ask_number(100_000) == errno.ENOSYS


def test_filter_kills_a_program_that_calls_by_numbers_of_another_processor(machine: str) -> None:
    asked = Filter(machine)
    other = ARCHITECTURES[next(one for one in MACHINES if one != machine)]
    assert asked.ask_number(asked.numbers["read"], other) == -1
    if machine == "x86_64":
        assert asked.ask_number(0x40000000) == -1


@pytest.mark.parametrize(
    ("call", "allowed", "refused"),
    [
        # F_DUPFD, F_SETFD, F_SETFL, F_SETLK, F_DUPFD_CLOEXEC; F_SETOWN, F_SETSIG, F_SETOWN_EX,
        # F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ, F_ADD_SEALS, F_SETFL with O_ASYNC
        (
            "fcntl",
            [(3, 0), (3, 2, 1), (3, 4, 0o4000), (3, 6), (3, 1030)],
            [(3, 8), (3, 10), (3, 15), (3, 1024), (3, 1026), (3, 1031), (3, 1033), (3, 4, 0o20000)],
        ),
        # O_RDONLY, O_WRONLY and O_RDWR with O_CREAT and O_TRUNC; O_RDONLY with O_TRUNC
        ("openat", [(0, 0, 0), (0, 0, 0o1101), (0, 0, 0o1102)], [(0, 0, 0o1000), (0, 0, 0o1003)]),
        # SIGCHLD, a thread; CLONE_NEWUSER, CLONE_NEWNET, CLONE_PARENT, CLONE_PTRACE, CLONE_PIDFD
        (
            "clone",
            [(17,), (0x3D0F00,)],
            [(0x10000011,), (0x40000011,), (0x8011,), (0x2011,), (0x1011,)],
        ),
        # PR_SET_NAME, PR_SET_PDEATHSIG; PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_MM, PR_SCHED_CORE,
        # PR_SET_PTRACER
        ("prctl", [(15,), (1,)], [(4,), (22,), (35,), (62,), (0x59616D61,)]),
        ("prlimit64", [(0, 7)], [(OTHER_PID, 7)]),
        # S_IFIFO, S_IFREG, no type; S_IFCHR, S_IFBLK, S_IFSOCK
        (
            "mknodat",
            [(0, 0, 0o10600), (0, 0, 0o100600), (0, 0, 0o600)],
            [(0, 0, 0o20600), (0, 0, 0o60600), (0, 0, 0o140600)],
        ),
        # AF_UNIX with SOCK_STREAM, also SOCK_CLOEXEC; SOCK_DGRAM, SOCK_SEQPACKET, AF_TIPC
        ("socketpair", [(1, 1, 0), (1, 0o2000001, 0)], [(1, 2, 0), (1, 5, 0), (30, 1, 0)]),
        ("sendto", [(3, 0, 0, 0x4000)], [(3, 0, 0, 0x20004000)]),
        ("tgkill", [(OWN_PID, 7, 6)], [(OTHER_PID, OTHER_PID, 9)]),
    ],
)
def test_filter_decides_by_arguments(
    machine: str, call: str, allowed: list[tuple[int, ...]], refused: list[tuple[int, ...]]
) -> None:
    asked = Filter(machine)
    assert {arguments: asked.ask(call, *arguments) for arguments in allowed} == dict.fromkeys(
        allowed, 0
    )
    assert {arguments: asked.ask(call, *arguments) for arguments in refused} == dict.fromkeys(
        refused, errno.EPERM
    )


def test_filter_answers_unknown_requests_as_a_device_or_file_system_would(machine: str) -> None:
    asked = Filter(machine)
    tcgets, fionread, fioclex = 0x5401, 0x541B, 0x5451
    assert [asked.ask("ioctl", 3, one) for one in (tcgets, fionread, fioclex)] == [0, 0, 0]
    tiocsti, fiosetown, siocspgrp, fioasync, set_flags = 0x5412, 0x8901, 0x8902, 0x5452, 0x40086602
    for request in (tiocsti, fiosetown, siocspgrp, fioasync, set_flags):
        assert asked.ask("ioctl", 3, request) == errno.ENOTTY
    assert asked.ask("fallocate", 3, 0) == 0
    assert asked.ask("fallocate", 3, 1) == errno.EOPNOTSUPP


def test_high_bits_of_an_argument_do_not_matter_as_for_the_kernel(machine: str) -> None:
    """The kernel reads these arguments as 32 bits."""
    assert Filter(machine).ask("fcntl", 3, (1 << 32) | 8) == errno.EPERM
    assert Filter(machine).ask("ioctl", 3, (1 << 32) | 0x5412) == errno.ENOTTY


def test_sockets_are_allowed_to_clients_of_tcp_and_udp_only(machine: str) -> None:
    closed, clients = Filter(machine), Filter(machine, may_connect=True)
    # AF_INET and AF_INET6, SOCK_STREAM and SOCK_DGRAM, with and without IPPROTO_TCP and _UDP
    for arguments in [(2, 1, 0), (10, 1, 6), (2, 2, 17), (10, 0o2000002, 0)]:
        assert clients.ask("socket", *arguments) == 0
        assert closed.ask("socket", *arguments) == errno.EPERM
    # AF_UNIX, AF_NETLINK, AF_PACKET, AF_VSOCK, raw, IPPROTO_MPTCP, IPPROTO_SCTP, a ping
    others = [(1, 1, 0), (16, 3, 0), (17, 3, 0), (40, 1, 0), (2, 3, 1), (2, 1, 262), (2, 1, 132)]
    for arguments in [*others, (2, 2, 1), (2, 1, 17)]:
        assert clients.ask("socket", *arguments) == errno.EPERM
    assert (closed.ask("connect"), clients.ask("connect")) == (errno.EPERM, 0)


def test_signals_and_processes_are_refused_unless_allowed(machine: str) -> None:
    none = Filter(machine, may_start_processes=False)
    assert {none.ask(name) for name in ("kill", "tkill", "execve", "execveat")} == {errno.EPERM}
    assert none.ask("clone", 17) == errno.EPERM
    thread = 0x3D0F00  # the flags of a thread by the C library
    assert none.ask("clone", thread) == 0
    assert none.ask("clone", thread | 0x10000000) == errno.EPERM
    signals = Filter(machine, may_signal=True)
    assert {signals.ask(name, OTHER_PID) for name in ("kill", "tkill", "tgkill")} == {0}


def test_lists_name_system_calls_that_exist() -> None:
    known = {name for machine in MACHINES for name in seccomp.read_numbers(machine)}
    listed = {*seccomp.ALWAYS, *seccomp.SIGNALS, *seccomp.PROCESSES, *seccomp.REPLACED}
    assert listed <= known
    assert len(seccomp.ALWAYS) == len(set(seccomp.ALWAYS))


def test_numbers_are_those_of_the_kernels_headers() -> None:
    if not HEADERS.exists():
        pytest.skip("this machine has no headers of the kernel for x86-64")
    defined = dict(re.findall(r"#define __NR_(\w+) (\d+)", HEADERS.read_text()))
    numbers = seccomp.read_numbers("x86_64")
    known = {name: int(number) for name, number in defined.items() if name in numbers}
    assert len(known) > 300
    assert {name: numbers[name] for name in known} == known


def test_unknown_processor_is_refused_by_name() -> None:
    with pytest.raises(OSError, match=r"system calls of riscv64 are not known here"):
        seccomp.assemble("riscv64", own_pid=1, may_signal=False, may_start_processes=False)
