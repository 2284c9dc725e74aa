"""A world that can be set up once in a process."""

from typing import ClassVar

from tests.testing.env_checks.looking import Looking

FOUND = (
    r"seed: the same actions with the same seed failed the second time: EnvError: Planted\.setup: RuntimeError: .*: le"
)
OPTIONS = {"shared": ["taken"], "repeatable": False}


class Planted(Looking):
    taken: ClassVar[list[str]] = []

    async def setup(self) -> None:
        if self.taken:
            raise RuntimeError("the port is taken")
        self.taken.append("port")
