"""The dependency law: a room imports only what stands to its right, and the face loads nothing heavy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import agentgym

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "ray", "docker", "transformers", "sglang", "gymnasium", "peft", "httpx", "starlette")

ORDER = [
    "failures declarations sound_json task_fields models settings",
    "types errors",
    "threads time_limits owners log returns task_rows extras",
    "scoring",
    "tools",
    "env",
    "rollouts train bridges view samples credit sandboxes testing env_checks",
    "progress loop workers doctor cli pytest_plugin evaluation report preflight command",
]
FLOOR = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms.split()}
FLOOR |= {"__init__": len(ORDER), "envs": len(ORDER) + 1, "recipes": len(ORDER) + 2}
SERVER = ROOT / "sandbox/server"
SERVER_ORDER = [
    "limits",
    "frames",
    "session_fork",
    "children",
    "worker",
    "process_tree",
    "call",
    "files",
    "sessions",
    "supervisor",
    "start",
    "__main__",
]
"""As the package's docstring has it."""
NEVER = {
    "train": {"env", "tools", "rollouts", "sandboxes", "testing"},
    "rollouts": {"train", "sandboxes", "samples", "credit", "testing"},
    "sandboxes": {"env", "tools", "rollouts", "train", "testing"},
    "samples": {"rollouts", "train", "sandboxes", "testing"},
    "credit": {"samples", "rollouts", "train", "sandboxes", "testing"},
    "bridges": {"train", "sandboxes"},
}
"""Beyond the floors: what a room never imports, although it stands on the same floor or below."""


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def nodes(tree: ast.AST, *, at_import: bool) -> Iterator[ast.AST]:
    """Every node; with `at_import` only those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        lazy |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not (at_import and lazy):
            yield node
            yield from nodes(node, at_import=at_import)


def imports(path: Path, *, at_import: bool = False) -> set[str]:
    """Dotted names the file imports; `from a import b` counts as a.b, which may be a module or a name in a."""
    found: set[str] = set()
    for node in nodes(ast.parse(path.read_text()), at_import=at_import):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # The server is started by its folder, wherever that lies: it alone names its modules relatively.
            assert node.level == (path.parent == SERVER and node.module in SERVER_ORDER), f"{path}: relative import"
            module = f"server.{node.module}" if node.level else node.module
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def room_of(module: str) -> str | None:
    """types, rollouts, ... for a module of agentgym; envs and recipes for theirs; None for foreign ones."""
    first, _, rest = module.partition(".")
    if first == "agentgym":
        room = rest.partition(".")[0]
        return room if room in FLOOR else "__init__"
    return first if first in FLOOR and first in ("envs", "recipes") else None


def broken(path: Path) -> list[str]:
    own = room_of(name_of(path))
    assert own is not None
    rooms = {room for room in map(room_of, imports(path)) if room not in (None, own)}
    return [
        f"{name_of(path)} -> {r}" for r in sorted(map(str, rooms)) if FLOOR[r] > FLOOR[own] or r in NEVER.get(own, ())
    ]


@pytest.mark.parametrize("folder", ["agentgym", "envs", "recipes"])
def test_a_room_imports_only_what_stands_to_its_right(folder: str) -> None:
    assert [line for path in files(folder) for line in broken(path)] == []


def test_every_room_has_its_place_in_the_order() -> None:
    rooms = {
        path.stem for path in (ROOT / "agentgym").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms <= set(FLOOR)


def test_what_goes_into_the_container_imports_only_the_standard_library() -> None:
    known = {"server", *sys.stdlib_module_names}
    assert [p.name for p in files("sandbox") if {i.split(".")[0] for i in imports(p)} - known] == []


def test_each_module_of_the_server_imports_only_those_before_it() -> None:
    assert {path.stem for path in files("sandbox/server")} == {"__init__", *SERVER_ORDER}
    for place, name in enumerate(SERVER_ORDER):
        own = {i.split(".")[1] for i in imports(SERVER / f"{name}.py") if i.startswith("server.")}
        assert own <= set(SERVER_ORDER[:place]), name


def importers(folder: str, package: str) -> list[str]:
    return [name_of(p) for p in files(folder) if package in {i.split(".")[0] for i in imports(p)}]


def test_only_the_workers_import_ray() -> None:
    assert set(importers("agentgym", "ray")) <= {"agentgym.workers"}


def test_only_the_pytest_plugin_imports_pytest() -> None:
    assert importers("agentgym", "pytest") == ["agentgym.pytest_plugin"]


def test_of_the_rollouts_only_the_local_engine_imports_torch() -> None:
    assert all(name.startswith("agentgym.rollouts.local") for name in importers("agentgym/rollouts", "torch"))
    assert importers("agentgym/rollouts", "torch") != []


@pytest.mark.parametrize("part", ["samples", "credit"])
def test_the_seam_knows_no_torch(part: str) -> None:
    assert {i.split(".")[0] for i in imports(ROOT / f"agentgym/{part}.py")} & set(HEAVY) == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {name_of(path) for path in files("agentgym")}
    graph = {
        name_of(path): {m for i in imports(path, at_import=True) for m in (i, i.rpartition(".")[0]) if m in modules}
        for path in files("agentgym")
    }
    graph = {name: used - {name, "agentgym"} for name, used in graph.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules)


@pytest.mark.parametrize("module", ["agentgym", "agentgym.testing", "agentgym.cli"])
def test_importing_the_face_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {(*HEAVY, 'pytest')!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout) == ("", "[]\n")


@pytest.mark.parametrize("recipe", ["chase_grpo", "bisect_turns", "chase_sft"])
def test_a_recipe_is_described_without_torch(recipe: str) -> None:
    code = (
        f"import sys, recipes.{recipe} as r; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout) == ("", "[]\n")


@pytest.mark.parametrize("name", agentgym.__all__)
def test_every_name_of_the_face_is_there(name: str) -> None:
    assert getattr(agentgym, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'agentgym' has no attribute 'Trainr'"):
        agentgym.Trainr  # noqa: B018
