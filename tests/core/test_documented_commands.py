"""Every command in the documents: its options exist, and a test runs it small or a list says why none does."""

from __future__ import annotations

import ast
import fnmatch
import functools
import glob
import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import typer.main

from qflash import cli
from qflash_lab import cli as lab_cli

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = (
    *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md",
    ROOT / "lab" / "README.md", ROOT / "tests" / "activations.md", *sorted((ROOT / ".github").glob("*.md")),
    *sorted((ROOT / ".github").rglob("*.yml")),
)  # fmt: skip
pytestmark = pytest.mark.skipif(not DOCUMENTS, reason="only the repository has the documents")

RUN_HERE = {
    "python scripts/make_golden.py": "--random 2 --output .",
    "python scripts/mutation_check.py": "--list --sample 3",
}
"""Commands that :func:`test_small_runs` runs, with these arguments."""

RUN_BY = {
    "make": "tests/network/test_c_program.py::test_the_program_prints_the_networks_integers",
    "python -m qflash_lab.evaluation.photo_files": "tests/lab/evaluation/test_photo_files.py::test_crops_of_photos",
    "python -m qflash_lab.verify.bounds": "tests/lab/verify/test_bounds.py::test_the_command_prints_every_quantity",
    "python golden/check_reference.py": "tests/core/test_reference_in_c.py::test_the_model_computes_the_golden_vectors",
    "python golden/checker.py": "tests/core/test_golden.py::test_checker_agrees_and_needs_nothing_of_the_package",
    "python scripts/sanitize_gpu.py": "tests/kernels/test_sanitize_gpu.py::test_workers_behind_a_tool",
    "qflash check-onnx": "tests/network/test_onnx_check.py::test_a_good_file_is_equal_everywhere",
    "python examples/integer_network.py": "tests/integrations/test_examples.py::test_example",
    "python examples/features_ray_data.py": "tests/scale/test_ray.py::test_a_killed_worker_loses_no_row",
    "python examples/serve_ray.py": "tests/scale/test_ray.py::test_overload_is_refused_in_time",
    "python examples/serve_ray_load.py": "tests/scale/test_ray.py::test_overload_is_refused_in_time",
    "python rtl/run.py": "tests/network/test_rtl.py::test_every_golden_case_of_their_operators_is_met",
    "qflash info": "tests/core/test_cli.py::test_info_table",
    "qflash vectors": "tests/network/test_vectors.py::test_the_command",
    "qflash convert": "tests/core/test_commands.py::test_convert_prints_a_table",
    "qflash coverage": "tests/core/test_commands.py::test_coverage_of_what_becomes_integers",
    "qflash predict": "tests/core/test_commands.py::test_predict_names_the_likeliest_classes",
    "qflash time": "tests/core/test_commands.py::test_time_prints_medians",
    "qflash-lab ablate": "tests/lab/bench/test_ablation.py::test_command_writes_tables_and_plots",
    "qflash-lab accuracy": "tests/lab/bench/test_accuracy.py::test_inputs_of_a_file",
    "qflash-lab bench": "tests/lab/bench/test_latency.py::test_command_on_the_cpu",
    "qflash-lab evaluate": "tests/lab/evaluation/test_top1.py::test_two_processes_give_the_same",
    "qflash-lab models": "tests/lab/bench/test_models.py::test_command",
    "qflash-lab verify": "tests/lab/verify/test_proof.py::test_attention_kernels_hold_no_float",
    "torchrun examples/features_torchrun.py": "tests/scale/test_torchrun.py::test_a_killed_process_loses_no_image",
    "torchrun qflash-lab evaluate": "tests/lab/evaluation/test_top1.py::test_two_processes_give_the_same",
}
"""Commands that another test runs small."""

