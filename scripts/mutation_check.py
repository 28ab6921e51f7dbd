"""Change the arithmetic one constant, comparison, shift or rounding at a time, and see whether the tests notice.

In :data:`CHOICES`, which hold more than arithmetic, statements are left out and conditions changed as well.

Works on a copy of the tree. Each change ("mutant") is tested in a process of its own by the tests that ``TESTS`` names for its
file; what they let pass is printed. ``tests/mutants_explained.json`` lists changes that nobody can notice, with the reasons.
Of the C sources only code that is compiled here counts: a change that leaves the machine code alone is no mutant.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXPLAINED = ROOT / "tests" / "mutants_explained.json"
COPIED = ("src", "lab", "tests", "golden", "scripts", "pyproject.toml")

GOLDEN = "tests/core/test_golden.py -k 'committed_bits and {}'"
SANITIZED = "tests/kernels/test_cpu_driver.py -k no_access"
IN_C = (GOLDEN.format("cpu"), "tests/fuzz/test_back_ends.py -k in_c")
TESTS = {
    "src/qflash/specification/fixed_point.py": (
        GOLDEN.format("reference"), "tests/fuzz/test_back_ends.py -k in_c", "tests/kernels/test_cpu.py -k finest",
        "tests/core/test_fixed_point.py", "tests/core/test_missing_mass.py -k rounded_once",
        "tests/core/test_errors.py -k 513", "tests/lab/verify/test_bounds.py",
    ),
    "src/qflash/specification/reference.py": (
        GOLDEN.format("reference"), "tests/core/test_declared_bounds.py", "tests/fuzz/test_properties.py -k tiles_and_checks",
        "tests/core/test_fixed_point.py -k 'bounds or notices'", "tests/core/test_reference.py",
    ),
    "src/qflash/specification/quantization.py": (
        GOLDEN.format("reference"), "tests/fuzz/test_back_ends.py -k quantisation_in_c", "tests/core/test_quantization.py",
        "tests/core/test_missing_mass.py -k 'offset or tensor'", "tests/core/test_extremes.py", "tests/core/test_errors.py",
    ),
    "src/qflash/specification/layers.py": (
        GOLDEN.format("reference"), "tests/core/test_declared_bounds.py", "tests/network/test_operators.py",
        "tests/kernels/test_network_cpu.py", "tests/core/test_network_errors.py", "tests/lab/verify/test_bounds.py",
    ),
    "src/qflash/unseen_tokens.py": ("tests/core/test_ranges.py", "tests/core/test_unseen_tokens.py"),
    "src/qflash/segments.py": (
        "tests/core/test_varlen.py -k bits", "tests/core/test_ranges.py", "tests/core/test_varlen.py",
    ),
    "src/qflash/network/calibration.py": (
        "tests/network/test_calibration.py", "tests/network/test_networks.py -k 'calibrations or bad_arguments'",
    ),
    "src/qflash/network/conversion.py": (
        "tests/network/test_measured_choices.py", "tests/network/test_networks.py -k 'logits or named or refused or norm'",
    ),
    "src/qflash/integrations/sdpa.py": ("tests/integrations/test_sdpa_state.py", "tests/integrations/test_sdpa.py"),
    "src/qflash/integrations/static_scales.py": (
        "tests/integrations/test_static_scales.py", "tests/network/test_calibration.py -k scales",
    ),
    "src/qflash/kernels/cpu/attention.c": (
        *IN_C, "tests/kernels/test_cpu.py -k 'floored or payload or multipliers or released or one_channel or of_zero'",
        "tests/kernels/test_cpu.py -k '(reference_bits or longest or largest or agrees or threads) and not widths'",
        "tests/core/test_varlen.py -k bits", SANITIZED,
    ),
    "src/qflash/kernels/cpu/products.h": (
        *IN_C, "tests/kernels/test_network_cpu.py", "tests/kernels/test_cpu.py -k '(reference_bits or forked) and not widths'",
        SANITIZED,
    ),
    "src/qflash/kernels/cpu/network.c": (GOLDEN.format("cpu"), "tests/kernels/test_network_cpu.py", SANITIZED),
}  # fmt: skip
"""By source file: arguments of pytest, the fastest first."""

CHOICES = (
    "src/qflash/unseen_tokens.py", "src/qflash/segments.py", "src/qflash/network/calibration.py",
    "src/qflash/network/conversion.py", "src/qflash/integrations/sdpa.py", "src/qflash/integrations/static_scales.py",
)  # fmt: skip
"""Files that hold more than integer arithmetic, in which statements are left out, too."""

OPTIMISE = "-O1"
"""Of the C sources, whose bits do not depend on it, and which take a fifth of the time to compile."""

MOST_SECONDS, MOST_CPU_SECONDS = 300, 90
"""Of one run of tests, on a clock and of the processor; a mutant that takes longer does not end, and is caught."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of a file.

    Attributes:
        path: of the file, from the repository's root.
        start, end: characters that are replaced.
        old, new: what they are, and what they become.
        line: number of the line.
        text: of the line, without indentation.
        place: how many equal changes of this line, and of equal lines above it, come before this one.
    """

    path: str
    start: int
    end: int
    old: str
    new: str
    line: int
    text: str
    place: int = 0

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What the list of explanations knows it by; other lines may come and go."""
        return self.path, self.text, f"{self.old} -> {self.new}", self.place

    def apply(self, source: str) -> str:
        """Return the changed source."""
        assert source[self.start : self.end] == self.old
        return source[: self.start] + self.new + source[self.end :]

    def __str__(self) -> str:
        place = f" (place {self.place})" if self.place else ""
        return f"{self.path}:{self.line}: {self.old} -> {self.new}{place}\n    {self.text}"


OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
}  # fmt: skip
FLOAT_OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Div: ("/", "*"), ast.Pow: ("**", "*"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
METHODS = {"round": "floor", "floor": "ceil", "trunc": "floor", "maximum": "minimum", "minimum": "maximum", "amax": "amin"}
STRINGS = {"trunc": "floor", "nearest": "floor"}
"""Rounding modes that are named."""


def _other_number(text: str) -> str:
    """Return a number next to the one that a literal is."""
    if re.fullmatch(r"(0x[0-9A-Fa-f]+|\d+)", text):
        return str(int(text, 0) + 1)
    return repr(float(text) * 1.0078125 if float(text) else 1.0)


def mutate_python(source: str, choices: bool = False) -> Iterator[tuple[int, int, str]]:
    """Yield changes of a Python file: start, end and new text; not of types, messages, names of dimensions and indices.

    Args:
        source: of the file.
        choices: change what is no integer arithmetic as well: :data:`FLOAT_OPERATORS`, ``and``, ``or``, ``not``, ``True`` and
            ``False``; and leave out statements that do something to an object: calls, and assignments but for those to names.
    """
    operators = {**OPERATORS, **FLOAT_OPERATORS} if choices else OPERATORS
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()

    def at(line: int, column: int) -> int:
        return len(raw[: starts[line - 1] + column].decode())

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    def between(left: ast.expr, right: ast.expr, operator: ast.AST) -> Iterator[tuple[int, int, str]]:
        if type(operator) not in operators:
            return
        old, new = operators[type(operator)]
        begin, end = span(left)[1], span(right)[0]
        found = source.find(old, begin, end)
        if found >= 0:
            yield found, found + len(old), new

    def choice(node: ast.AST) -> Iterator[tuple[int, int, str]]:
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield *span(node), str(not node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start = span(node)[0]
            yield start, start + len("not "), ""
        if isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                found = source.index(old, span(left)[1], span(right)[0])
                yield found, found + len(old), new
        acts = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple)):
            acts = True
        if acts or isinstance(node, (ast.AugAssign, ast.Delete)):
            assert isinstance(node, ast.stmt)
            yield *span(node), "pass"

    def visit(node: ast.AST) -> Iterator[tuple[int, int, str]]:
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments, ast.Import, ast.ImportFrom)):
            return
        if isinstance(node, ast.keyword) and node.arg in ("dim", "dims", "dtype", "keepdim", "stacklevel"):
            return
        if choices:
            yield from choice(node)
        if isinstance(node, ast.Constant):
            if type(node.value) in (int, float):
                start, end = span(node)
                yield start, end, _other_number(source[start:end].replace("_", ""))
            elif isinstance(node.value, str) and node.value in STRINGS:
                start, end = span(node)
                yield start, end, repr(STRINGS[node.value]).replace("'", '"')
            return
        if isinstance(node, ast.BinOp):
            yield from between(node.left, node.right, node.op)
        if isinstance(node, ast.Compare):
            for left, right, operator in zip([node.left, *node.comparators], node.comparators, node.ops, strict=False):
                yield from between(left, right, operator)
        if isinstance(node, ast.Attribute) and node.attr in METHODS:
            end = span(node)[1]
            yield end - len(node.attr), end, METHODS[node.attr]
        for name, value in ast.iter_fields(node):
            if name in ("returns", "annotation", "decorator_list") or (name == "slice" and isinstance(node, ast.Subscript)):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                    yield from visit(child)

    yield from visit(ast.parse(source))


