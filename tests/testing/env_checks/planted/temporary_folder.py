"""A temporary folder that nobody removes."""

import tempfile

from tests.testing.env_checks.looking import Looking

FOUND = r"leak: after its rollouts the temporary folder \S*planted-\S* still exists.*: end it in close\(\)"


class Planted(Looking):
    async def setup(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="planted-")