NOT_RUN = {
    ".ci/run": "runs the tests themselves",
    "make clean": "removes the environment that the tests run in",
    "make demo": "a step of .ci/run",
    "make format": "changes the files",
    "make fuzz": "ten minutes; make test runs the same tests with fewer examples",
    "make hooks": "downloads pre-commit, and changes the clone",
    "make ladder": "runs benchmarks/ladder.py",
    "make lint": "a step of .ci/run",
    "make real": "downloads 200 MB",
    "make report": "minutes; tests/lab/paper runs what is behind it",
    "make rtl-tools": "a step of .ci/run",
    "make sanitize": "half an hour; runs scripts/sanitize_cpu.py",
    "make sanitize-gpu": "needs an NVIDIA GPU and its CUDA toolkit",
    "make setup": "a step of .ci/run",
    "make site": "a step of .ci/run",
    "make test": "a step of .ci/run",
    "make test-all": "an hour",
    "make test-floor": "a step of .ci/run",
    "make test-python": "installs 6 GB",
    "make test-ray": "installs Ray; runs every night",
    "make train": "runs scripts/train_models.py",
    "make verify": "a step of .ci/run",
    "make verify-triton36": "a step of .ci/run",
    "pip install": "changes the environment that the tests run in; scripts/release.py tries it in bare ones",
    "python benchmarks/*.py": "minutes to hours, most on an NVIDIA GPU, writes pages; tests/lab tests the parts",
    "python scripts/make_activations.py": "downloads 92 MB",
    "python scripts/record_fuzz.py": "minutes; make test runs the same tests with fewer examples",
    "python scripts/record_gpu_tests.py": "needs an NVIDIA GPU",
    "python scripts/record_python_tests.py": "tests an installed wheel, in an environment of its own",
    "python scripts/release.py": "builds both packages and installs PyTorch twice; tests/core/test_release.py tests the parts",
    "python scripts/sanitize_cpu.py": "minutes; tests/kernels/test_cpu_driver.py runs what is behind it",
    "python scripts/survey_models.py": "makes models of hundreds of names; tests/integrations/test_model_survey.py runs two",
    "python scripts/survey_networks.py": "quantises hundreds of models; tests/integrations/test_network_survey.py runs some",
    "python scripts/train_models.py": "writes the weights that the package ships",
    "qflash-lab demo": "a step of .ci/run, as make demo; tests/lab/test_demo.py runs what is behind it",
    "qflash-lab energy": "needs an NVIDIA GPU",
    "qflash-lab profile": "needs an NVIDIA GPU and Nsight Compute",
    "qflash-lab real": "downloads 180 MB; tests/lab/evaluation/test_real.py runs it on what it makes",
    "qflash-lab report": "minutes; tests/lab/paper runs what is behind it",
    "qflash-lab tune": "needs an NVIDIA GPU",
}
"""Commands that no test runs, with the reason. A name may be a pattern."""

NO_COMMANDS = {"qflash golden vectors", "qflash int8", "qflash integer network", "qflash kept bias"}
"""What looks like a command between backticks: names of methods and formats."""
OTHER_OPTIONS = {"--kernel-name-exclude", "--max-restarts", "--register-usage-level"}
"""Options between backticks that are other programs': compute-sanitizer's, torchrun's, ptxas's."""

APPS = {"qflash": cli.app, "qflash-lab": lab_cli.app}
PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )*(?:qflash|qflash-lab|make|torchrun|pip|\.ci/run)(?: |$)|(?:[A-Z_]+=\S+ )*python3? ")


class Command(NamedTuple):
    """A command of a document.

    Attributes:
        words: without environment variables and comment.
        whole: whether it stands for itself in a block, and no required argument may be missing.
        page: the document, from the root.
    """

    words: tuple[str, ...]
    whole: bool
    page: str


