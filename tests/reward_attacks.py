"""Program: scores hostile texts by installed reward functions, and prints what each one did.

It reads a JSON object from stdin (`function`, `cases`) and prints a line before each score, so that
its caller knows which text ended it. It watches itself by an audit hook.

    python -m tests.reward_attacks
"""

import json
import os
import sys

from relax_events.rewards.registry import load_reward
from relax_events.rewards.scores import parse_score

HARMFUL = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.",
    "socket.",
)
watched = {"is_on": False, "events": []}


def watch(event, arguments):
    if not watched["is_on"]:
        return
    is_writing = event == "open" and (
        (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"))
        or (arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    )
    if is_writing or event.startswith(HARMFUL):
        watched["events"].append(f"{event} {arguments!r:.200}")


def score(reward, case):
    """Return the score of a case, or the name of the error."""
    text = case["completion"]
    offered = {
        "answer": case["answer"],
        "metadata": case["metadata"],
        "prompt": "p",
        "turns": [{"role": "user", "content": "p"}, {"role": "assistant", "content": text}],
        "environment_rewards": case.get("environment_rewards", [0.0]),
    }
    names = {*reward.named_arguments, *reward.optional_arguments}
    try:
        value = reward.function(text, **{name: offered[name] for name in names})
        return parse_score(value, weights={}).reward
    except BaseException as error:  # as the child of the product's pool
        return f"{type(error).__name__}: {error}"[:200]


def main():
    setup = json.load(sys.stdin)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a text prints is no result
    reward = load_reward(setup["function"])
    score(reward, setup["right"])  # imports what a first call imports
    sys.addaudithook(watch)
    for name, case in setup["cases"].items():
        print(json.dumps({"begins": name}), file=answers, flush=True)
        watched.update(is_on=True, events=[])
        result = score(reward, case)
        watched["is_on"] = False
        after = {kind: score(reward, setup[kind]) for kind in ("right", "wrong")}
        line = {"name": name, "score": result, "events": watched["events"], **after}
        print(json.dumps(line), file=answers, flush=True)


if __name__ == "__main__":
    main()
