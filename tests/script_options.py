"""Parses command lines of scripts with the scripts' own argparse parsers, and stops before anything is run.

Reads a list of [words, whole] from standard input and prints a list of {"options": [...], "error": "..."} (JSON). The words are
a script's path, or ``-m`` and a module, and arguments. Where ``whole`` is false required arguments may be missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import pathlib
import runpy
import sys
from typing import Any

_parse_args = argparse.ArgumentParser.parse_args


class Parsed(BaseException):
    """The arguments were parsed. No script catches it."""


def parse(words: list[str], whole: bool) -> dict[str, Any]:
    """Return the options of a script, and what its parser says against the arguments, if anything."""
    module = words[1] if words[0] == "-m" else None
    arguments = words[2:] if module else words[1:]
    origin = importlib.util.find_spec(module).origin if module else words[0]  # type: ignore[union-attr]
    assert origin is not None
    folder = pathlib.Path(origin).resolve().parent
    source = pathlib.Path(origin).read_text(encoding="utf-8")
    if "parse_args(" not in source and "make_parser(" not in source:
        return {"options": [], "error": f"takes no arguments: {arguments}" if arguments else ""}
    options: list[str] = []

    def parse_and_stop(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
        options.extend(self._option_string_actions)
        if not whole:
            for action in self._actions:
                action.required = False
        _parse_args(self, args, namespace)
        raise Parsed

    errors, path, known = io.StringIO(), [*sys.path], set(sys.modules)
    sys.argv, error = [origin, *arguments], "its parser was not reached"
    argparse.ArgumentParser.parse_args = parse_and_stop  # type: ignore[assignment, method-assign]
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            if module:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(folder))
                runpy.run_path(origin, run_name="__main__")
    except Parsed:
        error = ""
    except SystemExit:
        error = errors.getvalue().strip().rpartition("\n")[2]
    finally:
        argparse.ArgumentParser.parse_args = _parse_args  # type: ignore[method-assign]
        sys.path[:] = path
        # the next folder may have a module of the same name
        for name in set(sys.modules) - known if not module else ():
            if pathlib.Path(getattr(sys.modules[name], "__file__", None) or "/").parent == folder:
                del sys.modules[name]
    return {"options": sorted(options), "error": error}


if __name__ == "__main__":
    print(json.dumps([parse(words, whole) for words, whole in json.load(sys.stdin)]))
