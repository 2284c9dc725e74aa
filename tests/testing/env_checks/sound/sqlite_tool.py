"""Plain tools on a SQLite database that belongs to the rollout."""

import sqlite3
import tempfile
import threading
from pathlib import Path

import agentgym as ag
from agentgym.engines.scripted import call, say

TASK = ag.Task(id="t", prompt=({"role": "user", "content": "How many orders are open?"},))
ORACLE = [call("query", sql="select count(*) from orders where open"), say("2")]


class Sound(ag.ToolEnv[ag.Task]):
    async def setup(self) -> None:
        self.lock = threading.Lock()
        self.folder = tempfile.TemporaryDirectory()
        self.db = sqlite3.connect(Path(self.folder.name, "orders.db"), check_same_thread=False)
        self.db.execute("create table orders (id int, open int)")
        self.db.executemany("insert into orders values (?, ?)", [(1, 1), (2, 0), (3, 1)])

    @ag.tool
    def query(self, sql: str) -> list[list[int]]:
        """Run a query."""
        with self.lock:
            return [list(row) for row in self.db.execute(sql)]

    @ag.reward
    def right(self) -> float:
        return float(self.answer == "2")

    async def close(self) -> None:
        if hasattr(self, "db"):
            with self.lock:
                self.db.close()
            self.folder.cleanup()
