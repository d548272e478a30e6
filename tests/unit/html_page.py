"""Parses an HTML page for assertions on its contents."""

from __future__ import annotations

import base64
from html.parser import HTMLParser


class Page(HTMLParser):
    """Collects a page's tags with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep a tag."""
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        """Keep the text between two tags."""
        self.words.append(data)

    @property
    def text(self) -> str:
        """All words."""
        return "".join(self.words)

    def sources(self, tag: str) -> list[bytes]:
        """Return what the data URIs of all tags of a name hold."""
        addresses = [attributes["src"] or "" for name, attributes in self.tags if name == tag]
        assert all(address.startswith("data:") for address in addresses)
        return [base64.b64decode(address.partition(",")[2]) for address in addresses]
