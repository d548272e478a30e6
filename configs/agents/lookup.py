"""An agent of an ordinary kind: it knows OpenAI's chat API and nothing of the training.

It asks the model, runs the tool that the model calls, and asks again, until the model answers
without a call. It needs nothing but Python's standard library.
"""

import http.client
import json
import os
import time
from urllib.parse import urlsplit

MAX_TRIES = 5
GET = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "Look up the value of a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}


def ask(messages):
    """Return the model's next message; a busy server is asked again."""
    base = urlsplit(os.environ["OPENAI_BASE_URL"])
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [GET]}
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    for _ in range(MAX_TRIES):
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


def look_up(table, call):
    """Run the tool `get`."""
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] != "get" or "key" not in arguments:
        return "no such tool"
    return table.get(str(arguments["key"]), "nothing")


def main():
    """Solve the task of this episode."""
    with open(os.environ["RELAX_TASK_FILE"]) as file:
        task = json.load(file)
    messages = task["messages"]
    while True:
        message = ask(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            return
        for call in message["tool_calls"]:
            content = look_up(task["metadata"]["table"], call)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


main()
