"""The searchable texts of stored rollouts: messages, tool calls and tool results, read without unpacking tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentgym.files.foreign.content import Unpacker
from agentgym.store.reader import RolloutStore
from agentgym.store.rows import failure_of


@dataclass(frozen=True, slots=True)
class RolloutTexts:
    """The texts of one rollout, each listed once."""

    number: int
    mark: str
    """Distinguishes this rollout from another one that got the same number after the run was resumed; see `MARK`."""
    texts: tuple[str, ...]


MARK = "phase || ' ' || step || ' ' || rollout_id || ' ' || seconds || ' ' || tokens AS mark"
"""SQL expression of `RolloutTexts.mark`."""


def marks(store: RolloutStore, numbers: list[int]) -> dict[int, str]:
    """Return `RolloutTexts.mark` of the given rollouts by number, leaving out rollouts that don't exist."""
    asked = ", ".join(map(str, numbers))
    return dict(store.query(f"SELECT number, {MARK} FROM rollouts WHERE number IN ({asked})"))


def texts_behind(store: RolloutStore, number: int, limit: int) -> list[RolloutTexts]:
    """Return the texts of at most `limit` rollouts whose numbers are above `number`, in order."""
    sql = f"SELECT number, {MARK}, group_id, rollout_id, detail FROM rollouts WHERE number > ? ORDER BY number LIMIT ?"
    texts = list[RolloutTexts]()
    with store.one_read():
        for found, mark, group_id, rollout_id, detail in store.query(sql, number, limit):
            with store.sound(f"rollout {found}"):
                texts.append(RolloutTexts(found, mark, tuple(_texts(store, found, [group_id, rollout_id], detail))))
    return texts


def texts_of(store: RolloutStore, number: int) -> list[str]:
    """Return the texts of one rollout, or an empty list if it doesn't exist."""
    found = texts_behind(store, number - 1, 1)
    return list(found[0].texts) if found and found[0].number == number else []


def _texts(store: RolloutStore, number: int, names: list[str], detail: bytes) -> dict[str, None]:
    """Return the texts of a rollout as the keys of a dict, in order; a prompt that several segments share appears once.

    Args:
        store: The store.
        number: The rollout's number.
        names: Texts that come first: the ids of the task and the rollout.
        detail: The rollout's fields that are stored as compressed JSON, which include its failure.
    """
    found, unpacker = dict.fromkeys(names), Unpacker()
    for _, messages in store.query("SELECT rollout, messages FROM segments WHERE rollout = ? ORDER BY place", number):
        said = unpacker.unpacked(messages)
        for message in (*said["prompt"], *(each for turn, answers in said["turns"] for each in (turn, *answers))):
            found.update(dict.fromkeys(_within(message)))
    failure = unpacker.unpacked(detail)["failure"]
    if failure is not None:
        kept = failure_of(failure)
        found.update(dict.fromkeys([kept.message, kept.traceback]))
    found.pop("", None)
    return found


def _within(value: Any) -> Iterator[str]:
    """Yield every text in a message, including the names and values of tool calls.

    Roles, types, ids and image data are left out.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            if name not in ("role", "type", "id", "tool_call_id"):
                yield from [] if isinstance(each, str) and each.startswith("data:") else _within(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _within(each)
