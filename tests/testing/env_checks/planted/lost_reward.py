"""An override of a reward without its decorator."""

from tests.testing.env_checks.looking import Looking

FOUND = (
    r"reward: Planted\.right overrides an @ag\.reward of Looking without the decorator: put @ag\.reward on it"
    r"|'right' of Planted is overridden without @ag\.reward"
)


def planted() -> type[Looking]:
    class Planted(Looking):
        async def right(self) -> float:
            return 1.0

    return Planted
