"""The public API: the names of `import agentgym as ag`, light to import and each defined in one place."""

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
def test_no_public_name_is_a_module(name: str) -> None:
    assert not isinstance(getattr(agentgym, name), ModuleType)


def test_no_public_name_hides_a_module() -> None:
    modules = {path.stem for path in (ROOT / "agentgym").iterdir()} - {"__init__"}
    assert modules & set(agentgym.__all__) == set()


def test_the_samples_module_can_be_imported_by_name() -> None:
    code = "import agentgym.samples as s; print(type(s).__name__, callable(s.build_samples))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout) == ("", "module True\n")


@pytest.mark.parametrize("name", sorted(set(agentgym.__all__) - DUNDERS))
def test_each_public_class_and_function_has_a_docstring(name: str) -> None:
    made = getattr(agentgym, name)
    if inspect.isclass(made) or inspect.isfunction(made):
        assert (inspect.getdoc(made) or "").partition("\n")[0].strip(), name
        assert made.__module__.startswith("agentgym."), name


def test_there_are_at_most_60_public_names() -> None:
    assert len(dir(agentgym)) <= 60


@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: str(stub.parent.relative_to(ROOT)))
def test_each_public_name_is_the_one_in_the_stub(stub: Path) -> None:
    package = importlib.import_module(".".join(stub.parent.relative_to(ROOT).parts))
    tree = ast.parse(stub.read_text())
    homes = {each.name: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for each in node.names}
    assert set(homes) == set(package.__all__) - DUNDERS
    for name, module in homes.items():
        assert getattr(importlib.import_module(f"{package.__name__}.{module}"), name) is getattr(package, name)


def test_a_missing_name_is_an_attribute_error_that_names_the_package() -> None:
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
def test_a_name_of_another_package_is_an_error_that_names_that_package(name: str, room: str) -> None:
    with pytest.raises(AttributeError, match=f"^module 'agentgym' has no attribute '{name}'; it is in {room}$"):
        getattr(agentgym, name)
    assert hasattr(importlib.import_module(room), name)


def test_python_can_suggest_a_correction_for_a_misspelled_name() -> None:
    with pytest.raises(AttributeError, match=r"^module 'agentgym' has no attribute 'RunConfg'$") as refused:
        getattr(agentgym, "RunConfg")  # noqa: B009
    assert (refused.value.name, refused.value.obj) == ("RunConfg", agentgym)
