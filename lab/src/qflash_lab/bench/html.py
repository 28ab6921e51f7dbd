"""One self-contained HTML page: its style, tables and inline plots. Shared by ``qflash-lab demo`` and ``qflash-lab report``.

Nothing is loaded: no script, no font, no image. Light or dark follows the reader's system.
"""

from __future__ import annotations

import hashlib
import html
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

INK = "#123456"
"""Stands for the page's text colour in a plot until :func:`plot` replaces it."""

STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1d2126; --soft: #5c6570; --line: #dcdfe3; --box: #f2f4f5;
  --good: #1d7a4f; --bad: #b3432b; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --ink: #e6e8eb; --soft: #9aa4af; --line: #333a42;
  --box: #1e2329; --good: #5cc596; --bad: #f0866c; } }
body { margin: 0 auto; max-width: 52rem; padding: 1.2rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; margin: 0 0 .4rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
h3 { font-size: 1rem; margin: 1.3rem 0 .2rem; }
p { margin: .2rem 0 .8rem; } .note { color: var(--soft); font-size: .9rem; } a { color: inherit; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
.one th:nth-child(2), .one td:nth-child(2) { text-align: right; } .wide + p { margin-top: 1rem; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--page); }
svg { display: block; width: 100%; height: auto; max-width: 38rem; margin-bottom: 1rem; }
nav { background: var(--box); padding: .6rem .9rem; margin: 1rem 0; border-radius: .4rem; font-size: .95rem; }
nav ol { margin: 0; padding-left: 1.3rem; columns: 2; } nav a { text-decoration: none; }
details { margin: .4rem 0 1rem; } summary { cursor: pointer; color: var(--soft); }
.summary { padding-left: 1.2rem; margin: .4rem 0; } .summary li { margin: .25rem 0; }
.claims > input { margin: 0 .2rem 0 0; } .claims > label { margin-right: 1rem; }
.claims ul { margin: 0; padding: 0; list-style: none; }
.claims li { border-top: 1px solid var(--line); padding: .6rem 0; }
.claims dl { display: grid; grid-template-columns: 4.8rem 1fr; margin: .2rem 0 0; font-size: .9rem; }
.claims dt { color: var(--soft); } .claims dd { margin: 0; }
.agrees > b { color: var(--good); } .differs > b { color: var(--bad); } .open > b, p.open { color: var(--soft); }
#show-agrees:checked ~ section li:not(.agrees), #show-differs:checked ~ section li:not(.differs),
#show-open:checked ~ section li:not(.open), #show-agrees:checked ~ section:not(:has(li.agrees)),
#show-differs:checked ~ section:not(:has(li.differs)), #show-open:checked ~ section:not(:has(li.open)) { display: none; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(var(--card, 9rem), 1fr)); gap: .8rem; margin: .8rem 0; }
.cards figure { margin: 0; background: var(--box); padding: .5rem; border-radius: .4rem; }
.cards figcaption { font-size: .8rem; line-height: 1.35; } .cards .maps { display: flex; gap: .3rem; }
.cards svg { flex: 1; min-width: 0; margin: 0; border-radius: .2rem; }
@media (max-width: 36rem) { body { padding: .9rem; } table { font-size: .8rem; } th, td { padding-right: .5rem; }
  table:not(.one) td:first-child { white-space: normal; min-width: 4.5rem; } nav ol { columns: 1; } }
"""


def plot(draw: Callable[[], Any]) -> str:
    """Return a plot as an SVG element whose lines and letters take the page's colour.

    Args:
        draw: makes the matplotlib Figure, under the page's settings.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    style = {"svg.fonttype": "none", "svg.hashsalt": "qflash", "font.family": "sans-serif", "text.color": INK}
    style |= dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    style |= {"axes.facecolor": "none", "legend.facecolor": "none"}
    with matplotlib.rc_context(style):
        figure = draw()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) (?:height|width)="[^"]*pt"', r"\1", text)
    text = re.sub(r'(<svg[^>]*?) (?:height|width)="[^"]*pt"', r"\1", text)
    text = text.replace(INK, "currentColor").replace("#000000", "currentColor")
    # names that nothing refers to go, the others become the plot's own: a page has several plots
    named = set(re.findall(r'(?:href="|url\()#([\w-]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in named else "", text)
    own = hashlib.sha256(text.encode()).hexdigest()[:8]
    for name in named:
        text = text.replace(f'id="{name}"', f'id="{own}-{name}"').replace(f'href="#{name}"', f'href="#{own}-{name}"')
        text = text.replace(f"url(#{name})", f"url(#{own}-{name})")
    return text


def table(header: Sequence[str], rows: Sequence[Sequence[str]], labels: int = 2) -> str:
    """Return a table that scrolls by itself where it is wider than the page; cells are escaped.

    Args:
        header: the columns' headings.
        rows: cells as text.
        labels: leading columns (1 or 2) that are set left, as text; the others are set right, as numbers.
    """

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(row(cells, "td") for cells in rows)
    style = ' class="one"' if labels == 1 else ""
    return f'<div class="wide"><table{style}><thead>{row(header, "th")}</thead><tbody>\n{body}\n</tbody></table></div>'


def anchor(title: str) -> str:
    """Return what a heading is called in links."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def heading(title: str, note: str = "", level: int = 2) -> str:
    """Return a heading, which links can lead to, and the note below it, escaped."""
    below = f'\n<p class="note">{html.escape(note)}</p>' if note else ""
    return f'<h{level} id="{anchor(title)}">{html.escape(title)}</h{level}>{below}'


def contents(parts: Sequence[str]) -> str:
    """Return a table of contents: links to the headings of the second level in a page's parts."""
    found = re.findall(r'<h2 id="([^"]*)">(.*?)</h2>', "\n".join(parts))
    items = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in found)
    return f'<nav aria-label="Contents"><ol>{items}</ol></nav>'


def folded(title: str, parts: Sequence[str]) -> str:
    """Return parts behind a line that opens them."""
    return f"<details><summary>{html.escape(title)}</summary>\n" + "\n".join(parts) + "\n</details>"


def document(title: str, parts: Sequence[str]) -> str:
    """Return the page; ``parts`` are HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )
