"""Markup that cannot be broken by the text put into it."""

from __future__ import annotations

from html import escape


class Html(str):
    """Text that is markup already; ``tag`` escapes every other text."""


def tag(name: str, /, *children: str, **attributes: object) -> Html:
    """An element. In attribute names ``_`` stands for ``-``, and one at the end is dropped."""
    given = "".join(
        f' {key.removesuffix("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def join(parts: tuple[str, ...] | list[str]) -> Html:
    """Parts one after the other, text escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))
