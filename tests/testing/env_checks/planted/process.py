"""A process that nobody ends."""

import subprocess
import sys

from tests.testing.env_checks.looking import Looking

FOUND = r"leak: after its rollouts the process \d+ \(\S+ -c input\(\)\) is still running.*: end it in close\(\)"
KEPT: list["subprocess.Popen[bytes]"] = []


class Planted(Looking):
    async def setup(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)  # noqa: ASYNC220
        KEPT.append(self.process)
