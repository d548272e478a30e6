"""Escapes by system calls: what a sandboxed program would do to reach the network, other processes
and rarely used parts of the kernel, and to change files without opening them. The filter of system
calls stops them.

Each is a block of statements that sets `escaped`; `relax_events.attacks.escapes` describes their
names.
"""

from __future__ import annotations

SIGNAL_BY_FILE = (
    "a, b = socket.socketpair()\n"
    "fcntl.fcntl(a, fcntl.F_SETSIG, 9)\n"
    "{owner}\n"
    "fcntl.fcntl(a, fcntl.F_SETFL, fcntl.fcntl(a, fcntl.F_GETFL) | 0x2000)\n"
    "b.send(b'x'); escaped = True"
)
CHANGES = {
    "truncating": "os.truncate(file('truncated'), 0); escaped = True",
    "truncating a readable file": (
        "os.close(os.open(outside['readable'], os.O_RDONLY | os.O_TRUNC)); escaped = True"
    ),
    "a mode": "os.chmod(outside['public'], 0o666); escaped = True",
    "a mode of an open file": "os.fchmod(os.open(outside['readable'], 0), 0o666); escaped = True",
    "a mode by fchmodat2": (
        "escaped = call('fchmodat2', -100, outside['public'].encode(), 0o666, 0) == 0"
    ),
    "an owner": "os.chown(outside['public'], os.getuid(), os.getgid()); escaped = True",
    "an owner of a link": "os.lchown(outside['public'], os.getuid(), os.getgid()); escaped = True",
    "a time": "os.utime(outside['public'], (1, 1)); escaped = True",
    "a time of an open file": "os.utime(os.open(outside['readable'], 0), (1, 1)); escaped = True",
    "an attribute": "os.setxattr(outside['public'], 'user.x', b'1'); escaped = True",
    "an attribute by setxattrat": (
        "value = ctypes.create_string_buffer(b'1', 1)\n"
        "attribute = struct.pack('QII', ctypes.addressof(value), 1, 0)\n"
        "escaped = call('setxattrat', -100, outside['public'].encode(), 0, b'user.y', "
        "attribute, 16) == 0"
    ),
    "a removed attribute": "os.removexattr(file('attributed'), 'user.relax'); escaped = True",
    "flags of a file": (
        "fd = os.open(outside['readable'], 0); flags = bytearray(8)\n"
        "fcntl.ioctl(fd, 0x80086601, flags); fcntl.ioctl(fd, 0x40086602, flags); escaped = True"
    ),
    "flags by file_setattr": (
        "escaped = call('file_setattr', -100, outside['public'].encode(), bytes(24), 24, 0) == 0"
    ),
    "a lease": "fcntl.fcntl(os.open(outside['readable'], 0), 1024, 0); escaped = True",
    "a watch on a folder": (
        "fcntl.fcntl(os.open(outside['folder'], 0), fcntl.F_NOTIFY, 2); escaped = True"
    ),
    "a watch on a file": (
        "fd = call('inotify_init1', 0)\n"
        "escaped = call('inotify_add_watch', fd, outside['public'].encode(), 2) >= 0"
    ),
    "watches on a file system": "escaped = call('fanotify_init', 0x200, 0) >= 0",
    "files by their handles": (
        "handle, mount = ctypes.create_string_buffer(struct.pack('Ii', 128, 0), 144), bytes(8)\n"
        "escaped = call('name_to_handle_at', -100, outside['public'].encode(), handle, mount, 0)"
        " == 0"
    ),
    "a file by its handle": (
        "escaped = call('open_by_handle_at', -100, struct.pack('Ii', 8, 1) + bytes(8), 0) >= 0"
    ),
    "a device": "os.mknod('device', 0o20666, os.makedev(1, 1)); escaped = True",
    "a mount": "escaped = call('mount', b'none', b'.', b'tmpfs', 0, 0) == 0",
    "a mount by its file system": "escaped = call('fsopen', b'tmpfs', 0) >= 0",
    "a copy of a mount": "escaped = call('open_tree', -100, b'/', 1) >= 0",
    "the mounts": (
        "request = struct.pack('IIQQQ', 24, 0, 2 ** 64 - 1, 0, 0)[:24]\n"
        "escaped = call('listmount', request, bytes(800), 100, 0) > 0"
    ),
    "another root": "os.chroot('.'); escaped = True",
    "space beyond the limit on a file's size": (
        "fd = os.open('large', os.O_CREAT | os.O_RDWR)\n"
        "escaped = call('fallocate', fd, 1, 0, 40 * 1024 ** 2) == 0"
    ),
    "all of the machine's files, written to disk": (
        "escaped = call('syncfs', os.open('.', os.O_RDONLY)) == 0"
    ),
}
SOCKETS = {
    "TCP": "escaped = socket.create_connection(('127.0.0.1', outside['port']), 2)",
    "TCP over IPv6": "escaped = socket.create_connection(('::1', outside['port6']), 2)",
    "TCP with the first data": (
        "s = socket.socket()\nescaped = s.sendto(b'x', 0x20000000, ('127.0.0.1', outside['port']))"
    ),
    "TCP over several paths": (
        "s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)\n"
        "s.connect(('127.0.0.1', outside['port'])); escaped = s"
    ),
    "SCTP": "escaped = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132)",
    "UDP": (
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', "
        "outside['udp'])); escaped = 'udp'"
    ),
    "UDP over IPv6": "escaped = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
    "a ping": "escaped = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1)",
    "a raw socket": "escaped = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "a packet socket": "escaped = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "netlink": "escaped = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "the hypervisor": "escaped = socket.socket(40, socket.SOCK_STREAM)",
    "the kernel's ciphers": "escaped = socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    "a socket of another family": (
        "for family in (15, 21, 29, 30, 31, 43, 44, 45):\n"
        " try: escaped = socket.socket(family, 1)\n"
        " except OSError: pass\n"
        " try: escaped = escaped or socket.socket(family, 2)\n except OSError: pass"
    ),
    "a socket on a path": (
        "s = socket.socket(socket.AF_UNIX); s.connect(outside['socket']); escaped = s"
    ),
    "an abstract socket": (
        "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + outside['abstract']); escaped = s"
    ),
    "a datagram to a path": (
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', "
        "outside['datagrams']); escaped = True"
    ),
    "a packet socket of a path": (
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); escaped = True"
    ),
    "listening": "s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen(); escaped = s",
    "listening on a path": (
        "s = socket.socket(socket.AF_UNIX); s.bind('own'); s.listen(); escaped = s"
    ),
    "listening on an abstract name": (
        "s = socket.socket(socket.AF_UNIX); s.bind('\\0relax-escape'); s.listen(); escaped = s"
    ),
    "io_uring": "escaped = call('io_uring_setup', 4, ctypes.create_string_buffer(120)) >= 0",
    "old asynchronous input": "escaped = call('io_setup', 8, ctypes.create_string_buffer(8)) == 0",
}
PROCESSES = {
    "ending another process": "os.kill(victim('kill'), 9); escaped = True",
    "ending a group of processes": "os.killpg(victim('killpg'), 9); escaped = True",
    "a signal to the judge": "os.kill(outside['judge'], 0); escaped = True",
    "ending the first process inside": ("os.kill(supervisor, 0); escaped = supervisor != 1"),
    "a signal to a thread": "escaped = call('tgkill', victim('tgkill'), victim('tgkill'), 9) == 0",
    "a signal to any thread": "escaped = call('tkill', victim('tkill'), 9) == 0",
    "a queued signal": (
        "details = struct.pack('iiii', 9, 0, -1, 0) + bytes(112)\n"
        "escaped = call('rt_sigqueueinfo', victim('queue'), 9, details) == 0"
    ),
    "a queued signal to a thread": (
        "details = struct.pack('iiii', 9, 0, -1, 0) + bytes(112)\n"
        "escaped = call('rt_tgsigqueueinfo', victim('tgqueue'), victim('tgqueue'), 9, details) == 0"
    ),
    "a signal by a descriptor": (
        "fd = call('pidfd_open', victim('pidfd'), 0)\n"
        "escaped = fd >= 0 and call('pidfd_send_signal', fd, 9, 0, 0) == 0"
    ),
    "a signal by a socket's owner": SIGNAL_BY_FILE.format(
        owner="fcntl.fcntl(a, fcntl.F_SETOWN, victim('F_SETOWN'))"
    ),
    "a signal by a socket's group": SIGNAL_BY_FILE.format(
        owner="fcntl.fcntl(a, fcntl.F_SETOWN, -victim('F_SETOWN group'))"
    ),
    "a signal by a socket's extended owner": SIGNAL_BY_FILE.format(
        owner="fcntl.fcntl(a, 15, struct.pack('ii', 1, victim('F_SETOWN_EX')))"
    ),
    "a signal by FIOSETOWN": SIGNAL_BY_FILE.format(
        owner="fcntl.ioctl(a, 0x8901, struct.pack('i', victim('FIOSETOWN')))"
    ),
    "a signal by SIOCSPGRP": SIGNAL_BY_FILE.format(
        owner="fcntl.ioctl(a, 0x8902, struct.pack('i', victim('SIOCSPGRP')))"
    ),
    "a signal by a pipe's owner": (
        "a, b = os.pipe(); fcntl.fcntl(a, fcntl.F_SETSIG, 9)\n"
        "fcntl.fcntl(a, fcntl.F_SETOWN, victim('pipe'))\n"
        "fcntl.fcntl(a, fcntl.F_SETFL, 0x2000); os.write(b, b'x'); escaped = True"
    ),
    "a socket's owner alone": (
        "a, b = socket.socketpair(); fcntl.fcntl(a, fcntl.F_SETOWN, victim('read')); escaped = True"
    ),
    "a socket's signal alone": (
        "a, b = socket.socketpair(); fcntl.fcntl(a, fcntl.F_SETSIG, 9); escaped = True"
    ),
    "signals by FIOASYNC": (
        "a, b = socket.socketpair(); fcntl.ioctl(a, 0x5452, struct.pack('i', 1)); escaped = True"
    ),
    "another's descriptor": (
        "fd = call('pidfd_open', outside['judge'], 0)\n"
        "escaped = fd >= 0 and call('pidfd_getfd', fd, 0, 0) >= 0"
    ),
    "a descriptor of a process": "escaped = call('pidfd_open', victim('read'), 0) >= 0",
    "tracing": "escaped = call('ptrace', 16, victim('traced'), 0, 0) == 0",
    "tracing without a stop": "escaped = call('ptrace', 0x4206, victim('seized'), 0, 0) == 0",
    "reading memory": (
        "there = ctypes.create_string_buffer(9)\n"
        "local = struct.pack('PN', ctypes.addressof(there), 9)\n"
        "remote = struct.pack('PN', outside['address'], 9)\n"
        "escaped = call('process_vm_readv', outside['judge'], local, 1, remote, 1, 0) == 9"
    ),
    "writing memory": (
        "here = ctypes.create_string_buffer(b'TOPSECRET', 9)\n"
        "local = struct.pack('PN', ctypes.addressof(here), 9)\n"
        "remote = struct.pack('PN', outside['address'], 9)\n"
        "escaped = call('process_vm_writev', outside['judge'], local, 1, remote, 1, 0) == 9"
    ),
    "comparing processes": (
        "escaped = call('kcmp', outside['judge'], victim('read'), 0, 0, 0) >= 0"
    ),
    "another's locks": (
        "head, size = ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)\n"
        "escaped = call('get_robust_list', outside['judge'], head, size) == 0"
    ),
    "another's memory nodes": (
        "nodes = struct.pack('Q', 1)\n"
        "escaped = call('migrate_pages', victim('read'), 64, nodes, nodes) >= 0"
    ),
    "another's pages": (
        "page, status = struct.pack('Q', outside['address']), ctypes.create_string_buffer(8)\n"
        "escaped = call('move_pages', outside['judge'], 1, page, None, status, 0) >= 0"
    ),
    "a limit of another": (
        "import resource; escaped = resource.prlimit(victim('read'), resource.RLIMIT_NOFILE, "
        "(9, 9)) is not None"
    ),
    "limits of another, read": (
        "import resource; escaped = resource.prlimit(victim('read'), resource.RLIMIT_AS)"
    ),
    "a priority of another": "os.setpriority(os.PRIO_PROCESS, victim('read'), 19); escaped = True",
    "a disk priority of another": (
        "escaped = call('ioprio_set', 1, victim('read'), (3 << 13)) == 0"
    ),
    "a processor of another": "os.sched_setaffinity(victim('read'), {0}); escaped = True",
    "a scheduler of another": (
        "os.sched_setscheduler(victim('read'), os.SCHED_BATCH, os.sched_param(0)); escaped = True"
    ),
    "a scheduler of another by sched_setattr": (
        "escaped = call('sched_setattr', victim('read'), struct.pack('IIQiIQQQ', 48, 3, 0, 19, 0, "
        "0, 0, 0), 0) == 0"
    ),
    "a brother": (
        "pid = call('clone', 0x8000 | 17, 0, 0, 0, 0)\nif pid == 0: os._exit(0)\nescaped = pid > 0"
    ),
    "hiding from the count of files": "escaped = call('prctl', 4, 0, 0, 0, 0) == 0",
    "another's permission to trace": "escaped = call('prctl', 0x59616d61, -1, 0, 0, 0) == 0",
    "a processor of its own": "escaped = call('prctl', 62, 1, 0, 0, 0) == 0",
}
SHARED = {
    "a shared segment, new": "escaped = call('shmget', 0, 4096, 0o1666) >= 0",
    "a shared segment, read": (
        "escaped = call('shmat', outside['segment'], 0, 0o10000) not in (-1, 0)"
    ),
    "a shared segment, deleted": "escaped = call('shmctl', outside['segment'], 0, 0) == 0",
    "semaphores, new": "escaped = call('semget', 0, 1, 0o1666) >= 0",
    "semaphores, changed": (
        "escaped = call('semop', outside['semaphores'], struct.pack('Hhh', 0, 1, 0), 1) == 0"
    ),
    "semaphores, changed with a deadline": (
        "escaped = call('semtimedop', outside['semaphores'], struct.pack('Hhh', 0, 1, 0), 1, None)"
        " == 0"
    ),
    "semaphores, deleted": "escaped = call('semctl', outside['semaphores'], 0, 0, 0) == 0",
    "a queue, new": "escaped = call('msgget', 0, 0o1666) >= 0",
    "a queue, written": (
        "escaped = call('msgsnd', outside['queue'], struct.pack('q', 1) + b'x', 1, 0o4000) == 0"
    ),
    "a queue, read": (
        "escaped = call('msgrcv', outside['queue'], ctypes.create_string_buffer(16), 8, 0, 0o4000)"
        " >= 0"
    ),
    "a queue, deleted": "escaped = call('msgctl', outside['queue'], 0, 0) == 0",
    "a named queue, opened": (
        "escaped = call('mq_open', outside['named_queue'].encode(), 2, 0, 0) >= 0"
    ),
    "a named queue, deleted": "escaped = call('mq_unlink', outside['named_queue'].encode()) == 0",
}
KERNEL = {
    "a user namespace": "escaped = call('unshare', 0x10000000) == 0",
    "a mount namespace": "escaped = call('unshare', 0x00020000) == 0",
    "a network namespace": "escaped = call('unshare', 0x40000000) == 0",
    "a time namespace": "escaped = call('unshare', 0x80) == 0",
    "a namespace by clone": (
        "pid = call('clone', 0x10000000 | 17, 0, 0, 0, 0)\nif pid == 0: os._exit(0)\nescaped "
        "= pid > 0"
    ),
    "a namespace by clone3": (
        "flags = struct.pack('QQQQQQQQ', 0x10000000, 0, 0, 0, 17, 0, 0, 0)\n"
        "pid = call('clone3', flags, 64)\nif pid == 0: os._exit(0)\nescaped = pid > 0"
    ),
    "another's namespace": (
        "escaped = call('setns', os.open('/proc/%d/ns/net' % outside['judge'], 0), 0) == 0"
    ),
    "keys": "escaped = call('add_key', b'user', b'relax', b'x', 1, -3) > 0",
    "a keyring": "escaped = call('keyctl', 0, -3, 1) > 0",
    "a requested key": (
        "escaped = call('request_key', b'keyring', b'_uid.%d' % os.getuid(), None, 0) > 0"
    ),
    "bpf": "escaped = call('bpf', 0, struct.pack('IIII', 2, 4, 8, 1) + bytes(56), 72) >= 0",
    "performance counters": (
        "counter = struct.pack('IIQQQQQ', 1, 112, 1, 0, 0, 0, 0x60) + bytes(64)\n"
        "escaped = call('perf_event_open', counter, 0, -1, -1, 0) >= 0"
    ),
    "user faults": "escaped = call('userfaultfd', 1) >= 0",
    "anonymous files": "escaped = call('memfd_create', b'x', 0) >= 0",
    "secret memory": "escaped = call('memfd_secret', 0) >= 0",
    "memory in pipes": "escaped = fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)",
    "memory given to a pipe": (
        "page = ctypes.create_string_buffer(4096)\n"
        "area = struct.pack('PN', ctypes.addressof(page), 4096)\n"
        "escaped = call('vmsplice', os.pipe()[1], area, 1, 0) > 0"
    ),
    "another personality": "escaped = call('personality', 0x0040000) >= 0",
    "a filter of its own": ("escaped = call('seccomp', 2, 0, struct.pack('I', 0x7fff0000)) == 0"),
    "a filter that asks a process": (
        "escaped = call('prctl', 22, 2, None, 0, 0) == -1 and ctypes.get_errno() == 14"
    ),
    "input into a terminal": (
        "a, b = os.openpty(); os.setsid(); fcntl.ioctl(b, 0x540E, 0)\n"
        "fcntl.ioctl(b, 0x5412, b'x'); escaped = True"
    ),
    "becoming root": "os.setuid(0); escaped = os.listdir('/root')",
    "capabilities": (
        "data = ctypes.create_string_buffer(24)\n"
        "call('capget', struct.pack('Ii', 0x20080522, 0), data); escaped = any(data.raw[:4])"
    ),
    "new privileges": (
        "escaped = subprocess.run(['/usr/bin/su', '-c', 'id'], capture_output=True, "
        "timeout=3).returncode == 0"
    ),
    "a host's name": "socket.sethostname('x'); escaped = True",
    "the clock": "escaped = call('clock_settime', 0, bytes(16)) == 0",
    "a module": "escaped = call('init_module', bytes(8), 8, b'') == 0",
    "accounting": "escaped = call('acct', None) == 0",
    "the kernel's log": "escaped = call('syslog', 3, ctypes.create_string_buffer(4096), 4096) > 0",
    "the 32-bit calls": "escaped = ctypes.CDLL(None).syscall(0x40000000 | 39) > 0",
}
