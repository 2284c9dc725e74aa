"""Notes: read a book that doesn't fit into the context, so that only the model's own notes remain at the end.

Every third turn the conversation is cut off: the model writes notes, and continues from the question and these notes. A
turn reads at most one page, and no page can be read twice. To answer, the model must have read the whole book. The
final context can contain only the book's last pages, which say nothing about where the things are.
"""

import random
import re
from functools import partial
from typing import Annotated

from pydantic import Field

import agentgym as ag
from agentgym.testing import Reply, ReplyPolicy, call, say

COUNT = 10_000
"""Number of tasks per split."""
PAGES_A_CONTEXT = 3
ASKED = 3
"""Number of things whose final places the question asks for."""
THINGS = ("lamp", "key", "coin", "book", "ring", "map", "bell", "cup", "fan", "drum")
ROOMS = ("attic", "cellar", "kitchen", "hall", "garden", "library", "stable", "tower")
PEOPLE = ("Ada", "Ben", "Cleo", "Dov", "Eva", "Finn")
MOVING = "{person} carried the {thing} to the {room}."
IDLE = (
    "{person} looked for the {thing} in the {room} and did not find it.",
    "{person} spoke of the {thing} in the {room}.",
    "{person} drew the {thing} on a wall of the {room}.",
)
"""Sentences that mention a thing and a room, and move nothing."""
PROMPT = """\
Read the book with next_page(), once a turn, to its end. Where are the {things} then? The conversation is removed \
after every {pages} pages: only your notes stay. Answer with a line for each, such as `lamp: attic`, and nothing \
else."""
WRITE, ENDED = "Write your notes.", "The book has ended."


class BookTask(ag.Task):
    """The pages of a book, and where the things in question are at its end."""

    pages: tuple[str, ...] = Field(min_length=PAGES_A_CONTEXT + 1)
    places: dict[str, str]


def make_task(split: ag.Split, length: int, index: int) -> BookTask:
    """Create the task of an index; the same arguments always give the same task."""
    rng = random.Random(f"{split} {length} {index}")
    things = rng.sample(THINGS, len(THINGS))
    asked, others = things[:ASKED], things[ASKED:]
    places: dict[str, str] = {}
    pages = []
    for number in range(length):
        # The final context contains these pages, so the model needs no notes on them.
        is_last = number >= length - PAGES_A_CONTEXT
        moved = rng.sample(others if is_last else asked + others, 2)
        if number < ASKED:
            moved[0] = asked[number]  # Each thing is somewhere at the end.
        sentences = [sentence(rng, rng.choice(IDLE), rng.choice(things), rng.choice(ROOMS)) for _ in range(7)]
        for thing in dict.fromkeys(moved):
            places[thing] = rng.choice(ROOMS)
            sentences.append(sentence(rng, MOVING, thing, places[thing]))
        rng.shuffle(sentences)
        pages.append(f"Page {number + 1} of {length}. {' '.join(sentences)}")
    prompt = ag.Message(role="user", content=PROMPT.format(things=", the ".join(asked), pages=PAGES_A_CONTEXT))
    wanted = {thing: places[thing] for thing in asked}
    return BookTask(id=f"notes-{length}-{split}-{index}", prompt=(prompt,), pages=tuple(pages), places=wanted)


def sentence(rng: random.Random, form: str, thing: str, room: str) -> str:
    """Return a sentence of this form about a random person."""
    return form.format(person=rng.choice(PEOPLE), thing=thing, room=room)


@ag.register("notes")
class Notes(ag.ToolEnv[BookTask]):
    """Reward: the share of the things whose place is right, or 0 with too many lines or unread pages."""

    limits = ag.Limits(turns=40, seconds=120, context_tokens=4096, turn_tokens=256)
    context = ag.Compact(turns=PAGES_A_CONTEXT, instruction=WRITE)
    pages = ag.Parameter(12, Annotated[int, Field(ge=6, le=36)], doc="Number of pages in a book.")

    def __init__(self, task: BookTask) -> None:
        super().__init__(task)
        self.read = 0
        self.may_read = True

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[BookTask]:
        return ag.Procedural(partial(make_task, split, cls.pages), range(COUNT))

    async def step(self, action: ag.Message) -> ag.StepResult:
        """Let each turn read at most one page.

        The conversation is cut by turns, and a context may have room for a whole book.
        """
        self.may_read = True
        return await super().step(action)

    @ag.tool(timeout_s=5)
    def next_page(self) -> str:
        """Read the next page, one a turn; no page can be read again."""
        if not self.may_read:
            raise ag.ToolError("this call has read nothing: a turn reads one page")
        self.may_read = False
        if self.read == len(self.task.pages):
            return ENDED
        self.read += 1
        return self.task.pages[self.read - 1]

    @ag.reward
    def right(self) -> float:
        """Return the share of the things whose place is right, or 0 before the last page is read."""
        if self.read < len(self.task.pages):
            return 0.0
        said = [line.strip() for line in (self.answer or "").splitlines() if line.strip()]
        right = {f"{thing}: {room}" for thing, room in self.task.places.items()}
        return len(right & set(said)) / len(right) if len(said) <= len(right) else 0.0


def oracle(task: BookTask, *, takes_notes: bool = True) -> ReplyPolicy:
    """Return a reader that only uses the content of its context; `agentgym check` plays it."""

    def reply(text: str) -> Reply:
        said = text.replace(task.prompt[0]["content"], "")  # The instruction contains an example.
        places = dict(re.findall(r"(\w+)(?: to the|:) (\w+)", said))  # The latest statement counts.
        known = "\n".join(f"{thing}: {places[thing]}" for thing in task.places if thing in places)
        if WRITE in text.rpartition("user\n")[2]:
            return say(known if takes_notes and known else "Nothing.")
        return say(known or "I do not know.") if ENDED in text else call("next_page")

    return reply
