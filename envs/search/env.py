"""Search: questions of several hops over a corpus, answered with a search engine and a document reader.

Each split has a separate corpus, generated from a seed: people, companies and cities with invented names, with one
document each. Nothing that a model memorizes about the training corpus helps in the held-out one.
"""

import asyncio
import random
import re
import sqlite3
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Annotated, NamedTuple, get_args

from pydantic import Field

import agentgym as ag
from agentgym.testing import Reply, call, say

COUNT = 10_000
"""Number of tasks per split."""
SIZES = {"person": 200, "company": 80, "city": 60, "river": 40, "product": 40}
"""Number of things of each kind; rivers and products have no document."""
FOUND = 5
"""Largest number of documents that a search returns."""
SYLLABLES = (
    "Al Be Cor Dra El Fen Gor Hul Is Jor",
    "ba de ki lo mu ra se ti vo zu",
    "da gan hil mir nus por ris tel vel xan",
)
PROMPT = "Name {asked}. Search the documents, then answer with the name or the number alone."


class Relation(NamedTuple):
    """A relation that documents state about their subjects and questions ask about."""

    of: str
    to: str
    sentence: str
    phrase: str


RELATIONS = (
    Relation("person", "city", "{} was born in {}.", "the city where {} was born"),
    Relation("person", "company", "{} works for {}.", "the company that {} works for"),
    Relation("person", "person", "{} was taught by {}.", "the teacher of {}"),
    Relation("person", "year", "{} was born in the year {}.", "the year in which {} was born"),
    Relation("company", "person", "{} was founded by {}.", "the founder of {}"),
    Relation("company", "city", "{} has its seat in {}.", "the city where {} has its seat"),
    Relation("company", "product", "{} is known for its {}.", "the product that {} is known for"),
    Relation("city", "person", "The mayor of {} is {}.", "the mayor of {}"),
    Relation("city", "river", "{} lies on the {}.", "the river that {} lies on"),
)
DOCUMENTED = ("person", "company", "city")
World = dict[str, dict[Relation, str]]
"""The facts about each subject, in the order of the documents."""


class SearchTask(ag.Task):
    """A question, and the names on the way to its answer."""

    corpus: ag.Split
    path: tuple[str, ...]
    """The subjects whose documents have the facts, in order."""
    answer: str


@cache
def make_world(split: ag.Split) -> World:
    """Create the world of a split; no name is in both splits, and a split always has the same world."""
    names = ["".join(parts) for parts in product(*(syllables.split() for syllables in SYLLABLES))]
    random.Random("names").shuffle(names)
    unused, rng = iter(names[split == "test" :: 2]), random.Random(split)
    known = {kind: [next(unused) for _ in range(size)] for kind, size in SIZES.items()}
    known["year"] = [str(year) for year in range(1900, 2000)]
    world: World = {name: {} for kind in DOCUMENTED for name in known[kind]}
    for relation in RELATIONS:
        for name in known[relation.of]:
            world[name][relation] = rng.choice([other for other in known[relation.to] if other != name])
    return world


def make_task(split: ag.Split, most_hops: int, index: int) -> SearchTask:
    """Create the task of an index, in which only the last document on the way contains the answer.

    The same arguments always give the same task.
    """
    rng, world = random.Random(f"{split} {index}"), make_world(split)
    hops = rng.randint(2, most_hops)
    while True:
        asked, path = "{}", [rng.choice(list(world))]
        for left in reversed(range(hops)):
            facts = [(relation, value) for relation, value in world[path[-1]].items() if value in world or not left]
            relation, value = rng.choice(facts)
            asked, path = relation.phrase.format(asked), [*path, value]
        *subjects, answer = path
        if answer not in subjects and not any(answer in world[name].values() for name in subjects[:-1]):
            prompt = ag.Message(role="user", content=PROMPT.format(asked=asked.format(subjects[0])))
            task_id = f"search-{most_hops}-{split}-{index}"
            return SearchTask(id=task_id, prompt=(prompt,), corpus=split, path=tuple(subjects), answer=answer)


def write_index(folder: Path) -> None:
    """Write the full-text index of each corpus into the folder."""
    for split in get_args(ag.Split):
        with closing(sqlite3.connect(folder / f"{split}.db")) as db, db:
            db.execute("CREATE VIRTUAL TABLE documents USING fts5(title, body)")
            for name, facts in make_world(split).items():
                body = " ".join(relation.sentence.format(name, value) for relation, value in facts.items())
                db.execute("INSERT INTO documents VALUES (?, ?)", (name, body))


@ag.register("search")
class Search(ag.ToolEnv[SearchTask]):
    """Reward 1 for exactly the requested name or number."""

    limits = ag.Limits(turns=12, seconds=120)
    hops = ag.Parameter(
        3,
        Annotated[int, Field(ge=2, le=4)],
        doc="Largest number of documents that a question takes; the smallest is 2.",
    )
    resources: Path

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[SearchTask]:
        return ag.Procedural(partial(make_task, split, cls.hops), range(COUNT))

    @classmethod
    @asynccontextmanager
    async def open_resources(cls) -> AsyncIterator[Path]:
        """Write the indexes once for all rollouts; each opens a separate connection, which it may interrupt."""
        with tempfile.TemporaryDirectory() as folder:
            await asyncio.to_thread(write_index, Path(folder))
            yield Path(folder)

    async def setup(self) -> None:
        index = (self.resources / f"{self.task.corpus}.db").as_uri()
        self.db = sqlite3.connect(f"{index}?mode=ro", uri=True, check_same_thread=False)

    @ag.tool(timeout_s=10)
    def search(self, query: Annotated[str, Field(max_length=200)]) -> str:
        """Find the documents that fit these words best: their numbers and titles."""
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))  # quoted, so nothing acts as FTS5 syntax
        sql = f"SELECT rowid, title FROM documents(?) ORDER BY bm25(documents) LIMIT {FOUND}"
        found = self.db.execute(sql, (words,)).fetchall() if words else []
        return "\n".join(f"{number}: {title}" for number, title in found) or "nothing was found"

    @ag.tool(timeout_s=10)
    def read(self, document: int) -> str:
        """Read the document of this number."""
        found = self.db.execute("SELECT body FROM documents WHERE rowid = ?", (document,)).fetchone()
        if found is None:
            raise ag.ToolError(f"there is no document {document}; search gives the numbers of those that there are")
        return str(found[0])

    def interrupt(self) -> None:
        self.db.interrupt()

    async def close(self) -> None:
        if hasattr(self, "db"):
            self.db.close()

    @ag.reward
    def right(self) -> float:
        return float((self.answer or "").strip() == self.task.answer)


def oracle(task: SearchTask) -> list[Reply]:
    """Return replies that solve the task; `agentgym check` and the tests play them."""
    numbers = {name: number for number, name in enumerate(make_world(task.corpus), 1)}
    hops = [[call("search", query=name), call("read", document=numbers[name])] for name in task.path]
    return [*(reply for hop in hops for reply in hop), say(task.answer)]
