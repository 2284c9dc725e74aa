"""Take the order of a guest who says one thing at a time: text in both directions, and no tool."""

import agentgym as ag
from agentgym.testing import Reply, say

DRINKS = ("tea", "coffee", "cocoa", "water")


class ChatTask(ag.Task):
    """One row of data: the guest's order."""

    drink: str
    count: int


def make_task(index: int) -> ChatTask:
    """Return the task of an index, always the same."""
    count, drink = divmod(index, len(DRINKS))
    return ChatTask(
        id=str(index), prompt="Hello! I would like something to drink.", drink=DRINKS[drink], count=count + 1
    )


@ag.register("chat_template")
class ChatTemplate(ag.Env[ChatTask]):
    """Reward 1 for the order that the guest meant."""

    system = "You take orders. Ask which drink, and how many, in one message each. Then write ORDER: COUNT DRINK."
    limits = ag.Limits(turns=6, seconds=60)

    def __init__(self, task: ChatTask) -> None:
        super().__init__(task)
        self.order = ""

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[ChatTask]:
        return ag.Procedural(make_task, range(320) if split == "train" else range(320, 400))

    async def step(self, action: ag.Message) -> ag.StepResult:
        said = action["content"]
        if said.startswith("ORDER:"):
            self.order = said.removeprefix("ORDER:").strip()
            return ag.StepResult([], 0.0, True, False, {"stop_reason": "ordered"})
        return ag.StepResult([ag.Message(role="user", content=self.guest(said))], 0.0, False, False, {})

    def guest(self, question: str) -> str:
        """Return the guest's answer to a question."""
        if "how many" in question.lower():
            return f"{self.task.count}, please."
        return f"{self.task.drink}, please." if "which" in question.lower() else "Pardon?"

    async def score(self) -> dict[str, float]:
        return {"right": float(self.order == f"{self.task.count} {self.task.drink}")}


def oracle(task: ChatTask) -> list[Reply]:
    """Return replies that solve the task; `agentgym check` and the tests play them."""
    return [say("Which drink?"), say("How many?"), say(f"ORDER: {task.count} {task.drink}")]
