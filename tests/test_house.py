"""The structure: a package imports only packages before it, and the top-level package loads nothing heavy."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import agentgym
from tests.mutants import stale

ROOT = Path(__file__).parents[1]
HEAVY = (
    "torch",
    "ray",
    "docker",
    "transformers",
    "sglang",
    "gymnasium",
    "peft",
    "httpx",
    "openai",
    "starlette",
    "uvicorn",
)

LIGHT = (
    "from agentgym import AgentEnv, Compact, Env, Game, Judge, Limits, Rows, Sampling, SimulatedUser, Task, ToolEnv; "
    "from agentgym import BranchingConfig, find_env, mix, reward, rollout, split, tool; "
    "from agentgym.samples import build_samples; from agentgym.sandboxes import ExecResult; "
    "from agentgym.scheduling import Scheduler, TaskSampler, run_groups"
)

ORDER = [
    "errors",
    "config_fields",
    "seeds",
    "machine",
    "types",
    "causal_lm",
    "files",
    "gguf_files",
    "hub",
    "sandboxes.protocol",
    "sandboxes",
    "data",
    "tools",
    "environments",
    "chat",
    "engines",
    "store",
    "exports",
    "advantages",
    "samples",
    "train",
    "weight_sync",
    "judges",
    "agent_api",
    "rollouts",
    "bridges",
    "scheduling",
    "testing",
    "pytest_plugin",
    "evals",
    "run",
    "view",
    "cluster",
    "launch",
    "cli",
]
"""The library's packages in their order. A package imports only packages that come before it."""
PROTOCOL = "sandboxes.protocol"
FLOOR = {room: floor for floor, room in enumerate(ORDER)}
FLOOR |= {
    "__init__": len(ORDER),
    "__main__": len(ORDER),
    "envs": len(ORDER) + 1,
    "recipes": len(ORDER) + 2,
    "benchmarks": len(ORDER) + 2,
}
SERVER = ROOT / "sandbox/server"
SERVER_ORDER = [
    "limits",
    "kernel",
    "frames",
    "imports",
    "session_fork",
    "network",
    "bounds",
    "space",
    "children",
    "worker",
    "process_tree",
    "stillness",
    "program",
    "background",
    "call",
    "counters",
    "shell",
    "files",
    "transfer",
    "folder_copy",
    "packing",
    "archive",
    "sessions",
    "snapshots",
    "arena",
    "fresh",
    "supervisor",
    "keeper",
    "start",
    "__main__",
]
"""In the order given in the package's docstring."""
NEVER = {
    "sandboxes": {"data", "tools", "environments"},
    "tools": {"sandboxes"},
    "environments": {"sandboxes"},
    "chat": {"environments", "tools", "sandboxes", "sandboxes.protocol"},
    "engines": {"environments", "tools", "sandboxes", "sandboxes.protocol"},
    "store": {"environments", "chat", "sandboxes", "sandboxes.protocol"},
    "samples": {"environments", "chat", "sandboxes", "sandboxes.protocol"},
    "train": {"environments", "tools", "chat", "engines", "sandboxes", "sandboxes.protocol"},
    "judges": {"train", "samples", "sandboxes"},
    "agent_api": {"train", "samples", "sandboxes"},
    "rollouts": {"train", "samples", "advantages", "sandboxes"},
    "scheduling": {"train", "samples", "sandboxes"},
    "bridges": {"train", "samples", "sandboxes"},
    "view": {"train", "chat", "engines", "sandboxes"},
}
"""Packages that a package never imports although they are earlier in the order; sandboxes.protocol is separate."""


