"""Escapes by files: what a sandboxed program would do to read, change or run files outside its
folder. Landlock, or a private root, stops them.

Each is a block of statements that sets `escaped`; `relax_events.attacks.escapes` describes their
names.
"""

from __future__ import annotations

READS = {
    "a private file of the account": "escaped = open(outside['private']).read()",
    "a file that all may read": "escaped = open(outside['public']).read()",
    "a database of the account": "escaped = open(file('database')).read()",
    "a file by a relative path": "escaped = open(os.path.relpath(outside['public'])).read()",
    "a file by its open folder": (
        "fd = os.open(outside['folder'], os.O_PATH)\n"
        "escaped = os.read(os.open('public', os.O_RDONLY, dir_fd=fd), 9)"
    ),
    "a file from inside its folder": "os.chdir(outside['folder']); escaped = open('public').read()",
    "a file from its open folder": (
        "os.fchdir(os.open(outside['folder'], os.O_PATH)); escaped = open('public').read()"
    ),
    "a file by openat2": (
        "fd = call('openat2', -100, outside['public'].encode(), bytes(24), 24)\n"
        "escaped = fd >= 0 and os.read(fd, 9)"
    ),
    "a file by a path descriptor": (
        "fd = os.open(outside['public'], os.O_PATH)\nescaped = open('/proc/self/fd/%d' % fd).read()"
    ),
    "a file by another program": (
        "escaped = subprocess.run(['cat', outside['public']], capture_output=True).stdout"
    ),
    "a file by a shell": (
        "escaped = subprocess.run(['sh', '-c', 'read line < \"$0\"; echo \"$line\"', "
        "outside['public']], capture_output=True).stdout.strip()"
    ),
    "a file by copying it": (
        "import shutil; shutil.copyfile(outside['public'], 'copy'); escaped = True"
    ),
    "the password file": "escaped = open('/etc/passwd').read()",
    "the group file": "escaped = open('/etc/group').read()",
    "the shadow file": "escaped = open('/etc/shadow').read()",
    "the hosts file": "escaped = open('/etc/hosts').read()",
    "the host's name file": "escaped = open('/etc/hostname').read()",
    "root's home": "escaped = os.listdir('/root')",
    "the account's home": "escaped = os.listdir(outside['home'])",
    "the root folder": (
        "escaped = set(os.listdir('/')) & set(outside['root']) - {'usr', 'lib', 'lib64', 'bin', "
        "'proc', 'dev', 'tmp', 'etc'}"
    ),
    "the temporary folder": "escaped = [n for n in os.listdir('/tmp') if n in outside['tmp']]",
    "a folder of the account": "escaped = os.listdir(outside['folder'])",
    "a folder by scanning it": "escaped = [entry.name for entry in os.scandir(outside['folder'])]",
    "the folder of the sandbox": (
        "escaped = open(os.path.join(os.path.dirname(os.getcwd()), 'solution.py')).read()"
    ),
    "another process's environment": (
        "escaped = b'SECRET_OF_THE_JUDGE' in open('/proc/%d/environ' % victim('read'), 'rb').read()"
    ),
    "the judge's environment": "escaped = open('/proc/%d/environ' % outside['judge'], 'rb').read()",
    "the first process's environment": (
        "escaped = open('/proc/%d/environ' % supervisor, 'rb').read()"
    ),
    "the own environment": "escaped = 'SECRET_OF_THE_JUDGE' in os.environ",
    "the judge's memory": (
        "fd = os.open('/proc/%d/mem' % outside['judge'], os.O_RDONLY)\n"
        "escaped = os.pread(fd, 9, outside['address']) == b'TOPSECRET'"
    ),
    "the judge's memory map": "escaped = open('/proc/%d/maps' % outside['judge']).read()",
    "the judge's files": "escaped = os.listdir('/proc/%d/fd' % outside['judge'])",
    "the judge's folder": "escaped = os.listdir('/proc/%d/cwd' % outside['judge'])",
    "the judge's root": "escaped = os.listdir('/proc/%d/root/etc' % outside['judge'])",
    "the judge's threads": "escaped = os.listdir('/proc/%d/task' % outside['judge'])",
    "the judge's command": "escaped = open('/proc/%d/cmdline' % outside['judge']).read()",
    "other processes": (
        "escaped = os.path.exists('/proc/%d/status' % victim('read')) and "
        "open('/proc/%d/cmdline' % victim('read')).read()"
    ),
    "the machine's connections": (
        "escaped = ':%04X' % outside['port'] in open('/proc/net/tcp').read()"
    ),
    "the machine's local sockets": "escaped = outside['abstract'] in open('/proc/net/unix').read()",
    "a file through the own root": "escaped = open('/proc/self/root' + outside['public']).read()",
    "a file through a link": "os.symlink(outside['public'], 'link'); escaped = open('link').read()",
    "a file through a hard link": (
        "os.link(outside['public'], 'hard'); escaped = open('hard').read()"
    ),
    "a file by renaming it": "os.rename(file('renamed'), 'mine'); escaped = open('mine').read()",
    "a file by exchanging it": (
        "open('mine', 'w').close()\n"
        "escaped = call('renameat2', -100, file('exchanged').encode(), -100, b'mine', 2) == 0"
    ),
    "the private file through an inherited descriptor": (
        "for n in range(3, 64):\n try:\n  escaped = escaped or "
        "os.readlink('/proc/self/fd/%d' % n) == outside['private']\n except OSError: pass\n"
        " try:\n  escaped = escaped or os.pread(n, 9, 0) == b'TOPSECRET'\n except OSError: pass"
    ),
    "the kernel's settings": "escaped = open('/sys/kernel/uevent_helper').read() is not None",
    "a program of the account": "escaped = subprocess.run([outside['script']]).returncode == 0",
    "a program of the account, by its descriptor": (
        "fd = os.open(outside['script'], os.O_PATH); os.set_inheritable(fd, True)\n"
        "if os.fork() == 0: call('execveat', fd, b'', None, None, 0x1000); os._exit(9)\n"
        "escaped = os.waitstatus_to_exitcode(os.wait()[1]) == 0"
    ),
}
WRITES = {
    "the account's home": (
        "open(os.path.join(outside['home'], '.relax-escape'), 'w').write('x'); escaped = True"
    ),
    "a file of the account": "open(file('written'), 'w').write('x'); escaped = True",
    "the end of a file": "open(file('appended'), 'a').write('x'); escaped = True",
    "a file in place": "escaped = os.write(os.open(file('written'), os.O_RDWR), b'x')",
    "a new file": "open(file('new'), 'x').write('x'); escaped = True",
    "a new file by its open folder": (
        "fd = os.open(outside['folder'], os.O_PATH)\n"
        "os.open('new too', os.O_CREAT | os.O_WRONLY, dir_fd=fd); escaped = True"
    ),
    "a nameless file": "os.open(outside['folder'], os.O_TMPFILE | os.O_RDWR); escaped = True",
    "a file by another program": (
        "escaped = subprocess.run(['sh', '-c', 'echo x > \"$0\"', file('written')]).returncode == 0"
    ),
    "a new folder": "os.mkdir(file('folder of a program')); escaped = True",
    "a new link": "os.symlink('/', file('link of a program')); escaped = True",
    "a new pipe": "os.mkfifo(file('pipe of a program')); escaped = True",
    "an own file, moved out": (
        "open('mine', 'w').close(); os.rename('mine', file('moved out')); escaped = True"
    ),
    "an own file, linked out": (
        "open('mine', 'w').close(); os.link('mine', file('linked out')); escaped = True"
    ),
    "another name": "os.rename(file('named'), file('named otherwise')); escaped = True",
    "another place of a file": (
        "os.link(file('linked'), file('linked elsewhere')); escaped = True"
    ),
    "shared memory": "open('/dev/shm/relax-escape', 'w').write('x'); escaped = 'shm'",
    "the other temporary folder": "open('/var/tmp/relax-escape', 'w').write('x'); escaped = True",
    "the packages": (
        "open(os.path.join(outside['packages'], 'relax_escape.py'), 'w').write('x'); escaped = True"
    ),
    "the program inside": "open(outside['inside'], 'a').write('#'); escaped = True",
    "the judge's memory": "escaped = open('/proc/%d/mem' % outside['judge'], 'wb')",
    "deleting": "os.unlink(file('deletable')); escaped = True",
    "deleting by the open folder": (
        "fd = os.open(outside['folder'], os.O_PATH)\n"
        "os.unlink('deletable too', dir_fd=fd); escaped = True"
    ),
    "deleting a folder": "os.rmdir(file('deletable folder')); escaped = True",
    "emptying while opening": "os.open(file('emptied'), os.O_WRONLY | os.O_TRUNC); escaped = True",
}
