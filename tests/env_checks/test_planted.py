"""Every mistake that is planted in an env is found, in words that name what to change; all of them in one report."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from agentgym.testing import check_env
from tests.env_checks import looking
from tests.env_checks.modules import load

PLANTED = sorted(Path(__file__).with_name("planted").glob("*.py"))


@pytest.fixture
def planted(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module with the mistake; what the mistake leaves is ended after the test."""
    module = load(request.param)
    yield module
    for left in getattr(module, "KEPT", ()):
        end = left.communicate if hasattr(left, "communicate") else left.close
        end()
    if hasattr(module, "END"):
        module.END.set()


@pytest.mark.parametrize("planted", PLANTED, ids=[path.stem for path in PLANTED], indirect=True)
async def test_a_planted_mistake_is_found_and_named(planted: ModuleType) -> None:
    task, oracle = getattr(planted, "TASK", looking.TASK), getattr(planted, "ORACLE", looking.ORACLE)
    with pytest.raises(AssertionError, match=f"\n{planted.FOUND}"):
        await check_env(planted.Planted, task, oracle=oracle, **getattr(planted, "OPTIONS", {}))


async def test_the_env_without_a_mistake_passes(no_leaks: None) -> None:
    await check_env(looking.Looking, looking.TASK, oracle=looking.ORACLE)


async def test_several_mistakes_are_reported_together() -> None:
    class Several(looking.Looking):
        async def right(self) -> float:
            return 1.0

    with pytest.raises(AssertionError) as raised:
        await check_env(Several, looking.TASK, oracle=[])
    lines = str(raised.value).splitlines()
    assert lines[0] == "check_env(Several): 2 findings"
    assert [line.split(":")[0] for line in lines[1:]] == ["reward", "reward"]


async def test_what_each_rollout_leaves_is_one_finding() -> None:
    class Leaving(looking.Looking):
        async def setup(self) -> None:
            self.folder = tempfile.mkdtemp(prefix="planted-")

    with pytest.raises(
        AssertionError, match=r"1 finding\nleak: .*planted-\S* is there \(and 4 more\): end it in close"
    ):
        await check_env(Leaving, looking.TASK, oracle=looking.ORACLE)