C_TOKENS = {
    "<<": ">>", ">>": "<<", " <= ": " < ", " >= ": " > ", " < ": " <= ", " > ": " >= ", " == ": " != ", " != ": " == ",
    " + ": " - ", " - ": " + ", " += ": " -= ", " & ": " | ", " | ": " & ",
}  # fmt: skip
C_PATTERN = re.compile(
    r"/\*.*?\*/|//[^\n]*|^[ \t]*#(?!define)[^\n]*|\"[^\"\n]*\"|(?P<number>(?<![\w.])(?:0x[0-9A-Fa-f]+|\d+)(?=[uUlL]*(?![\w.])))"
    r"|(?P<token> (?:<=|>=|<|>|==|!=|\+|-|\+=|&|\|) |<<(?!=)|>>(?!=))",
    re.DOTALL | re.MULTILINE,
)
"""What is skipped (comments, preprocessor, strings), and what is changed."""


def mutate_c(source: str) -> Iterator[tuple[int, int, str]]:
    """Yield changes of a C file: start, end and new text."""
    for match in C_PATTERN.finditer(source):
        if match["number"]:
            yield match.start("number"), match.end("number"), _other_number(match["number"])
        elif match["token"]:
            yield match.start("token"), match.end("token"), C_TOKENS[match["token"]]


def find_mutants(path: str) -> list[Mutant]:
    """Return all changes of a file."""
    source = (ROOT / path).read_text(encoding="utf-8")
    lines = source.splitlines()
    found, seen = [], collections.Counter[tuple[str, str, str]]()
    changes = mutate_python(source, path in CHOICES) if path.endswith(".py") else mutate_c(source)
    for start, end, new in sorted(changes):
        number, old = source.count("\n", 0, start) + 1, source[start:end]
        text = lines[number - 1].strip()
        found.append(Mutant(path, start, end, old, new, number, text, seen[text, old, new]))
        seen[text, old, new] += 1
    return found


def read_explanations() -> dict[tuple[str, str, str, int], str]:
    """Return the reasons by :attr:`Mutant.key`.

    Raises:
        ValueError: an explanation is of a change that the sources do not have.
    """
    entries = json.loads(EXPLAINED.read_text(encoding="utf-8"))
    reasons = {(x["path"], x["line"], x["change"], x.get("place", 0)): x["reason"] for x in entries}
    unknown = set(reasons) - {mutant.key for path in TESTS for mutant in find_mutants(path)}
    if unknown:
        raise ValueError(f"{EXPLAINED.name} explains what is not there: {sorted(unknown)}")
    return reasons


