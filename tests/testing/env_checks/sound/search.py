"""A search tool that returns what the query asks for, a counter of calls, and a class that caches loaded data."""

import time
from typing import Any, ClassVar

import agentgym as ag
from agentgym.engines.scripted import call, say


class Question(ag.Task):
    """A question with its answer."""

    answer: str


TASK = Question(id="t", prompt=({"role": "user", "content": "Who found radium?"},), answer="Marie Curie")
ORACLE = [call("search", text="radium"), say("Marie Curie")]


class Sound(ag.ToolEnv[Question]):
    pages: ClassVar[dict[str, str]] = {}

    async def setup(self) -> None:
        if not self.pages:
            self.pages["radium"] = "Radium was found by Marie Curie."

    @ag.tool
    async def search(self, text: str) -> dict[str, Any]:
        """Search."""
        start = time.perf_counter()
        page = self.pages.get(text, "")
        return {"page": page, "took": f"{time.perf_counter() - start:.6f} s"}

    @ag.reward
    async def right(self) -> bool:
        return self.answer == self.task.answer

    @classmethod
    def tasks(cls, split: str) -> list[Question]:
        first = 0 if split == "train" else 10
        return [TASK.model_copy(update={"id": str(i), "answer": str(i)}) for i in range(first, first + 10)]
