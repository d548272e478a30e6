"""Programs that take more files than the sandbox's limit, or hide them from the count, and hold
them for a while: each must end as a program that exceeded the limits.

A program that ends by itself has held more files than the limit.
"""

from __future__ import annotations

HELD_SECONDS = 37
"""How long a program holds its files; the sandbox must end it earlier."""
HOLD = f"""
time.sleep({HELD_SECONDS})
"""
_CODES = {
    "files of all together": """
import time
for n in range(80):
    with open(f'file{n}', 'wb') as file:
        file.write(bytes(1_500_000))
""",
    "files written by many processes": f"""
import os, time
for n in range(16):
    if os.fork() == 0:
        try:
            for m in range(5):
                with open(f'file{{n}}-{{m}}', 'wb') as file:
                    file.write(bytes(1_500_000))
        except OSError:
            os._exit(1)
        time.sleep({HELD_SECONDS})
        os._exit(0)
for _ in range(16):
    if os.wait()[1]:
        raise MemoryError
""",
    "deleted files": """
import os, time
held = []
for n in range(50):
    file = os.open('file', os.O_CREAT | os.O_RDWR)
    os.unlink('file')
    os.posix_fallocate(file, 0, 1_500_000)
    held.append(file)
""",
    "deleted files of many processes": f"""
import os, time
for n in range(5):
    if os.fork() == 0:
        try:
            for m in range(10):
                file = os.open(f'file{{n}}-{{m}}', os.O_CREAT | os.O_RDWR)
                os.unlink(f'file{{n}}-{{m}}')
                os.posix_fallocate(file, 0, 1_500_000)
        except OSError:
            os._exit(1)
        time.sleep({HELD_SECONDS})
        os._exit(0)
for _ in range(5):
    if os.wait()[1]:
        raise MemoryError
""",
    "nameless files": """
import os, time
held = []
for n in range(50):
    file = os.open('.', os.O_TMPFILE | os.O_RDWR)
    os.posix_fallocate(file, 0, 1_500_000)
    held.append(file)
""",
    "deleted files, closed but mapped": """
import mmap, os, time
held = []
for n in range(60):
    file = os.open('file', os.O_CREAT | os.O_RDWR)
    os.unlink('file')
    os.posix_fallocate(file, 0, 1_500_000)
    held.append(mmap.mmap(file, 1_500_000))
    os.close(file)
""",
    "deleted files of a program that can't be read": f"""
import os, time
sleep = os.open('sleep', os.O_CREAT | os.O_WRONLY, 0o111)
with open('/bin/sleep', 'rb') as file:
    os.write(sleep, file.read())
os.close(sleep)
for n in range(50):
    file = os.open('file', os.O_CREAT | os.O_RDWR)
    os.unlink('file')
    os.posix_fallocate(file, 0, 1_500_000)
    os.set_inheritable(file, True)
os.execv('./sleep', ['sleep', '{HELD_SECONDS}'])
""",
    "one large file": """
import os, time
file = os.open('file', os.O_CREAT | os.O_RDWR)
os.posix_fallocate(file, 0, 80_000_000)
""",
    "6,000 files": """
import os, time
for n in range(6_000):
    os.close(os.open(f'file{n}', os.O_CREAT | os.O_WRONLY))
""",
    "6,000 folders": """
import os, time
for n in range(6_000):
    os.mkdir(f'folder{n}')
""",
    "6,000 links": """
import os, time
for n in range(6_000):
    os.symlink('x', f'link{n}')
""",
    "files in a folder that can't be listed": """
import os, time
os.mkdir('hidden', 0o300)
for n in range(50):
    with open(f'hidden/file{n}', 'wb') as file:
        file.write(bytes(1_500_000))
""",
    "files deeper than a path": """
import os, time
for _ in range(20):
    os.mkdir('x' * 250)
    os.chdir('x' * 250)
for n in range(50):
    with open(f'file{n}', 'wb') as file:
        file.write(bytes(1_500_000))
""",
}
FILE_LIMITS = {name: f"{code}{HOLD}" for name, code in _CODES.items()}
