"""Tables in the docs that mirror the code: extras, packages, and the types from token to training."""

import ast
import importlib
import re
import tomllib

import pytest

import agentgym as ag
from tests.docs.blocks import DOCS, ROOT

TYPES = re.findall(r"^\| `(\w+)` \| `(agentgym[\w.]*)` \|", (DOCS / "concepts/token.md").read_text(), re.MULTILINE)


def test_the_extras_are_those_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set(re.findall(r"^\| `agentgym-kit\[(\w+)\]`", (DOCS / "installation.md").read_text(), re.MULTILINE))
    assert named == set(project["optional-dependencies"]) - {"bench"}


def test_the_map_has_every_package_in_import_order() -> None:
    house = ast.parse((ROOT / "tests/test_house.py").read_text())
    [order] = [
        ast.literal_eval(node.value)
        for node in house.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "ORDER"
    ]
    drawn = re.findall(r"^  (\w+)(?:/|\.py) ", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    assert drawn == [room for room in order if "." not in room]


def test_the_page_on_rollouts_lists_exactly_the_public_members_of_a_rollout() -> None:
    page = (DOCS / "rollouts.md").read_text()
    cells = re.findall(r"^\| (`.*?) \|", page.partition("\n## The conversation")[0], re.MULTILINE)
    listed = [name for cell in cells if cell != "member of `ag.Rollout`" for name in re.findall(r"`(\w+)", cell)]
    assert sorted(listed) == [name for name in dir(ag.Rollout) if not name.startswith("_")]


def test_the_types_are_in_the_table() -> None:
    assert len(TYPES) >= 10


@pytest.mark.parametrize(("name", "module"), TYPES)
def test_each_type_is_defined_in_the_module_that_its_row_names(name: str, module: str) -> None:
    assert getattr(importlib.import_module(module), name).__module__ == module
