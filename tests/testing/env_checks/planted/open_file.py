"""A file that nobody closes."""

from pathlib import Path
from typing import Any

from tests.testing.env_checks.looking import Looking

FOUND = r"leak: after its rollouts the file \S*open_file\.py is still open.*: end it in close\(\)"
KEPT: list[Any] = []


class Planted(Looking):
    async def setup(self) -> None:
        KEPT.append(Path(__file__).open())  # noqa: ASYNC230, SIM115
