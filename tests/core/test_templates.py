"""What a stranger fills in or copies: issue forms that GitHub accepts, and a citation that is the one of the README."""

from __future__ import annotations

import pathlib
import re

import pytest

import qflash

yaml = pytest.importorskip("yaml")

ROOT = pathlib.Path(__file__).resolve().parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
CITATION = ROOT / "CITATION.cff"

pytestmark = pytest.mark.skipif(not CITATION.is_file(), reason="only the repository has the files")

ATTRIBUTES = {
    "markdown": {"value"},
    "input": {"label", "description", "placeholder", "value"},
    "textarea": {"label", "description", "placeholder", "value", "render"},
    "dropdown": {"label", "description", "multiple", "options", "default"},
    "checkboxes": {"label", "description", "options"},
}
"""By kind of field, what GitHub's syntax for issue forms knows."""


def test_there_is_a_form_for_each_kind_of_issue() -> None:
    assert [path.stem for path in FORMS] == ["bug", "model", "performance"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_have_the_syntax_of_github(path: pathlib.Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert set(form) == {"name", "description", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    for name in ("id", "label"):
        values = [field["id"] if name == "id" else field["attributes"]["label"] for field in fields]
        assert len(values) == len(set(values)) and all(values)
    assert any(field.get("validations", {}).get("required") for field in fields)
    for field in form["body"]:
        assert set(field["attributes"]) <= ATTRIBUTES[field["type"]]
        if field["type"] == "dropdown":
            options = field["attributes"]["options"]
            # YAML's own words, as yes, are no strings
            assert len(options) == len(set(options)) > 1 and all(isinstance(option, str) for option in options)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_functions_that_forms_name_exist(path: pathlib.Path) -> None:
    for name in re.findall(r"\bqflash\.(\w+)", path.read_text(encoding="utf-8")):
        assert hasattr(qflash, name), name


def test_the_citation_is_that_of_the_readme() -> None:
    bibtex = (ROOT / "README.md").read_text(encoding="utf-8").partition("```bibtex\n")[2].partition("```")[0]
    entry = {key: value.replace("{", "").replace("}", "") for key, value in re.findall(r"(\w+) += \{(.*)\}", bibtex)}
    citation = yaml.safe_load(CITATION.read_text(encoding="utf-8"))
    assert citation["authors"] == [{"name": "The QFlash developers"}]
    paper = citation["preferred-citation"]
    authors = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
    found = {"title": paper["title"], "author": authors, "booktitle": paper["collection-title"], "year": str(paper["year"])}
    assert found == entry
    license_line = re.search(r'^license = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert license_line is not None and license_line[1] == citation["license"]
