"""The frame that all reports share: sections, tables and the page around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Finding:
    """What a report found, in a few words and then in more. `good`: it pays; None: neither, a fact."""

    head: str
    text: str
    good: bool | None = None

    def __str__(self) -> str:
        return f"{self.head} {self.text}"


def verdict(lead: str, findings: Iterable[Finding], warnings: Iterable[str] = ()) -> str:
    """The section that stands on top: what it comes to, why, and how far to trust it."""
    moods = {True: "yes", False: "no", None: "fact"}
    items = "".join(f'<li class="{moods[one.good]}"><strong>{escape(one.head)}</strong> {escape(one.text)}</li>' for one in findings)
    doubts = "".join(f"<li>{escape(line)}</li>" for line in warnings)
    lists = (f"<ul>{items}</ul>" if items else "") + (f'<ul class="warnings">{doubts}</ul>' if doubts else "")
    return f'<section class="verdict"><p class="lead">{escape(lead)}</p>{lists}</section>'


def section(title: str, text: str, *parts: str) -> str:
    """`text` is escaped, `parts` are markup."""
    body = "".join(f'<div class="part">{part}</div>' for part in parts)
    return f"<section><h2>{escape(title)}</h2>{f'<p>{escape(text)}</p>' if text else ''}{body}</section>"


def tabulate(head: Iterable[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """Cells are escaped; the first of each row is its heading."""
    if not rows:
        return '<p class="empty">Nothing measured.</p>'
    names = list(head)
    top = f"<thead><tr>{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr></thead>" if any(names) else ""
    body = "".join(
        f"<tr>{''.join(f'<th>{escape(c)}</th>' if i == 0 else f'<td>{escape(c)}</td>' for i, c in enumerate(row))}</tr>" for row in rows
    )
    return f'<table class="{"numbers" if numbers else "words"}">{top}<tbody>{body}</tbody></table>'


def document(title: str, subtitle: str, date: str, sections: Sequence[str]) -> str:
    """A whole page that needs nothing else."""
    style = (files("edgespec_device_profiles") / "report.css").read_text(encoding="utf-8")
    when = f"<p>{escape(date[:16].replace('T', ' '))} UTC</p>" if date else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f'<header><h1>{escape(title)}</h1><p class="subtitle">{escape(subtitle)}</p>{when}</header>\n'
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )
