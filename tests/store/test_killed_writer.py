"""A writer that is killed at any moment: the store opens, and contains everything that was on disk."""

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentgym.store.reader import RolloutStore
from agentgym.types.rollout import Rollout
from tests.store.test_store import rollout, same, segment

ROOT = Path(__file__).parents[2]
BATCH = 3
WRITER = """
import sys
from pathlib import Path
from agentgym.store.writer import RolloutWriter
from tests.store.test_killed_writer import BATCH, played, token_bytes
from tests.store.test_store import group

with RolloutWriter(Path(sys.argv[1]), token_bytes=token_bytes) as writer:
    for number in range(10_000):
        writer.add([group(*(played(number, place) for place in range(BATCH)))], step=number)
        writer.flush()
        print(number, flush=True)
"""


def played(number: int, place: int) -> Rollout:
    """Return a rollout of some kilobytes, the same each time."""
    made = segment([(2, 400), (500, 900)], length=1000 + number % 7, text=f"{number} " * 200)
    return rollout(f"t{number}/{place}", segments=(made,))


def token_bytes(model: str, ids: list[int]) -> dict[int, bytes]:
    return {token: b"%d" % token for token in ids}


def written_until_killed(folder: Path, after_s: float) -> int:
    """Return how many groups the writer reported as stored when it was killed this many seconds after the first one."""
    command = [sys.executable, "-c", WRITER, str(folder)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    process.stdout.readline()
    killer = threading.Timer(after_s, process.kill)
    killer.start()
    lines = process.stdout.read()
    killer.join()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    return 1 + lines.count(b"\n")


@pytest.mark.parametrize("moment", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 20))])
def test_a_killed_writer_loses_at_most_the_last_unfinished_record(tmp_path: Path, moment: int) -> None:
    said = written_until_killed(tmp_path, random.Random(moment).uniform(0, 0.25))
    with RolloutStore(tmp_path) as store:
        assert store.query("PRAGMA integrity_check") == [("ok",)]
        found = list(store.find())
        ids = {token for one in found for token in one.rollout.segments[0].token_ids.tolist()}
        assert store.token_bytes("", ids) == {token: b"%d" % token for token in ids}
    groups, rest = divmod(len(found), BATCH)
    assert rest == 0, "a group is stored in part"
    assert said <= groups <= said + 1
    for place, one in enumerate(found):
        assert same(one.rollout, played(*divmod(place, BATCH)))
