"""Every gallery env with a sandbox is scored, whatever code leaves at the paths that its rewards read."""

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.cli.envs.check import oracle_of
from agentgym.cli.envs.names import find
from agentgym.environments.registry import find_env, gallery
from agentgym.environments.task_sandboxes import declares_sandboxes, open_sandboxes
from agentgym.sandboxes.docker.docker import why_no_docker
from agentgym.sandboxes.local.local import why_no_bubblewrap
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.testing import Scripted
from envs.logs.env import make_task as make_log
from envs.polyglot.env import make_task as make_program
from envs.polyglot.test_polyglot import build, remove

ROOT = Path(__file__).parents[3]
SPOILED = {
    "an empty folder": "mkdir {}",
    "a link to /dev/zero": "ln -s /dev/zero {}",
    "a FIFO": "mkfifo {}",
    "1 TB of nothing": "truncate -s 1T {} || truncate -s 30M {}",  # The second command fits into Bubblewrap's disk.
    "a name of 255 bytes beside it": f'cd "$(dirname {{}})"; echo x > {"n" * 255}',
    "no permission": "echo x > {}; chmod 000 {}",
    "a link that dangles": "ln -s nowhere {}",
    "a loop of links": "ln -s $(basename {}) {}",
}
"""Commands that replace a file, by the replacement."""
QUICK = ("an empty folder", "a loop of links")
"""The replacements that the fast tests try for every env."""


def files_of_terminal(task: Any) -> list[str]:
    """Return the files and folders that a job's checks read."""
    return [path for check in task.expect for path in re.findall(r"\('([^']+)'\)", check)]


@dataclass(frozen=True)
class Reads:
    """The paths in an env's sandbox that its rewards read."""

    paths: Callable[[Any], list[str]] = lambda _: []
    tasks: Callable[[type[ag.Env[Any]]], list[Any]] = lambda env: [env.tasks("train")[0]]
    sandbox: str = "bubblewrap"


NOTHING = Reads()
"""For envs whose rewards read no file in the sandbox."""
READ = {
    "bisect": NOTHING,
    "bisect_long": NOTHING,
    "bisect_turns": NOTHING,
    "chase": NOTHING,
    "chase_compaction": NOTHING,
    "chase_delegate": NOTHING,
    "chase_long": NOTHING,
    "chase_long_turns": NOTHING,
    "chase_tree": NOTHING,
    "code_repair": Reads(lambda task: [f"{name}.py" for name in task.modules]),
    "logs": Reads(lambda _: ["clean.log"], lambda _: [make_log("train", 0, megabytes=1)]),
    "market": NOTHING,
    "polyglot": Reads(lambda _: ["program"], lambda _: [make_program("train", "python")], "docker"),
    "python_math": NOTHING,
    "repo": Reads(lambda task: [path for path in sorted(task.files) if "__" not in path and "/test_" not in path][:2]),
    "templates/sandbox": Reads(lambda _: ["solution.py"]),
    "terminal": Reads(files_of_terminal, lambda env: [env.tasks("train")[number] for number in range(8)]),
    "web": NOTHING,
}
NAMED = [name for name, reads in READ.items() if reads is not NOTHING]


def env_of(name: str) -> type[ag.Env[Any]]:
    if not name.startswith("templates/"):
        return find_env(name)
    try:
        return find_env("sandbox_template")  # the template's tests may run in this process, too
    except ValueError:
        return find(f"{ROOT / name}/env.py:SandboxTemplate")


def spoiled_by(name: str, command: str) -> type[ag.Env[Any]]:
    """Return the env with a command that runs in its sandbox after the rollout, before it is scored."""
    env = env_of(name)

    async def score(self: Any) -> dict[str, float]:
        spoiled = await self.sandbox.exec(command)
        assert spoiled.ok, spoiled
        scores: dict[str, float] = await env.score(self)
        return scores

    kind: Any = type(env)
    made: Any = kind(env.__name__, (env,), {"score": score, "__module__": env.__module__, "__doc__": env.__doc__})
    spoiled: type[ag.Env[Any]] = made
    return spoiled


@asynccontextmanager
async def sandboxes_of(name: str, *, on_docker: bool = False) -> AsyncIterator[SandboxPool]:
    """Yield sandboxes for the env; skip the test if they can't be opened."""
    docker = on_docker or READ[name].sandbox == "docker"
    why_not = why_no_docker() if docker else why_no_bubblewrap()
    if why_not is not None:
        pytest.skip(why_not)
    own = READ[name].sandbox == "docker"
    async with open_sandboxes(
        env_of(name), 1, None if own else ag.Docker() if docker else ag.Bubblewrap(disk_mb=40)
    ) as sandboxes:
        assert sandboxes is not None
        yield sandboxes


async def assert_all_scored(name: str, kinds: list[str], tasks: list[Any], sandboxes: SandboxPool) -> None:
    """Run the oracle, spoil a path, and score; assert that each reward is a number below that of a right solution."""
    oracle, wrong = oracle_of(env_of(name)), []
    assert oracle is not None
    for task in tasks:
        for path in READ[name].paths(task):
            for kind in kinds:
                command = f"rm -rf {path}; {SPOILED[kind].format(path, path)}"
                rollout = await ag.rollout(spoiled_by(name, command), task, Scripted(oracle(task)), sandboxes=sandboxes)
                if rollout.reward is None or not rollout.reward < 1.0:
                    wrong.append((task.id, path, kind, rollout.reward, str(rollout.failure)))
    assert wrong == []


def test_every_gallery_env_with_a_sandbox_is_listed_here() -> None:
    names = [name for name in gallery() if declares_sandboxes(find_env(name))]
    names += [
        f"templates/{path.parent.name}"
        for path in sorted(ROOT.glob("templates/*/env.py"))
        if "sandbox_spec = " in path.read_text()
    ]
    assert sorted(READ) == sorted(names)


@pytest.mark.parametrize("name", [name for name in NAMED if READ[name].sandbox != "docker"])
async def test_rollouts_with_spoiled_files_are_scored(name: str) -> None:
    async with sandboxes_of(name) as sandboxes:
        await assert_all_scored(name, [*QUICK], READ[name].tasks(env_of(name))[:1], sandboxes)


async def test_nothing_in_place_of_a_log_blocks_its_reward() -> None:
    async with sandboxes_of("logs") as sandboxes:
        await assert_all_scored("logs", [*SPOILED], READ["logs"].tasks(env_of("logs")), sandboxes)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMED if READ[name].sandbox != "docker"])
async def test_rollouts_are_scored_whatever_replaces_a_file_that_a_reward_reads(name: str) -> None:
    async with sandboxes_of(name) as sandboxes:
        await assert_all_scored(name, [*SPOILED], READ[name].tasks(env_of(name)), sandboxes)


@pytest.fixture
def program_image(tmp_path: Path) -> Iterator[str]:
    """Build one of polyglot's images, which is removed at the end of the test."""
    if (why_not := why_no_docker()) is not None:
        pytest.skip(why_not)
    tag = build("python", tmp_path / "python")
    yield tag
    remove(tag, tmp_path / "python")


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.parametrize("name", [*NAMED])
async def test_rollouts_with_spoiled_files_are_also_scored_on_docker(name: str, request: pytest.FixtureRequest) -> None:
    tasks = READ[name].tasks(env_of(name))[:2]
    if name == "polyglot":
        tasks = [task.model_copy(update={"image": request.getfixturevalue("program_image")}) for task in tasks]
    async with sandboxes_of(name, on_docker=True) as sandboxes:
        await assert_all_scored(name, [*SPOILED], tasks, sandboxes)
