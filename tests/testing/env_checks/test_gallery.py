"""The gallery's oracles: each env that comes with agentgym is solved by its oracle, in the sandbox that it needs."""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.chat.tokenizer import ChatTokenizer, chat_tokenizer
from agentgym.cli.envs.check import oracle_of
from agentgym.environments.registry import find_env, gallery
from agentgym.environments.task_sandboxes import open_sandboxes
from agentgym.sandboxes.docker.docker import why_no_docker
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.sandboxes.local.local import why_no_bubblewrap
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.testing import Scripted
from envs.polyglot.test_polyglot import build, remove

TINY = Path(__file__).parents[3] / "recipes/checkpoints/chase"
SPLITS: tuple[ag.Split, ...] = ("train", "test")


@dataclass(frozen=True)
class Needs:
    """The sandbox and settings with which an env's oracle solves every task, and the reward for that."""

    sandbox: str = ""
    """fake, bubblewrap or docker; "" for none."""
    tasks: int = 12
    """The number of tasks run per split."""
    parameters: tuple[tuple[str, Any], ...] = ()
    least: float = 1.0
    """The lowest reward of a solved task."""


FAKE = Needs("fake")
NEEDED = {
    "bisect": FAKE,
    "bisect_long": Needs("fake", least=0.79),  # each of up to four guesses costs 0.05
    "bisect_turns": FAKE,
    "calculator": Needs(),
    "chain_sum": Needs(),
    "chase": FAKE,
    "chase_compaction": FAKE,
    "chase_delegate": FAKE,
    "chase_long": FAKE,
    "chase_long_turns": FAKE,
    "chase_tree": FAKE,
    "code_repair": Needs("fake", 8),
    "frozen_lake": Needs(),
    "guess_number": Needs(),
    "judge_essay": Needs(),
    "judge_essay_pairs": Needs(),
    "logs": Needs("bubblewrap", 1),
    "market": Needs("docker", 2),
    "negotiate": Needs(),
    "nim": Needs(tasks=5, parameters=(("skill", 0.0),)),  # lost at the start, so the opponent must err
    "notes": Needs(tasks=4),
    "polyglot": Needs("docker", 3),
    "python_math": Needs("fake", 16),
    "repo": Needs("bubblewrap", 3),
    "search": Needs(),
    "shop": Needs(tasks=18),
    "terminal": Needs("bubblewrap", 6),
    "tictactoe": Needs(),
    "web": Needs("bubblewrap", 3),
}
PARAMS = [
    pytest.param(name, marks=[pytest.mark.docker] if needs.sandbox == "docker" else [])
    for name, needs in NEEDED.items()
]


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    """Return the tiny model's tokenizer, since the chases' limits count its tokens."""
    return chat_tokenizer(TINY)


@pytest.fixture
def polyglot(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Build images for polyglot's languages and yield them by language; remove them at the end."""
    with ExitStack() as stack:
        made = {}
        for language in ("python", "perl", "shell"):
            made[language] = build(language, tmp_path / language)
            stack.callback(remove, made[language], tmp_path / language)
        yield made


@asynccontextmanager
async def sandboxes_of(env: type[ag.Env[Any]], sandbox: str) -> AsyncIterator[SandboxPool | None]:
    """Yield sandboxes for a rollout, or None if the env needs none; skip the test if they can't be opened."""
    if sandbox == "fake":
        yield FakeSandboxPool()
        return
    why_not = why_no_docker() if sandbox == "docker" else why_no_bubblewrap() if sandbox == "bubblewrap" else None
    if why_not is not None:
        pytest.skip(f"{sandbox}: {why_not}")
    local = ag.Bubblewrap(network="loopback" if env.__name__ == "Web" else "none")
    async with open_sandboxes(env, 1, local if sandbox == "bubblewrap" else None) as sandboxes:
        yield sandboxes


def test_every_gallery_env_has_an_oracle_and_is_listed_here() -> None:
    assert set(NEEDED) == set(gallery())
    assert [name for name in NEEDED if oracle_of(find_env(name)) is None] == []


@pytest.mark.parametrize("name", PARAMS)
async def test_the_oracle_of_each_env_solves_its_tasks(
    name: str, tokenizer: ChatTokenizer, request: pytest.FixtureRequest
) -> None:
    if name == "chain_sum":
        pytest.importorskip("reasoning_gym", reason="agentgym-kit[reasoning] is not installed")
    needs = NEEDED[name]
    env = find_env(name).configured(**dict(needs.parameters))
    oracle = oracle_of(env)
    assert oracle is not None
    tasks = [env.tasks(split)[index] for split in SPLITS for index in range(needs.tasks)]
    missed = []
    async with sandboxes_of(env, needs.sandbox) as sandboxes:
        if name == "polyglot":
            images = request.getfixturevalue("polyglot")
            tasks = [task.model_copy(update={"image": images[task.id.rpartition("-")[2]]}) for task in tasks]
        for task in tasks:
            engine = Scripted(oracle(task), tokenizer=tokenizer if name.startswith("chase") else None)
            rollout = await ag.rollout(env, task, engine, sandboxes=sandboxes)
            assert rollout.error is None, rollout
            if rollout.reward is None or not needs.least <= rollout.reward <= 1.0:
                missed.append(f"{task.id}: {rollout.reward}")
    assert missed == []
