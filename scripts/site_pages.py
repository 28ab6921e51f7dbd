"""Hooks of mkdocs: pages and files from outside of docs/, and links to them.

Documents link to files of the repository with relative paths, which GitHub shows. In the site a Markdown file of ``PAGES`` is a
page, a file that a page links to is copied to ``files/``, and a link to a folder becomes its text.
"""

from __future__ import annotations

import html.parser
import posixpath
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "lab/README.md": "lab.md",
    **{
        f"benchmarks/archive/{name}.md": f"archive/{name}.md"
        for name in ("README", "experiments", "faults", "related_work", "ten_places")
    },
}
"""Where documents outside of docs/ are in the site, both from their root."""

_LINK_OR_CODE = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)|^ *```.*?^ *```$|`[^`]+`", re.DOTALL | re.MULTILINE)
_DOCUMENT = re.compile(r"<code>docs/(\w+)\.md</code>")
_ROLE = re.compile(r":(?:func|class|meth|attr|mod|data|exc):<code>(~?)\.*([\w.]+)</code>")


def site_path(path: str) -> str:
    """Return where a file of the repository is in the site."""
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}")


def repository_path(uri: str) -> str:
    """Return which file of the repository a page of the site is made of."""
    copied = uri.removeprefix("files/") if uri.startswith("files/") else f"docs/{uri}"
    return next((source for source, page in PAGES.items() if page == uri), copied)


def with_links(text: str, source: str) -> tuple[str, set[str]]:
    """Turn a document's links into those of the site.

    Args:
        text: Markdown.
        source: the document, from the repository's root.

    Returns:
        the text, and the files (from the repository's root) that are to be copied.
    """
    copied: set[str] = set()
    here = posixpath.dirname(site_path(source))

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        if target is None or re.match(r"[a-z]+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if (ROOT / found).is_dir():
            return label
        if site_path(found).startswith("files/"):
            copied.add(found)
        place = posixpath.relpath(site_path(found), here or ".")
        return f"{mark}[{label}]({place}{'#' + anchor if anchor else ''})"

    return _LINK_OR_CODE.sub(link, text), copied


def on_files(files: Files, config: Any) -> Files:
    """Add pages and linked files."""
    for source, page in PAGES.items():
        head = "---\nhide: [navigation]\n---\n" if page == "index.md" else ""  # the home page is alone in its tab
        files.append(File.generated(config, page, content=head + (ROOT / source).read_text(encoding="utf-8")))
    for file in list(files.documentation_pages()):
        _, copied = with_links(file.content_string, repository_path(file.src_uri))
        for name in copied:
            place = site_path(name)
            if files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links into those of the site; notes of the archive are not searched, which would hide the pages behind them."""
    if page.file.src_uri.startswith(("archive/", "files/")):
        page.meta["search"] = {"exclude": True}
    return with_links(markdown, repository_path(page.file.src_uri))[0]


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Make links of what docstrings name: roles (``:func:`attention```), where the reference has the name, and documents."""

    def reference(match: re.Match[str]) -> str:
        name = match[2].rpartition(".")[2] if match[1] else match[2].removeprefix("qflash.")
        known = "qflash." + match[2].removeprefix("qflash.").rpartition(".")[2]
        return f'<autoref identifier="{known}" optional><code>{name}</code></autoref>'

    if page.file.src_uri.startswith("reference/"):
        content = _DOCUMENT.sub(r'<a href="../\1.html">\1</a>', content)
    return _ROLE.sub(reference, content)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Let pages of a server ask no other server: only the search of pages opened as files needs a script of one."""
    written = r"""document.write('<scr' + 'ipt src="\1"></scr' + 'ipt>')"""
    as_file = f'<script>if (location.protocol === "file:") {written}</script>'
    return re.sub(r'<script src="(https://unpkg\.com/[^"]+)"></script>', as_file, output)


class _Anchors(html.parser.HTMLParser):
    """Collects where a page's links lead, and the names that links may lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.names: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.names.add(value or "")
            elif name in ("href", "src") and value and not re.match(r"[a-z]+:|//", value):
                self.links.add(value)


def broken_links(folder: Path) -> list[str]:
    """Return ``page: link`` for every link of a built site, docstrings' included, that leads nowhere."""
    pages = {path: _Anchors(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html") if path.name != "404.html"}
    broken = []
    for page, found in pages.items():
        for link in sorted(found.links):
            path, _, anchor = link.partition("#")
            target = (page.parent / unquote(path).partition("?")[0]).resolve() if path else page
            if not target.exists() or (target in pages and unquote(anchor) not in pages[target].names):
                broken.append(f"{page.relative_to(folder)}: {link}")
    return broken


def on_post_build(config: Any) -> None:
    """Refuse a site with a link that leads nowhere."""
    if broken := broken_links(Path(config.site_dir)):
        raise PluginError("links that lead nowhere:\n" + "\n".join(broken))
