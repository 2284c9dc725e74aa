"""The face: the names of `import agentgym as ag`, light to import and each in one place."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import agentgym

ROOT = Path(__file__).parents[1]
STUBS = sorted((ROOT / "agentgym").rglob("__init__.pyi"))
DUNDERS = {"__doc__", "__file__", "__name__", "__path__", "__version__"}


def test_dir_lists_the_public_names_and_no_others() -> None:
    assert {name for name in dir(agentgym) if name not in DUNDERS} == set(agentgym.__all__) - DUNDERS
    assert len(set(agentgym.__all__)) == len(agentgym.__all__)


@pytest.mark.parametrize("name", sorted(set(agentgym.__all__) - DUNDERS))
def test_a_name_of_the_face_is_no_module(name: str) -> None:
    assert not isinstance(getattr(agentgym, name), ModuleType)


def test_no_name_of_the_face_hides_a_module() -> None:
    modules = {path.stem for path in (ROOT / "agentgym").iterdir()} - {"__init__"}
    assert modules & set(agentgym.__all__) == set()


def test_the_module_of_samples_can_be_imported_by_its_name() -> None:
    code = "import agentgym.samples as s; print(type(s).__name__, callable(s.build_samples))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout) == ("", "module True\n")


@pytest.mark.parametrize("name", sorted(set(agentgym.__all__) - DUNDERS))
def test_each_class_and_function_of_the_face_says_what_it_is(name: str) -> None:
    made = getattr(agentgym, name)
    if inspect.isclass(made) or inspect.isfunction(made):
        assert (inspect.getdoc(made) or "").partition("\n")[0].strip(), name
        assert made.__module__.startswith("agentgym."), name


def test_the_face_has_what_an_env_and_a_recipe_need_and_no_more() -> None:
    assert len(dir(agentgym)) <= 60


@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: str(stub.parent.relative_to(ROOT)))
def test_each_name_is_the_one_that_type_checkers_read_in_the_stub(stub: Path) -> None:
    package = importlib.import_module(".".join(stub.parent.relative_to(ROOT).parts))
    tree = ast.parse(stub.read_text())
    homes = {each.name: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for each in node.names}
    assert set(homes) == set(package.__all__) - DUNDERS
    for name, module in homes.items():
        assert getattr(importlib.import_module(f"{package.__name__}.{module}"), name) is getattr(package, name)


def test_a_name_that_a_room_has_not_is_an_attribute_error_that_names_the_room() -> None:
    with pytest.raises(AttributeError, match=r"'agentgym\.train' has no attribute 'Trainr'"):
        getattr(importlib.import_module("agentgym.train"), "Trainr")  # noqa: B009


@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("Trainer", "agentgym.train"),
        ("run_groups", "agentgym.scheduling"),
        ("SandboxError", "agentgym.errors"),
        ("Scripted", "agentgym.testing"),
    ],
)
def test_a_name_of_another_room_is_told_where_it_is(name: str, room: str) -> None:
    with pytest.raises(AttributeError, match=f"^module 'agentgym' has no attribute '{name}'; it is in {room}$"):
        getattr(agentgym, name)
    assert hasattr(importlib.import_module(room), name)


def test_a_misspelled_name_is_one_that_python_can_correct() -> None:
    with pytest.raises(AttributeError, match=r"^module 'agentgym' has no attribute 'RunConfg'$") as refused:
        getattr(agentgym, "RunConfg")  # noqa: B009
    assert (refused.value.name, refused.value.obj) == ("RunConfg", agentgym)
