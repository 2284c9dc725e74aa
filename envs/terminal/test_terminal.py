"""Tests of terminal in real sandboxes: what earns the reward, and what only looks as if it should."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import agentgym as ag
from agentgym.sandboxes.docker.docker import why_no_docker
from agentgym.sandboxes.local.local import why_no_bubblewrap
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.testing import Reply, Scripted, call, check_env, say
from envs.terminal.env import Terminal, TerminalTask, make_task, oracle
from envs.terminal.jobs import KINDS

NAMES = [kind.__name__ for kind in KINDS]
SPLITS: tuple[ag.Split, ...] = ("train", "test")


@pytest_asyncio.fixture(params=["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
async def real(request: pytest.FixtureRequest) -> AsyncIterator[SandboxPool]:
    """Yield a pool of one real sandbox of each kind."""
    docker = request.param == "docker"
    if (why_not := why_no_docker() if docker else why_no_bubblewrap()) is not None:
        pytest.skip(f"{request.param}: {why_not}")
    async with (ag.Docker() if docker else ag.Bubblewrap()).open(1) as pool:
        yield pool


def task_of(kind: str, split: ag.Split = "train") -> TerminalTask:
    return make_task(split, NAMES.index(kind))


async def play(sandboxes: SandboxPool, task: TerminalTask, *script: Reply) -> ag.Rollout:
    rollout = await ag.rollout(Terminal, task, Scripted([*script, say("Done.")]), sandboxes=sandboxes)
    assert rollout.error is None, rollout
    return rollout


async def test_the_oracle_solves_every_kind_of_job(real: SandboxPool) -> None:
    for kind in NAMES:
        task = task_of(kind, split="test")
        assert (await play(real, task, *oracle(task)[:1])).reward == 1.0, kind


async def test_terminal_keeps_the_contract_of_an_env(real: SandboxPool) -> None:
    task = task_of("configure")
    await check_env(Terminal, task, oracle=oracle(task), sandboxes=real)


NEARLY = {
    "count": "grep -r ERROR logs | wc -l > answer.txt",
    "find": "ls -S $(find data -type f) | head -n 1 > answer.txt",
    "rename": 'cd photos && for f in *; do mv "$f" "$(echo "$f" | tr A-Z a-z)"; done',
    "permit": "chmod 777 bin/*",
    "extract": "mkdir restored && tar -xzf backup.tar.gz -C restored --strip-components=2",
    "configure": "sed -i 's/^port = .*/port = 12345/' etc/app.ini",
    "select": "grep yes users.csv | cut -d, -f1 | sort -u > emails.txt",
    "replace": "sed -i 's/[a-z]*/word/g' docs/*",
}


async def test_nearly_right_work_is_not_rewarded(real: SandboxPool) -> None:
    for kind, command in NEARLY.items():
        assert (await play(real, task_of(kind), call("shell", command=command))).reward == 0.0, kind


FORGED = "def walk(*_): raise SystemExit(0)\\ndef text(*_): return Same()\\n"
CHEATS = {
    "a module stands in for those of the checks": f"printf '{FORGED}' | tee os.py json.py hidden.py sitecustomize.py",
    "the answer is a link out of the folder": "ln -s /proc/self/environ answer.txt",
    "the answer is a guess": "echo 42 > answer.txt",
    "the answer never ends": "ln -s /dev/zero answer.txt",
    "the answer is a pipe": "mkfifo answer.txt",
    "the folder is gone": "rm -rf ./* && cd / && rm -rf /tmp/*",
}


@pytest.mark.parametrize("how", CHEATS)
async def test_cheating_does_not_solve_it(real: SandboxPool, how: str) -> None:
    assert (await play(real, task_of("count"), call("shell", command=CHEATS[how]))).reward == 0.0


async def test_a_background_process_cannot_spoil_a_right_answer(real: SandboxPool) -> None:
    task = task_of("count")
    daemon = "(while :; do echo 0 > answer.txt; done) >/dev/null 2>&1 & printf 'raise SystemExit' > os.py"
    rollout = await play(real, task, call("shell", command=daemon), call("shell", command=task.solution))
    assert rollout.reward == 1.0


def test_the_right_answer_is_in_no_prompt_or_file() -> None:
    for index in range(64):
        task = make_task("train", index)
        said = str(task.prompt) + task.prepare + "".join(task.files)
        assert task.solution not in said
        if task.kind in ("count", "find", "select"):
            assert not {str(value) for value in task.expect.values()} & {said, *task.files.values()}


@pytest.mark.parametrize("split", SPLITS)
def test_tasks_are_reproducible(split: ag.Split) -> None:
    assert list(Terminal.tasks(split)[:16]) == [make_task(split, index) for index in range(16)]


def test_the_splits_have_no_task_in_common() -> None:
    train, test = ({str(task.files) for task in Terminal.tasks(split)[:400]} for split in SPLITS)
    assert len(train) == len(test) == 400
    assert not train & test
