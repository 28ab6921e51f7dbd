"""Reading PTX: statements, operands, lists."""

from __future__ import annotations

import re
from collections.abc import Iterator


def _closing(text: str, at: int) -> int:
    """Where the brace that opens at ``at`` is closed."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return i
    raise ValueError("a brace is not closed")


def _statements(text: str) -> Iterator[str]:
    """Yield a kernel's labels (with a colon) and instructions; names of an inner block are made unique."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"(?m)^\s*\.(loc|file|pragma)\b[^\n]*$", "", text)
    blocks: list[dict[str, str]] = []
    count = 0
    token = ""

    def renamed(statement: str) -> str:
        for block in reversed(blocks):
            statement = re.sub(r"(?<![\w$%.])[A-Za-z_]\w*(?![\w.])", lambda m, b=block: b.get(m[0], m[0]), statement)
        return statement

    for at, c in enumerate(text):
        if c == "{" and not token.strip():
            # labels and declarations of an inner block are its own
            body = text[at + 1 : _closing(text, at)] if blocks else ""
            names = [n for part in re.findall(r"\.reg\s+\.\w+\s+([^;<]*);", body) for n in re.split(r"[\s,]+", part) if n]
            names += re.findall(r"(?:^|[;\s])([A-Za-z_]\w*):(?!:)", body)
            blocks.append({name: f"{name}@{count}" for name in names if not name.startswith("%")})
            count += 1
        elif c == "}" and not token.strip():
            blocks.pop()
            if not blocks:
                return
        elif c == ";":
            statement = " ".join(token.split())
            token = ""
            if statement and not statement.startswith("."):
                yield renamed(statement)
        elif c == ":" and re.fullmatch(r"\s*[\w$]+", token) and text[at + 1] in " \t\n}":
            yield renamed(token.strip()) + ":"
            token = ""
        else:
            token += c


def _operands(text: str) -> list[str]:
    """Split operands at the commas outside braces and brackets."""
    parts, depth, part = [], 0, ""
    for c in text:
        depth += (c in "{[") - (c in "}]")
        if c == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += c
    return [*parts, part.strip()] if part.strip() else parts


def _listed(text: str) -> list[str]:
    """The registers of a vector operand, or the one register."""
    return [part.strip() for part in text.strip("{} ").split(",")]
