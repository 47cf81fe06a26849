"""What others read of the package: metadata, citation, forms of issues, workflows."""

import re
import shlex

import pytest
import yaml
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

from lm_polygraph_asmi import __version__
from tests.pages import DOCS, REPOSITORY, inline, table

FORMS = sorted(REPOSITORY.glob(".github/ISSUE_TEMPLATE/*.yml"))
ABOUT = ProjectMetadata(str(REPOSITORY), PluginManager()).core
MADE = [*FORMS, *REPOSITORY.glob(".github/workflows/*.yml"), REPOSITORY / ".readthedocs.yaml"]


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    paper, page = cited["preferred-citation"], (DOCS / "index.md").read_text()
    written = [f"{who['family-names']}, {who['given-names']}" for who in paper["authors"]]
    assert cited["version"] == __version__
    for name, text in (("author", " and ".join(written)), ("title", paper["title"])):
        assert f"{name} = {{{text}}}" in page


def test_pythons_are_named_alike():
    named = re.findall(r"Python :: (3\.\d+)", " ".join(ABOUT.classifiers))
    assert named == [f"3.{minor}" for minor in range(30) if f"3.{minor}" in ABOUT.python_constraint]
    checks = (REPOSITORY / ".github/workflows/checks.yml").read_text()
    assert {*named} == set(re.findall(r'- \{python: "([\d.]+)"', checks))


def test_each_extra_of_users_is_in_the_table():
    told = [name for row in table("quickstart.md", "extra") for name in inline(row[0])]
    assert sorted([*told, "dev", "docs"]) == sorted(ABOUT.optional_dependencies)


@pytest.mark.parametrize("file", MADE, ids=lambda file: file.name)
def test_forms_and_workflows_are_read_as_meant(file):
    content = yaml.safe_load(file.read_text())
    if file in FORMS:  # what a host of repositories needs of a form
        assert {"name", "description", "body"} <= content.keys()
        fields = {field["id"]: field for field in content["body"]}
        assert len(fields) == len(content["body"])
        assert all(field["attributes"]["label"] for field in fields.values())
        assert {field["type"] for field in fields.values()} <= {"input", "textarea"}


def test_read_the_docs_runs_whole_commands():
    """It writes each into single quotes, and splits the result into words."""
    jobs = yaml.safe_load((REPOSITORY / ".readthedocs.yaml").read_text())["build"]["jobs"]
    for command in [*jobs["create_environment"], *jobs["build"]["html"]]:
        assert shlex.split(f"/bin/sh -c '{command}'") == ["/bin/sh", "-c", command]