def choose(mutants: list[Mutant], sample: int | None, seed: int) -> Iterator[Mutant]:
    """Yield mutants, of each file in turn; in random order if there is a sample."""
    chance, by_path = random.Random(seed), collections.defaultdict[str, list[Mutant]](list)
    for mutant in mutants:
        by_path[mutant.path].append(mutant)
    if sample is not None:
        for each in by_path.values():
            chance.shuffle(each)
    while any(by_path.values()):
        for each in by_path.values():
            if each:
                yield each.pop(0)


def assembly(copy: pathlib.Path, path: str) -> dict[str, str] | None:
    """Return the machine code of the C sources that a file is part of; None if they do not compile."""
    folder = copy / "src/qflash/kernels/cpu"
    # not imported: the children import the package of the copy
    constants = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse((folder / "launch.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("_FLAGS", "_TRIES", "_SOURCES")
    }
    flags = [flag for flag in constants["_FLAGS"] if flag not in ("-shared", "-O3")]
    found = {}
    for name in constants["_SOURCES"] if path.endswith(".h") else [pathlib.Path(path).name]:
        command = ["cc", OPTIMISE, *flags, *constants["_TRIES"][1], "-S", name, "-o", "-"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            return None
        found[name] = done.stdout
    return found


def run_tests(copy: pathlib.Path, arguments: str, cache: pathlib.Path | None, log: pathlib.Path) -> int:
    """Run pytest in a child, which has torch imported already; return its exit status. The first failure ends it."""
    import shlex

    import pytest

    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_SECONDS, MOST_CPU_SECONDS))
            with log.open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            os.chdir(copy)
            sys.dont_write_bytecode = True
            sys.path[:0] = [str(copy / "src"), str(copy / "lab" / "src"), str(copy / "tests")]
            if cache is not None:
                os.environ["XDG_CACHE_HOME"] = str(cache)
            import qflash

            assert pathlib.Path(qflash.__file__).is_relative_to(copy), qflash.__file__
            if cache is not None:
                from qflash.kernels.cpu import launch

                launch._FLAGS = (OPTIMISE, *launch._FLAGS[1:])
            status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *shlex.split(arguments)]))
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    deadline = time.monotonic() + MOST_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def is_caught(mutant: Mutant, copy: pathlib.Path, log: pathlib.Path, sound: set[str]) -> bool:
    """Tell whether a test fails on a mutant.

    Args:
        sound: tests that are known to pass on the unchanged sources; those that catch the mutant are added.

    Raises:
        RuntimeError: tests fail without it as well.
    """
    target = copy / mutant.path
    source = target.read_text(encoding="utf-8")
    target.write_text(mutant.apply(source), encoding="utf-8")
    try:
        with tempfile.TemporaryDirectory() as folder:
            cache = pathlib.Path(folder) if not mutant.path.endswith(".py") else None
            catching = next((tests for tests in TESTS[mutant.path] if run_tests(copy, tests, cache, log) != 0), None)
    finally:
        target.write_text(source, encoding="utf-8")
    if catching is not None and catching not in sound:
        if run_tests(copy, catching, None, log):
            raise RuntimeError(f"the tests fail on unchanged sources: {catching}\n{log.read_text()}")
        sound.add(catching)
    return catching is not None


def changes_code(mutant: Mutant, copy: pathlib.Path, before: dict[str, dict[str, str] | None]) -> bool:
    """Tell whether a mutant is another program, and one that compiles."""
    target = copy / mutant.path
    source = target.read_text(encoding="utf-8")
    if mutant.path.endswith(".py"):
        return True
    if mutant.path not in before:
        before[mutant.path] = assembly(copy, mutant.path)
    target.write_text(mutant.apply(source), encoding="utf-8")
    try:
        after = assembly(copy, mutant.path)
    finally:
        target.write_text(source, encoding="utf-8")
    return after is not None and after != before[mutant.path]


