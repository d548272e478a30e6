"""A coding agent of an ordinary kind: it knows OpenAI's chat API and nothing of the training.

It asks the model for a function, runs it against the task's visible test in a process of its own,
with limits on time, memory and files, and asks once more if the test fails. It needs nothing but
Python's standard library.
"""

import http.client
import json
import os
import re
import resource
import subprocess
import sys
import time
from urllib.parse import urlsplit

MAX_TRIES = 2
MAX_CALLS = 5
TEST_SECONDS = 5
TEST_BYTES = 256 * 1024**2
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
FAILED = "A test fails."


def ask(messages):
    """Return the model's next message; a busy server is asked again."""
    base = urlsplit(os.environ["OPENAI_BASE_URL"])
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    for _ in range(MAX_CALLS):
        connection = http.client.HTTPConnection(base.hostname, base.port, timeout=600)
        connection.request("POST", f"{base.path}/chat/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        answer = json.load(reply)
        connection.close()
        if reply.status == 200:
            return answer["choices"][0]["message"]
        if reply.status not in (429, 503):
            break
        time.sleep(float(reply.headers.get("Retry-After", "1")))
    raise SystemExit(f"the model answers {reply.status}: {answer['error']['message']}")


def set_limits():
    """Limit the process that runs the model's code."""
    resource.setrlimit(resource.RLIMIT_CPU, (TEST_SECONDS, TEST_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (TEST_BYTES, TEST_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def passes(content, test):
    """Return whether the last Python block of a message passes a test."""
    blocks = BLOCK.findall(content or "")
    if not blocks:
        return False
    with open("attempt.py", "w") as file:
        file.write(f"{blocks[-1]}\n{test}\n")
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-S", "attempt.py"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            timeout=TEST_SECONDS,
            preexec_fn=set_limits,
        )
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode == 0


def main():
    """Solve the task of this episode."""
    with open(os.environ["RELAX_TASK_FILE"]) as file:
        task = json.load(file)
    messages = task["messages"]
    for _ in range(MAX_TRIES):
        message = ask(messages)
        if passes(message["content"], task["metadata"]["visible_test"]):
            return
        messages += [message, {"role": "user", "content": FAILED}]


main()
