"""A counter of the class that every rollout raises."""

from tests.testing.env_checks.looking import Looking

FOUND = r"shared: Planted\.count is a class attribute"


class Planted(Looking):
    count = 0

    async def setup(self) -> None:
        type(self).count += 1
