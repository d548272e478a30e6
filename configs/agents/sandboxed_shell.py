"""Runs the bash actions of a coding agent in the sandbox of Relax Events; scores what they leave.

Started as a program by the Python of Relax Events, it keeps the files of one episode: it reads a
JSON object for each action from stdin, a line each, and answers with what the action printed.
`hidden_tests` is the reward: it runs the actions of the policy's turns again, in the same sandbox,
and then hidden tests against the file that they leave. So the reward follows from the log alone.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from relax_events.packages.verifiers.code import code
from relax_events.sandbox import Limits, Sandbox, Verdict, require_isolation

ACTION = re.compile(r"```mswea_bash_command\s*\n(.*?)\n```", re.DOTALL)
"""As mini-swe-agent reads actions; a turn with none or several is refused there."""
FILE = "f.py"
SECONDS = 5.0
MEMORY_BYTES = 512 * 1024**2
LATE = 124
RUNNER = """
import json, os, subprocess, sys
MAX_FILES, MAX_CHARACTERS = 64, 65536
given = json.load(sys.stdin)
os.mkdir("work")
os.chdir("work")
for name, text in given["files"].items():
    with open(name, "w", errors="surrogateescape") as file:
        file.write(text)
ended = subprocess.run(
    ["/bin/bash", "-c", given["command"]], stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
)
files = {}
for name in sorted(os.listdir("."))[:MAX_FILES]:
    if os.path.isfile(name) and not os.path.islink(name):
        with open(name, errors="surrogateescape") as file:
            files[name] = file.read(MAX_CHARACTERS)
output = ended.stdout[:MAX_CHARACTERS]
json.dump({"output": output, "returncode": ended.returncode, "files": files}, sys.stdout)
"""


class SandboxedShell:
    """The files of one episode, and a shell that each action has to itself.

    Attributes:
        files: The text of each file of the folder, by name; at most 64, of 65,536 characters each.
    """

    def __init__(self, files: dict[str, str]) -> None:
        self.files = dict(files)
        self._isolation = require_isolation()

    def run(self, command: str) -> dict[str, Any]:
        """Run a command; return what it printed, stderr included, and its exit code.

        A command that exceeds a limit is killed with all its processes, and changes no file.
        """
        limits = Limits(SECONDS, MEMORY_BYTES)
        with Sandbox(RUNNER, limits, isolation=self._isolation) as sandbox:
            given = json.dumps({"files": self.files, "command": command})
            verdict, printed = sandbox.run_with_input(given)
        if verdict is not Verdict.PASSED:
            text = f"killed: over {SECONDS:g} s, or over another limit of the sandbox\n"
            return {"output": text, "returncode": LATE}
        found = json.loads(printed)
        self.files = found.pop("files")
        return found


def hidden_tests(
    completion: str,
    *,
    answer: str,
    metadata: dict[str, Any],
    prompt: str,
    turns: list[dict[str, str]],
) -> dict[str, float]:
    """Give the share of the hidden tests that pass after the policy's actions."""
    shell = SandboxedShell(metadata["files"])
    num_actions = 0
    for turn in turns:
        actions = ACTION.findall(turn["content"]) if turn["role"] == "assistant" else ()
        if len(actions) == 1:
            shell.run(actions[0].strip())
            num_actions += 1
    program = f"```python\n{shell.files.get(FILE, '')}\n```"
    scores = code(
        program, answer=answer, metadata={}, prompt=prompt, partial=True, limit_reward=0.0
    )
    return scores | {"num_actions": float(num_actions)}


def main() -> None:
    """Serve the actions of one episode; the first line has its files."""
    shell = SandboxedShell(json.loads(sys.stdin.readline())["files"])
    for line in sys.stdin:
        print(json.dumps(shell.run(json.loads(line)["command"])), flush=True)


if __name__ == "__main__":
    main()
