"""Hostile files and templates against the children that read them: the media decoder and the chat
template.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from jinja2.exceptions import TemplateError

from relax_events.attacks.media_files import list_files
from relax_events.attacks.suite import HELD, Assault, Attack
from relax_events.attacks.targets import Targets
from relax_events.attacks.templates import BOMBS, template_codes
from relax_events.config import MediaConfig
from relax_events.confinement.entry_points import CHAT_TEMPLATE, MEDIA_DECODER
from relax_events.errors import EnvironmentProblem, MediaError
from relax_events.events.parts import Modality
from relax_events.media.decoder import Decoder
from relax_events.media.preprocessing import DecodePlan
from relax_events.models.chat_template import ConfinedTemplate, TemplateBounds

DECODE_SECONDS = 10.0
BOUNDS = TemplateBounds(render_seconds=2.0, load_seconds=5.0, memory_bytes=512 * 1024**2)


def reader_assaults() -> Iterator[Assault]:
    """Give the assaults of files and templates."""
    for point, prepare in ((MEDIA_DECODER, _prepare_files), (CHAT_TEMPLATE, _prepare_templates)):
        yield Assault(point.name, point.doors, point.profile, prepare)


@contextmanager
def _prepare_files(targets: Targets) -> Iterator[list[Attack]]:
    decoder = Decoder(MediaConfig(decode_seconds=DECODE_SECONDS))
    files = list_files(targets.outside["public"], port=targets.outside["port"])
    yield [
        Attack(f"{modality}: {name}", partial(_inspect, decoder, content, modality))
        for modality in (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)
        for name, content in files.items()
    ]


def _inspect(decoder: Decoder, content: bytes, modality: Modality) -> str:
    """The header of an image may be well; then decoding the rest must fail."""
    try:
        facts = decoder.inspect(content, modality, location="attack")
        plan = DecodePlan((facts.height or 1, facts.width or 1, 3), "uint8")
        decoder.decode(content, modality, plan, location="attack")
    except (MediaError, EnvironmentProblem):
        return HELD
    return f"the file was taken: {facts}"


@contextmanager
def _prepare_templates(targets: Targets) -> Iterator[list[Attack]]:
    codes = template_codes(targets.canary) | BOMBS
    yield [
        Attack("an honest template", partial(_render, "{{ 1 + 1 }}", "2")),
        *(Attack(name, partial(_render, code, None)) for name, code in codes.items()),
    ]


def _render(source: str, expected: str | None) -> str:
    try:
        text = ConfinedTemplate(source, BOUNDS).render({"messages": []})
    except TemplateError:
        text = None
    return HELD if text == expected else f"it gave {text!r:.200}"