def key_of(result: dict[str, Any]) -> tuple[str, str, str, int]:
    """Return the :attr:`Mutant.key` of a result in a record."""
    return result["path"], result["line"], result["change"], result["place"]


def record(options: argparse.Namespace, mutants: int, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a record of a run: its options, and what was tried with what result."""
    counts = collections.Counter(each["result"] for each in results)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "sample": options.sample,
        "seed": options.seed,
        "mutants": mutants,
        "tried": len(results),
        "tried again": sum(each.get("again", False) for each in results),
        **{name: counts[name] for name in ("caught", "explained", "survived")},
        "files": {path: collections.Counter(x["result"] for x in results if x["path"] == path) for path in TESTS},
        "results": results,
    }


def main() -> int:
    """Run; return 1 if there is a survivor that nothing explains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="N", help="random mutants, as many of each file; all if not given")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the sample")
    parser.add_argument("--file", action="append", choices=[*TESTS], help="only this file; may be given several times")
    parser.add_argument("--match", metavar="TEXT", help="only lines that contain this")
    parser.add_argument("--list", action="store_true", help="print the mutants and test none")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="write a record of the run (JSON)")
    parser.add_argument(
        "--again",
        type=pathlib.Path,
        metavar="FILE",
        help="only what survived in the run of this record, which is brought up to date",
    )
    options = parser.parse_args()
    reasons = read_explanations()
    mutants = [x for path in options.file or TESTS for x in find_mutants(path) if (options.match or "") in x.text]
    number, earlier = len(mutants), []
    if options.again:
        old = json.loads(options.again.read_text(encoding="utf-8"))
        earlier, options.sample, options.seed = (old[name] for name in ("results", "sample", "seed"))
        survived = {key_of(result) for result in earlier if result["result"] == "survived"}
        mutants = [mutant for mutant in mutants if mutant.key in survived]
    if options.list:
        print(*choose(mutants, options.sample, options.seed), sep="\n")
        return 0
    # children have these already
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    counts: dict[str, collections.Counter[str]] = {path: collections.Counter() for path in TESTS}
    survivors: list[Mutant] = []
    results = {key_of(result): result for result in earlier}
    with tempfile.TemporaryDirectory() as folder:
        copy, log = pathlib.Path(folder, "copy"), pathlib.Path(folder, "log")
        for name in COPIED:
            copy_to: Callable[..., object] = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            ignored = {"ignore": shutil.ignore_patterns("__pycache__")} if (ROOT / name).is_dir() else {}
            copy.mkdir(exist_ok=True)
            copy_to(ROOT / name, copy / name, **ignored)
        before: dict[str, dict[str, str] | None] = {}
        sound: set[str] = set()
        for mutant in choose(mutants, options.sample, options.seed):
            if not options.again and sum(sum(each.values()) for each in counts.values()) == options.sample:
                break
            if mutant.key in reasons:
                result = "explained"
            elif not changes_code(mutant, copy, before):
                continue
            else:
                result = "caught" if is_caught(mutant, copy, log, sound) else "survived"
            counts[mutant.path][result] += 1
            print(f"{result}: {mutant}", flush=True)
            if result == "survived":
                survivors.append(mutant)
            path, line, change, place = mutant.key
            results[mutant.key] = {
                "path": path, "line": line, "change": change, "place": place, "result": result, "again": bool(options.again),
            }  # fmt: skip
            if options.output:
                made = record(options, number, list(results.values()))
                options.output.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print()
    for path, each in counts.items():
        if each:
            print(f"{path}: {sum(each.values())} mutants, " + ", ".join(f"{number} {name}" for name, number in each.items()))
    if survivors:
        print(f"\n{len(survivors)} survived and are not explained in {EXPLAINED.relative_to(ROOT)}:", *survivors, sep="\n")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