@cache
def files(folder: str) -> tuple[Path, ...]:
    return tuple(sorted((ROOT / folder).rglob("*.py")))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the dotted names that the file imports, even inside functions.

    `from a import b` counts as a.b, a module or a name in a.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # The server is started by its folder, wherever that is: it alone imports its modules relatively.
            assert node.level == (path.parent == SERVER and node.module in SERVER_ORDER), f"{path}: relative import"
            module = f"server.{node.module}" if node.level else node.module
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def room_of(module: str) -> str | None:
    """Return a module's package: types, rollouts, ... in agentgym; envs, recipes or benchmarks; None for others."""
    first, _, rest = module.partition(".")
    if first == "agentgym":
        room, _, inner = rest.partition(".")
        part = f"{room}.{inner.partition('.')[0]}"
        return part if part in FLOOR else room if room in FLOOR else "__init__"
    return first if first in FLOOR and first in ("envs", "recipes", "benchmarks") else None


def broken(path: Path) -> list[str]:
    own = room_of(name_of(path))
    assert own is not None
    rooms = {room for room in map(room_of, imports(path)) if room not in (None, own)}
    return [
        f"{name_of(path)} -> {r}" for r in sorted(map(str, rooms)) if FLOOR[r] > FLOOR[own] or r in NEVER.get(own, ())
    ]


@pytest.mark.parametrize("folder", ["agentgym", "envs", "recipes"])
def test_a_package_imports_only_packages_that_come_before_it(folder: str) -> None:
    assert [line for path in files(folder) for line in broken(path)] == []


def rooms_of_the_library() -> set[str]:
    """Return the modules and packages directly under agentgym/, and the sandboxes' protocol."""
    inside = (ROOT / "agentgym").iterdir()
    return {path.stem for path in inside if path.suffix == ".py" or (path / "__init__.py").exists()} | {PROTOCOL}


def test_the_order_names_exactly_the_packages_that_exist() -> None:
    outside = {"envs", "recipes", "benchmarks"}
    assert set(FLOOR) - outside == rooms_of_the_library()


def test_every_package_that_a_rule_names_exists() -> None:
    named = {*NEVER, *(room for rooms in NEVER.values() for room in rooms)}
    assert named <= rooms_of_the_library()
    assert len(set(ORDER)) == len(ORDER)


def test_container_code_imports_only_the_standard_library() -> None:
    known = {"server", *sys.stdlib_module_names}
    assert [p.name for p in files("sandbox") if {i.split(".")[0] for i in imports(p)} - known] == []


def test_each_server_module_imports_only_earlier_ones() -> None:
    assert {path.stem for path in files("sandbox/server")} == {"__init__", *SERVER_ORDER}
    for place, name in enumerate(SERVER_ORDER):
        own = {i.split(".")[1] for i in imports(SERVER / f"{name}.py") if i.startswith("server.")}
        assert own <= set(SERVER_ORDER[:place]), name


def importers(folder: str, package: str) -> list[str]:
    return [name_of(p) for p in files(folder) if any(f"{i}.".startswith(f"{package}.") for i in imports(p))]


@pytest.mark.parametrize("package", ["torch", "agentgym.causal_lm"])
def test_only_the_embedded_engine_and_the_trainer_import_torch(package: str) -> None:
    found = {name for name in importers("agentgym", package) if not name.startswith("agentgym.causal_lm.")}
    allowed = ("agentgym.engines.transformers", "agentgym.train")
    assert found != set()
    assert [name for name in found if not name.startswith(allowed)] == []


def test_benchmark_code_for_other_interpreters_imports_none_of_our_packages() -> None:
    """They have neither agentgym nor its dependencies: `theirs`, and all benchmark modules that it imports."""
    waiting = {path for path in files("benchmarks") if path.stem.startswith("theirs")}
    assert waiting != set()
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        named = [ROOT / i.replace(".", "/") for i in imports(path) if i.startswith("benchmarks.")]
        known = {file for i in named for file in (i.with_suffix(".py"), i.parent.with_suffix(".py")) if file.is_file()}
        waiting |= (known | {room for file in known if (room := file.parent / "__init__.py").is_file()}) - seen
    ours = {"agentgym", "envs", "recipes"}
    assert [name_of(p) for p in seen if {i.split(".")[0] for i in imports(p)} & ours] == []


def test_the_librarys_tests_need_no_benchmark() -> None:
    found = importers("tests", "benchmarks")
    assert found != []
    assert [name for name in found if not name.startswith("tests.benchmarks.")] == []