def lines_of(path: pathlib.Path) -> Iterator[tuple[str, bool]]:
    """Yield (line, whether it is of a block) for all that may be a command."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yml":
        yield from ((line, True) for line in re.findall(r"^ +- (?:run: )?(make .*|python .*)$", text, re.MULTILINE))
        yield from ((line, False) for line in re.findall(r"`([^`]+)`", text))
        return
    fences = r"^ *```(\w*)\n(.*?)^ *```$"
    for language, block in re.findall(fences, text, re.DOTALL | re.MULTILINE):
        if language == "sh":
            yield from ((line, True) for line in block.splitlines())
    prose = re.sub(fences, "", text, flags=re.DOTALL | re.MULTILINE)
    yield from ((line, True) for line in re.findall(r"(?<=\n)    (\S.*)", prose))
    yield from ((line, False) for line in re.findall(r"`([^`]+)`", prose))


@functools.cache
def commands() -> tuple[Command, ...]:
    """Return every command of the documents once."""
    found: dict[Command, None] = {}
    for path in DOCUMENTS:
        for line, whole in lines_of(path):
            # a script that is named stands for itself
            text = re.sub(r"^(?=(?:benchmarks|scripts|golden|rtl)/\w+\.py\b)", "python ", " ".join(line.split()))
            if not PROGRAM.match(text) or text in NO_COMMANDS:
                continue
            words = shlex.split(re.sub(r"^(?:[A-Z_]+=\S+ )*(?:python -m (?=pip ))?", "", text), comments=True)
            found[Command(tuple(words), whole, path.relative_to(ROOT).as_posix())] = None
    return tuple(found)


def name_of(words: tuple[str, ...]) -> str:
    """Return program and command, as the tables above name it."""
    program, rest = words[0], list(words[1:])
    if program == "torchrun":
        if "qflash_lab" in rest:
            return f"torchrun qflash-lab {rest[rest.index('qflash_lab') + 1]}"
        return f"torchrun {next(word for word in rest if word.endswith('.py'))}"
    if program.startswith("python"):
        module = rest[:1] == ["-m"]
        return f"python -m {rest[1]}" if module else f"python {rest[0]}" if rest else "python"
    first = next((word for word in rest if not word.startswith("-") and "=" not in word), "")
    return f"{program} {first}".strip()


def behind_make(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the commands that make would run, but for those of other programs."""
    # the make that runs these tests hands its own flags and variables on
    clean = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    done = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)
    found = []
    for line in done.stdout.replace("\\\n", " ").splitlines():
        text = re.sub(r"^(?:[A-Z_0-9]+=\S* )*(?:\S*/bin/)?", "", line.strip())
        if re.match(r"(?:qflash|qflash-lab|python scripts/\S+|python benchmarks/\S+|python -m pytest)(?: |$)", text):
            found.append(tuple(shlex.split(text)))
    return found


@functools.cache
def to_parse() -> tuple[Command, ...]:
    """Return the commands with those in place of make's that it would run."""
    found: dict[Command, None] = {}
    for command in commands():
        parts = behind_make(command.words) if command.words[0] == "make" else [command.words]
        found |= dict.fromkeys(command._replace(words=words) for words in parts)
    return tuple(found)


def lacks_package(words: tuple[str, ...]) -> bool:
    """Tell whether a command is an example on Ray where that is not installed: it cannot say what options it has."""
    return any(re.match(r"examples/\w+_ray\w*\.py", word) for word in words[1:2]) and importlib.util.find_spec("ray") is None


def script_of(words: tuple[str, ...]) -> list[str] | None:
    """Return what tests/script_options.py takes: a script or a module, and its arguments."""
    if words[0] == "torchrun" and "qflash_lab" not in words:
        return list(words[[word.endswith(".py") for word in words].index(True) :])
    if not words[0].startswith("python") or words[1:3] == ("-m", "pytest") or lacks_package(words):
        return None
    return [word for given in words[1:] for word in (sorted(glob.glob(given, root_dir=ROOT)) if "*" in given else [given])]


@pytest.fixture(scope="module")
def parsed() -> dict[Command, dict[str, Any]]:
    """By command of a script, the options of its parser and what that says against the arguments."""
    scripts = {command: words for command in to_parse() if (words := script_of(command.words)) is not None}
    asked = list(dict.fromkeys((tuple(words), command.whole) for command, words in scripts.items()))
    program = str(ROOT / "tests" / "script_options.py")
    done = subprocess.run(
        [sys.executable, program], cwd=ROOT, capture_output=True, text=True, check=True, input=json.dumps(asked)
    )
    answers = dict(zip(asked, json.loads(done.stdout), strict=True))
    return {command: answers[tuple(words), command.whole] for command, words in scripts.items()}


