"""A process that joins a cluster: signals stop it as they stop one without Ray."""

import os
import signal

import pytest

from agentgym.cluster.joining import joined
from tests.cluster.conftest import TwoNodes

pytestmark = [pytest.mark.ray, pytest.mark.slow]


async def test_a_driver_that_gets_sigterm_has_the_time_that_it_needs(two_nodes: TwoNodes) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        async with joined(two_nodes.address, cpus=1):
            os.kill(os.getpid(), signal.SIGTERM)
            alarm, _ = signal.setitimer(signal.ITIMER_REAL, 0)  # Ray's own handler would end the process 3 s later
        assert came == [signal.SIGTERM]
        assert alarm == 0
    finally:
        signal.signal(signal.SIGTERM, before)
