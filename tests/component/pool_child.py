"""A child process of `ChildPool` that misbehaves on demand; see `test_child_pool`."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from relax_events.confinement.frames import PREFIX, build_frame, encode_head
from relax_events.confinement.served import IS_CONCURRENT, MAX_IN_FLIGHT, RENEW, REPLACE, Served


def main() -> None:
    served = Served()
    if "refuse" in served.setup:
        served.report_load_error("it does not like this")
        return
    if "die" in served.setup:
        os._exit(4)
    if "hang" in served.setup:
        threading.Event().wait()
    served.report_ready(
        {
            "version": served.setup.get("version", 1),
            "pid": os.getpid(),
            IS_CONCURRENT: "concurrent" in served.setup,
            MAX_IN_FLIGHT: served.setup.get("in_flight", 4),
        }
    )
    held: list[int] = []  # they are never answered
    for request in served.requests():
        match request.head["do"]:
            case "echo":
                said = {"said": request.head["text"], "pid": os.getpid()}
                served.answer(request.number, said, request.contents)
            case "hold" if Path(request.head["unless"]).exists():
                served.answer(request.number, {"pid": os.getpid()})
            case "hold":
                held.append(request.number)
            case "renew":
                served.answer(request.number, {RENEW: REPLACE, "pid": os.getpid()})
            case "tick":
                while True:
                    served.tick()
            case "block":
                for number in request.head["numbers"]:
                    served.report_blocking(request.number if number == "own" else number)
                if request.head["ticks"]:
                    served.tick()
                threading.Event().wait()
            case "block on":
                while True:
                    served.report_blocking(request.number)
            case "wait":
                threading.Event().wait()
            case "exit":
                os._exit(9)
            case "fail":
                served.fail(request.number, ValueError("odd"))
                raise SystemExit(1)
            case "bomb":
                write_answer(served, PREFIX.pack(1 << 31, 0, 1))
            case "noise":
                write_answer(served, PREFIX.pack(5, 0, 1) + b"noise")
            case "echo, then noise":
                echoed = build_frame(encode_head({"said": "echo"}), (), request.number)
                write_answer(served, b"".join(echoed) + PREFIX.pack(5, 0, 1) + b"noise")
            case "unasked":
                served.answer(10_000, {})
            case "print":
                print("x" * request.head["size"], file=sys.stderr)
                served.answer(request.number, {"pid": os.getpid()})


def write_answer(served: Served, data: bytes) -> None:
    answers: Any = served._answers
    answers.write(data)
    answers.flush()


if __name__ == "__main__":
    main()