@functools.cache
def options_of_pytest() -> frozenset[str]:
    done = subprocess.run([sys.executable, "-m", "pytest", "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    return frozenset(re.findall(r"(?<![\w-])--?[\w-]+", done.stdout))


def commands_of_apps() -> list[Any]:
    return [command for app in APPS.values() for command in typer.main.get_command(app).commands.values()]  # type: ignore[attr-defined]


def error_of_app(program: str, arguments: list[str], whole: bool) -> str:
    """Return what a command of ours says against its arguments. ``--help`` says nothing against any."""
    group = typer.main.get_command(APPS[program])
    arguments = [word for word in arguments if word != "--help"]
    if not arguments:
        return ""
    name, *rest = arguments
    command = group.commands.get(name)  # type: ignore[attr-defined]
    if command is None or command.hidden:
        return f"no command {name}"
    try:
        command.make_context(name, rest)
    except Exception as error:
        if type(error).__name__ in ("MissingParameter", "BadOptionUsage") and not whole:
            return ""
        return getattr(error, "message", "") or repr(error)
    return ""


def error_of(command: Command, parsed: dict[Command, dict[str, Any]]) -> str:
    """Return what is wrong with a command's arguments."""
    program, *rest = command.words
    if lacks_package(command.words):
        return ""
    if command in parsed:
        return parsed[command]["error"]
    if program in APPS:
        return error_of_app(program, rest, command.whole)
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(rest)
        assert given.module and given.training_script == "qflash_lab"
        return error_of_app("qflash-lab", given.training_script_args, command.whole)
    if program == "pip":
        extras = [extra for part in re.findall(r"\[([\w,]+)\]", " ".join(rest)) for extra in part.split(",")]
        known = {".": ROOT, "./lab": ROOT / "lab"}
        text = "".join((folder / "pyproject.toml").read_text() for folder in known.values())
        return next((f"no extra {extra}" for extra in extras if not re.search(rf"^{extra} = \[", text, re.MULTILINE)), "")
    if command.words[1:3] == ("-m", "pytest"):
        options = {word.partition("=")[0] for word in rest[2:] if re.match(r"--?[a-z]", word)}
        return f"pytest has no {unknown}" if (unknown := options - options_of_pytest() - {"-n"}) else ""
    assert program == ".ci/run" and not rest, command
    return ""


def test_documented_options_exist(parsed: dict[Command, dict[str, Any]]) -> None:
    wrong = [(command, error) for command in to_parse() if (error := error_of(command, parsed))]
    assert not wrong
    # options without a command belong to a script that the page names, or to qflash-lab
    params = [parameter for command in commands_of_apps() for parameter in command.params]
    ours = {option for parameter in params for option in (*parameter.opts, *parameter.secondary_opts)}
    for path in DOCUMENTS:
        page = path.relative_to(ROOT).as_posix()
        known = ours | {option for command, found in parsed.items() if command.page == page for option in found["options"]}
        named = [line for line, whole in lines_of(path) if not whole and line.startswith("--")]
        options = {word.partition("=")[0] for line in named for word in re.split(r"\s|=(?=--)", line) if word.startswith("--")}
        assert options <= known | OTHER_OPTIONS, page


def test_every_command_is_run_or_has_a_reason() -> None:
    names = {name_of(command.words) for command in commands()} - {"qflash-lab", "qflash"}
    goals = re.search(r"^\.PHONY: help (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert goals is not None
    names |= {f"make {goal}" for goal in goals[1].split()}
    tables = (RUN_HERE, RUN_BY, NOT_RUN)
    assert not [name for name in names if sum(any(fnmatch.fnmatch(name, key) for key in table) for table in tables) != 1]
    # what no document names any more
    assert not [key for table in tables for key in table if not fnmatch.filter(names, key)]


@pytest.mark.parametrize("name", [name for name, reason in NOT_RUN.items() if reason.startswith("a step of .ci/run")])
def test_steps_of_ci_are_its_steps(name: str) -> None:
    goal = "make demo" if name == "qflash-lab demo" else name
    assert re.search(rf"^step make (\S+ )*{goal.removeprefix('make ')}( |$)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", RUN_BY)
def test_tests_that_run_commands_exist(name: str) -> None:
    path, _, test = RUN_BY[name].partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    assert test in [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert re.split(r"[ ./]", name.removesuffix(".py"))[-1] in text


@pytest.mark.parametrize("name", RUN_HERE)
def test_small_runs(name: str, tmp_path: pathlib.Path) -> None:
    program, script = name.split()
    assert program == "python"
    words = [sys.executable, str(ROOT / script), *shlex.split(RUN_HERE[name])]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
