"""A recipe that kills itself some seconds after its first rollouts started: `killed_script.py SECONDS [FLAG...]`."""

import os
import signal
import sys
import threading

from agentgym.cli.recipe import main
from agentgym.run.metrics_logger import MetricsLogger
from recipes import chase_grpo

SECONDS = float(sys.argv.pop(1))
note = MetricsLogger.note


def armed(self: MetricsLogger, doing: str) -> None:
    """Start a timer at the first step, which sends SIGKILL wherever the run is by then."""
    if doing == "rollouts" and not any(isinstance(thread, threading.Timer) for thread in threading.enumerate()):
        timer = threading.Timer(SECONDS, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    note(self, doing)


MetricsLogger.note = armed  # type: ignore[method-assign]
main(chase_grpo.RECIPE)