@pytest.mark.parametrize("part", ["agentgym/samples.py", "agentgym/advantages"])
def test_the_interface_layers_do_not_import_torch(part: str) -> None:
    place = ROOT / part
    paths = [place] if place.is_file() else files(part)
    assert {i.split(".")[0] for path in paths for i in imports(path)} & set(HEAVY) == set()


def test_there_are_no_import_cycles_even_inside_functions() -> None:
    modules = {name_of(path) for path in files("agentgym")}
    graph = {
        name_of(path): {m for i in imports(path) for m in (i, i.rpartition(".")[0]) if m in modules}
        for path in files("agentgym")
    }
    graph = {name: used - {name, "agentgym"} for name, used in graph.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules)


def test_importing_the_top_level_package_loads_no_subpackage() -> None:
    code = "import sys, agentgym; print([m for m in sys.modules if m in ('numpy', 'pydantic') or 'agentgym.' in m])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout) == ("", "[]\n")


@pytest.mark.parametrize("code", ["import agentgym.testing", "import agentgym.cli.main", LIGHT])
def test_modules_for_envs_and_their_tests_load_nothing_heavy(code: str) -> None:
    heavy = (*HEAVY, "pytest")
    code = f"import sys; {code}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout) == ("", "[]\n")


@pytest.mark.parametrize("name", agentgym.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(agentgym, name) is not None


def test_a_missing_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'agentgym' has no attribute 'Trainr'"):
        getattr(agentgym, "Trainr")  # noqa: B009


def test_only_the_pytest_plugin_imports_pytest() -> None:
    in_sandboxes = [
        "agentgym.sandboxes.hidden_tests.runners"
    ]  # A program that runs in sandboxes; nothing here imports it.
    assert importers("agentgym", "pytest") == ["agentgym.pytest_plugin", *in_sandboxes]


def test_foreign_files_are_opened_in_one_place() -> None:
    """Files of runs, trajectories, adapters and checkpoints are opened by `foreign_files`, which limits them."""
    plain = {"read_text", "read_bytes", "sqlite3.connect", "zlib.decompress", "pickle.load", "json.load", "torch.load"}
    own = {
        "view/server.py": {"read_bytes"},  # the page
        "view/search/index.py": {"sqlite3.connect"},  # the index, in the user's cache
        "store/schema.py": {"sqlite3.connect"},  # for writing, after check_journal
        "train/snapshot.py": {"read_text"},  # the ranks' reports about their parts
        "train/checkpoint.py": {"torch.load"},  # weights only
    }
    rooms = ["store", "view", "exports", "evals"]
    named = ["engines/adapter_files", "cli/merge", "cli/show", "cli/exports", "train/snapshot", "train/checkpoint"]
    named += [f"run/{name}" for name in ("metrics_logger", "resume", "recorder")]
    of_strangers = [path for room in rooms for path in files(f"agentgym/{room}")]
    of_strangers += [ROOT / "agentgym" / f"{name}.py" for name in named]
    found = {path.relative_to(ROOT / "agentgym").as_posix(): calls(path) & plain for path in of_strangers}
    assert {name: used for name, used in found.items() if used} == own


def calls(path: Path) -> set[str]:
    """Return the methods that a file calls, by name, and module functions as `module.name`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.add(node.func.attr)
            if isinstance(node.func.value, ast.Name):
                found.add(f"{node.func.value.id}.{node.func.attr}")
    return found


def test_mutants_toml_excuses_faults_that_exist() -> None:
    assert not stale(tomllib.loads((ROOT / "tests" / "mutants.toml").read_text()))


def test_mutants_toml_names_tests_that_exist() -> None:
    named = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["tests"].values()
    tests = {test.partition("[")[0] for beside in named for test in beside if "::" in test}
    missing = [
        test for test in sorted(tests) if f"def {test.split('::')[1]}(" not in (ROOT / test.split("::")[0]).read_text()
    ]
    assert not missing
