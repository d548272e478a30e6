"""Runs mini-swe-agent 2.4 on the task of an episode: its own command line, agent, model class and
prompts, with the gateway as its API and the sandbox of Relax Events as its environment.

    mini_swe.py PYTHON

PYTHON is that of Relax Events; this program runs in one that has mini-swe-agent. The row's metadata
has `files`, the text of each file of the agent's folder by name.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

os.environ |= {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",  # else it is downloaded
}

from minisweagent.environments.local import LocalEnvironment
from minisweagent.run.mini import app

SHELL = Path(__file__).with_name("sandboxed_shell.py")
MAX_STEPS = "6"


class SandboxedEnvironment(LocalEnvironment):
    """mini-swe-agent's local environment, except that each action runs in the sandbox."""

    def __init__(self, **settings):
        super().__init__(**settings)
        Path.home().chmod(0o711)  # the sandbox's own user must reach its folder in ours
        self._shell = subprocess.Popen(
            [sys.argv[1], "-P", str(SHELL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._send({"files": read_task()["metadata"]["files"]})

    def execute(self, action, cwd="", *, timeout=None):
        """Run one action; the sandbox has its own limits."""
        self._send({"command": action.get("command", "")})
        line = self._shell.stdout.readline()
        if not line:
            raise RuntimeError("the sandbox has ended")
        output = json.loads(line) | {"exception_info": ""}
        self._check_finished(output)
        return output

    def _send(self, message):
        self._shell.stdin.write(json.dumps(message) + "\n")
        self._shell.stdin.flush()


def read_task():
    """Return the task of the episode."""
    return json.loads(Path(os.environ["RELAX_TASK_FILE"]).read_text())


def main():
    """Call mini-swe-agent's command line."""
    settings = {
        "agent.cost_limit": "0",
        "agent.step_limit": MAX_STEPS,
        "model.cost_tracking": "ignore_errors",
        "model.model_kwargs.api_base": os.environ["OPENAI_BASE_URL"],
        "model.model_kwargs.api_key": os.environ["OPENAI_API_KEY"],
    }
    app(
        [
            *("--task", read_task()["messages"][-1]["content"]),
            *("--model", f"openai/{os.environ['OPENAI_MODEL']}"),
            *("--model-class", "litellm_textbased"),
            *("--environment-class", "mini_swe.SandboxedEnvironment"),
            *("--yolo", "--exit-immediately", "--output", "trajectory.json"),
            *("--config", "mini_textbased.yaml"),
            *(word for name, value in settings.items() for word in ("--config", f"{name}={value}")),
        ]
    )


if __name__ == "__main__":
    main()
