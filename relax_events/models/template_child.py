"""Child process that renders a chat template. Started only by `ConfinedTemplate`."""

from __future__ import annotations

import sys

from relax_events.confinement.frames import Frame
from relax_events.confinement.served import Answer, Served
from relax_events.models.chat_template import TemplateProgram, compile_template

MAX_ERROR_CHARACTERS = 600


def main() -> int:
    """Render conversations until the parent closes the pipe."""
    served = Served()
    template = compile_template(served.setup["source"])
    served.report_ready({})
    served.serve(lambda request: _render(template, request))
    return 0


def _render(template: TemplateProgram, request: Frame) -> Answer:
    try:
        return {}, [template.render(request.head).encode("utf-8", "surrogatepass")]
    except MemoryError:
        return {"error": "it needs too much memory"}, ()
    except Exception as error:  # a template may raise any exception
        name = "" if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: "
        return {"error": f"{name}{error}"[:MAX_ERROR_CHARACTERS]}, ()


if __name__ == "__main__":
    sys.exit(main())
