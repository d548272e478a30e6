"""Attempts to escape from a sandbox, as programs would make them: each block of statements sets
`escaped` when it succeeds.

They are given `outside`: paths, ports and process ids outside the sandbox. A helper `call` makes a
raw system call.
"""

from __future__ import annotations

import time

import psutil

LEFT_SECONDS = 60.0

READS = {
    "a private file of the account": "escaped = open(outside['private']).read()",
    "a file that all may read": "escaped = open(outside['public']).read()",
    "the password file": "escaped = open('/etc/passwd').read()",
    "the shadow file": "escaped = open('/etc/shadow').read()",
    "the host's name file": "escaped = open('/etc/hostname').read()",
    "root's home": "escaped = os.listdir('/root')",
    "the account's home": "escaped = os.listdir(outside['home'])",
    "the root folder": (
        "escaped = set(os.listdir('/')) & set(outside['root']) - {'usr', 'lib', 'lib64', 'bin', "
        "'proc', 'dev', 'tmp', 'etc'}"
    ),
    "the temporary folder": "escaped = [n for n in os.listdir('/tmp') if n in outside['tmp']]",
    "the folder that all boxes lie in": "escaped = open(os.path.join(os.path.dirname(os.getcwd()), 'solution.py')).read()",
    "the judge's environment": (
        "escaped = b'SECRET_OF_THE_JUDGE' in open('/proc/%d/environ' % outside['judge'], "
        "'rb').read()"
    ),
    "the first process's environment": "escaped = b'SECRET_OF_THE_JUDGE' in open('/proc/1/environ', 'rb').read()",
    "the parent's environment": "escaped = b'SECRET_OF_THE_JUDGE' in open('/proc/%d/environ' % os.getppid(), 'rb').read()",
    "the own environment": "escaped = 'SECRET_OF_THE_JUDGE' in os.environ",
    "the judge's memory": "escaped = open('/proc/%d/mem' % outside['judge'], 'rb')",
    "the judge's files": "escaped = os.listdir('/proc/%d/fd' % outside['judge'])",
    "other processes": (
        "escaped = os.path.exists('/proc/%d/status' % outside['victim']) and "
        "open('/proc/%d/cmdline' % outside['victim']).read()"
    ),
    "the private file through the own root": "escaped = open('/proc/self/root' + outside['private']).read()",
    "the private file through a link": "os.symlink(outside['private'], 'link'); escaped = open('link').read()",
    "the private file through a hard link": "os.link(outside['private'], 'hard'); escaped = open('hard').read()",
    "the private file by renaming it": "os.rename(outside['private'], 'mine'); escaped = open('mine').read()",
    "the private file through an inherited descriptor": (
        "for n in range(3, 64):\n try:\n  escaped = escaped or "
        "os.readlink('/proc/self/fd/%d' % n) == outside['private']\n except OSError: pass\n"
        " try:\n  escaped = escaped or os.pread(n, 9, 0) == b'TOPSECRET'\n except OSError: pass"
    ),
    "files by their handles": (
        "escaped = call(303, -100, outside['private'].encode(), b'\\x80\\0\\0\\0' + bytes(136), "
        "bytes(8), 0) == 0"
    ),
    "the kernel's settings": "escaped = open('/sys/kernel/uevent_helper').read() is not None",
    "the kernel's log": "escaped = call(103, 3, bytes(4096), 4096) > 0",
}
WRITES = {
    "the account's home": "open(os.path.join(outside['home'], '.profile'), 'w').write('x'); escaped = True",
    "the temporary folder": (
        "open(outside['tmp_file'], 'w').write('x'); escaped = "
        "os.path.exists(outside['tmp_file']) and 'host'"
    ),
    "shared memory": "open('/dev/shm/relax-escape', 'w').write('x'); escaped = 'shm'",
    "the packages": "open(os.path.join(outside['packages'], 'evil.py'), 'w').write('x'); escaped = True",
    "the program inside": "open(outside['inside'], 'a').write('#'); escaped = True",
    "truncating": "os.truncate(outside['private'], 0); escaped = True",
    "deleting": "os.unlink(outside['deletable']); escaped = True",
    "a mode": "os.chmod(outside['private'], 0o666); escaped = True",
    "an owner": "os.chown(outside['private'], os.getuid(), os.getgid()); escaped = True",
    "a time": "os.utime(outside['private'], (1, 1)); escaped = True",
    "an attribute": "os.setxattr(outside['private'], 'user.x', b'1'); escaped = True",
    "a device": "os.mknod('device', 0o20666, os.makedev(1, 1)); escaped = open('device', 'rb')",
    "a mount": "escaped = call(165, b'none', b'.', b'tmpfs', 0, 0) == 0",
    "another root": "os.chroot('.'); escaped = True",
}
SOCKETS = {
    "TCP": "escaped = socket.create_connection(('127.0.0.1', outside['port']), 2)",
    "TCP over IPv6": "escaped = socket.create_connection(('::1', outside['port']), 2)",
    "UDP": (
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', "
        "outside['udp'])); escaped = 'udp'"
    ),
    "a raw socket": "escaped = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "a packet socket": "escaped = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "netlink": "escaped = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "the kernel's ciphers": "escaped = socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    "a socket on a path": "s = socket.socket(socket.AF_UNIX); s.connect(outside['socket']); escaped = s",
    "an abstract socket": "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + outside['abstract']); escaped = s",
    "a datagram to a path": (
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', "
        "outside['datagrams']); escaped = True"
    ),
    "listening": "s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen(); escaped = s",
    "io_uring": "escaped = call(425, 4, bytes(120)) >= 0",
}
PROCESSES = {
    "ending another process": "os.kill(outside['victim'], 15); escaped = True",
    "ending the judge": "os.kill(outside['judge'], 0); escaped = True",
    "ending the first process inside": "os.kill(supervisor, 9); escaped = supervisor != 1",
    "a signal to a thread": "escaped = call(234, outside['victim'], outside['victim'], 15) == 0",
    "a signal by a descriptor": "fd = call(434, outside['victim'], 0); escaped = fd >= 0 and call(424, fd, 15, 0, 0) == 0",
    "another's descriptor": "fd = call(434, outside['judge'], 0); escaped = fd >= 0 and call(438, fd, 1, 0) >= 0",
    "tracing": "escaped = call(101, 16, outside['victim'], 0, 0) == 0",
    "reading memory": "escaped = call(310, outside['judge'], bytes(16), 1, bytes(16), 1, 0) > 0",
    "a limit of another": (
        "import resource; escaped = resource.prlimit(outside['victim'], resource.RLIMIT_NOFILE, "
        "(1, 1)) is not None"
    ),
    "a priority of another": "os.setpriority(os.PRIO_PROCESS, outside['victim'], 19); escaped = True",
    "a processor of another": "os.sched_setaffinity(outside['victim'], {0}); escaped = True",
}
KERNEL = {
    "a user namespace": "escaped = call(272, 0x10000000) == 0",
    "a mount namespace": "escaped = call(272, 0x00020000) == 0",
    "a namespace by clone": "pid = call(56, 0x10000000 | 17, 0, 0, 0, 0)\nif pid == 0: os._exit(0)\nescaped = pid > 0",
    "another's namespace": "escaped = call(308, os.open('/proc/%d/ns/net' % outside['judge'], 0), 0) == 0",
    "keys": "escaped = call(248, b'user', b'relax', b'x', 1, -3) > 0",
    "bpf": "escaped = call(321, 0, bytes(72), 72) >= 0",
    "performance counters": "escaped = call(298, bytes(120), 0, -1, -1, 0) >= 0",
    "user faults": "escaped = call(323, 1) >= 0",
    "anonymous files": "escaped = call(319, b'x', 0) >= 0",
    "shared segments": "escaped = call(29, 0, 4096, 0o1666) >= 0",
    "message queues": "escaped = call(68, 0, 0o1666) >= 0",
    "becoming root": "os.setuid(0); escaped = os.listdir('/root')",
    "capabilities": (
        "escaped = int([l for l in open('/proc/self/status') if "
        "l.startswith('CapEff')][0].split()[1], 16) != 0"
    ),
    "new privileges": (
        "escaped = subprocess.run(['/usr/bin/su', '-c', 'id'], capture_output=True, "
        "timeout=3).returncode == 0"
    ),
    "a host's name": "socket.sethostname('x'); escaped = True",
    "the clock": "escaped = call(227, 0, bytes(16)) == 0",
    "the 32-bit calls": "escaped = call(0x40000000 | 41, 2, 1, 0) >= 0",
}
ESCAPES = {
    **{f"read: {name}": code for name, code in READS.items()},
    **{f"write: {name}": code for name, code in WRITES.items()},
    **{f"socket: {name}": code for name, code in SOCKETS.items()},
    **{f"process: {name}": code for name, code in PROCESSES.items()},
    **{f"kernel: {name}": code for name, code in KERNEL.items()},
}
ATTEMPTS = """
import ctypes, json, os, resource, socket, subprocess, sys, time
outside, attempts = json.loads(sys.stdin.readline()), json.loads(sys.stdin.readline())
supervisor = os.getppid()
def call(number, *arguments):
    return ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
for name, code in attempts.items():
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        scope = {**globals(), "escaped": None}
        try:
            exec(code, scope)
        except BaseException:
            pass
        os._exit(3 if scope["escaped"] else 0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3:
        print("ESCAPED", name)
print("tried", len(attempts))
"""


def programs_left() -> list[str]:
    """Return the command lines of our programs, or of orphans, that have not ended within a few
    seconds; other users' programs are ignored."""
    deadline = time.monotonic() + LEFT_SECONDS
    while (found := _programs()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _programs() -> list[str]:
    ours = {process.pid for process in psutil.Process().children(recursive=True)}
    found = []
    for process in psutil.process_iter(["cmdline", "ppid", "status"]):
        is_program = any(
            one.endswith("sandbox/inside/entry.py") for one in process.info["cmdline"] or ()
        )
        if (
            is_program
            and process.info["status"] != psutil.STATUS_ZOMBIE
            and (process.pid in ours or process.info["ppid"] == 1)
        ):
            found.append(" ".join(process.info["cmdline"]))
    return found
