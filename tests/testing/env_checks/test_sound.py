"""A sound env passes its check and leaves nothing; a real sandbox is used if there is one."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import agentgym as ag
from agentgym.engines.scripted import Reply, call, say
from agentgym.errors import SandboxError
from agentgym.sandboxes.choose import auto
from agentgym.sandboxes.docker.docker import why_no_docker
from agentgym.sandboxes.local.local import why_no_bubblewrap
from agentgym.sandboxes.protocol import SandboxPool, SandboxSpec
from agentgym.testing import check_env
from tests.testing.env_checks.modules import load

ROOT = Path(__file__).parents[3]
SOUND = sorted(Path(__file__).with_name("sound").glob("*.py"))
TASK = ag.Task(id="t", prompt=({"role": "user", "content": "What is in the file?"},))


@pytest.mark.parametrize("path", SOUND, ids=[path.stem for path in SOUND])
async def test_a_sound_env_passes(path: Path, no_leaks: None) -> None:
    module = load(path)
    await check_env(module.Sound, module.TASK, oracle=module.ORACLE, **getattr(module, "OPTIONS", {}))


class Shell(ag.ToolEnv[ag.Task]):
    """Reads a file with a shell."""

    sandbox_spec = ag.AnySandbox()

    async def setup(self) -> None:
        await self.sandbox.write({"secret": "swordfish"})

    @ag.tool
    async def bash(self, cmd: str) -> str:
        """Run a command."""
        return (await self.sandbox.exec(cmd)).text()

    @ag.reward
    async def right(self) -> float:
        return float(self.answer == "swordfish")


ORACLE: list[Reply] = [call("bash", cmd="cat secret"), say("swordfish")]


async def test_an_env_with_a_sandbox_is_checked_in_a_real_sandbox(no_leaks: None) -> None:
    try:
        auto()
    except SandboxError as error:
        pytest.skip(str(error))
    await check_env(Shell, TASK, oracle=ORACLE)


@pytest.mark.parametrize(
    "spec", [pytest.param(ag.Docker(), marks=pytest.mark.docker), ag.Bubblewrap()], ids=["docker", "bubblewrap"]
)
async def test_sandboxes_of_a_real_pool_are_not_reported_as_leaks_of_the_env(spec: SandboxSpec) -> None:
    why = why_no_docker() if isinstance(spec, ag.Docker) else why_no_bubblewrap()
    if why is not None:
        pytest.skip(why)
    async with spec.open(1) as sandboxes:
        await check_env(Shell, TASK, oracle=ORACLE, sandboxes=sandboxes)


class Nowhere:
    """A sandbox that cannot be opened."""

    @asynccontextmanager
    async def open(self, size: int) -> AsyncIterator[SandboxPool]:
        raise SandboxError("no engine runs")
        yield


async def test_if_no_sandbox_is_available_a_fake_one_is_used_with_a_warning() -> None:
    class Lost(Shell):
        sandbox_spec = Nowhere()  # type: ignore[assignment]

    wanted = r"tool 'bash' raised AssertionError: FakeSandbox: the env ran 'cat secret'.*: no sandbox of Lost could"
    with pytest.warns(UserWarning, match="a FakeSandbox was used"), pytest.raises(AssertionError, match=wanted):
        await check_env(Lost, TASK, oracle=ORACLE)


def test_a_check_can_run_in_a_script() -> None:
    module = load(next(path for path in SOUND if path.stem == "one_turn_question"))
    asyncio.run(check_env(module.Sound, module.TASK, oracle=module.ORACLE))


def test_the_test_helpers_work_without_pytest() -> None:
    rooms = "agentgym.testing, agentgym.testing.env_checks.check, envs.chase.demo"
    code = f"import sys; sys.modules['pytest'] = None; import {rooms}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
