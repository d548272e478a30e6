"""Untrusted chat templates: rendered as transformers does, or ended with their process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from relax_events.attacks.templates import BOMBS, template_codes
from relax_events.models.chat_template import ConfinedTemplate, TemplateBounds, compile_template

MESSAGES = [
    {"role": "user", "content": "<b>hällo</b> \ud800"},
    {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
]
TEMPLATE = (
    "{{ bos }}{% for message in messages %}{% if message.role == 'user' %}"
    "{{ message.content | tojson }}{% else %}{% generation %}{{ message.content[0].text }}"
    "{% endgeneration %}{% endif %}{% endfor %}{{ messages | tojson(indent=2) | length }}"
)
SMALL = TemplateBounds(render_seconds=3.0, load_seconds=20.0, memory_bytes=512 * 1024**2)


def test_confined_template_renders_what_it_would_in_this_process() -> None:
    messages = [{**MESSAGES[0], "content": "<b>hällo</b>"}, MESSAGES[1]]
    variables: dict[str, Any] = {"messages": messages, "bos": "<s>", "tools": None}
    text = ConfinedTemplate(TEMPLATE).render(variables)
    assert text == compile_template(TEMPLATE).render(variables)
    assert text.startswith('<s>"<b>hällo</b>"x')


def test_rejection_of_a_template_has_its_words() -> None:
    template = ConfinedTemplate("{{ raise_exception('no system message') }}")
    with pytest.raises(TemplateError, match=r"^no system message$"):
        template.render({})
    with pytest.raises(TemplateError, match="TypeError"):
        ConfinedTemplate("{{ 1 + 'a' }}").render({})


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_bomb_in_a_template_ends_within_its_deadline_and_memory(name: str) -> None:
    template = ConfinedTemplate(BOMBS[name] + "{{ messages | length }}", SMALL)
    with pytest.raises(TemplateError):
        template.render({"messages": []})


@pytest.mark.parametrize("attack", template_codes(Path("canary")))
def test_template_reaches_no_code(tmp_path: Path, attack: str) -> None:
    canary = tmp_path / "canary"
    with pytest.raises(TemplateError):
        ConfinedTemplate(template_codes(canary)[attack]).render({"messages": []})
    assert not canary.exists()
