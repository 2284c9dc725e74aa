"""A thread that nobody ends."""

import threading

from tests.testing.env_checks.looking import Looking

FOUND = (
    r"leak: after its rollouts the thread 'planted' is still running, in wait \(threading\.py:\d+\).*: end it"
    r" in close\(\)"
)
END = threading.Event()


class Planted(Looking):
    async def setup(self) -> None:
        threading.Thread(target=END.wait, name="planted", daemon=True).start()
