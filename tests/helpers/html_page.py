"""A page of ours, parsed."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Loaded(HTMLParser):
    """Addresses that a browser loads for a page, without those a reader follows."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.addresses: list[str] = re.findall(
            r"(?:@import|url\()\s*['\"]?([^'\")#][^'\")]*)", html
        )
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        kinds = set((given.get("rel") or "").split())
        if tag == "link" and kinds & {
            "stylesheet",
            "icon",
            "preload",
            "prefetch",
            "preconnect",
            "dns-prefetch",
        }:
            self.addresses.append(given.get("href") or "")
        elif tag != "a":
            self.addresses += [
                given[name] or "" for name in ("src", "srcset", "data", "poster") if name in given
            ]


class Page(HTMLParser):
    """A page of ours as tests see it: tags that are open, all tags and attributes seen, the text,
    rows of tables.
    """

    VOID = frozenset({"meta", "img", "br", "input", "link"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.rows: list[list[str]] = []
        self.words = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def row(self, *begin: str) -> list[str]:
        """The first row that begins so."""
        return next(row for row in self.rows if tuple(row[: len(begin)]) == begin)
