"""Comparison of two rollouts with the same seed, which should be equal."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from agentgym.environments.env import Env
from agentgym.testing.env_checks.findings import Finding
from agentgym.testing.env_checks.observed import ObservedRollout
from agentgym.types.messages import Message, text_of

ANYWAY = re.compile(
    r"0x[0-9a-f]+|\d+(?:\.\d+)? ?(?:s|ms|us|seconds|milliseconds)\b|\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?"
    r"|\bthread (?:id )?\d+|\bstarted (?:daemon )?\d+"
)
"""Texts that may differ between two rollouts of a correct env: addresses, durations, times of day, thread ids."""
SEED = "take all randomness from random.Random(seed), with the seed that reset(seed=...) gets"


def compare(first: ObservedRollout, second: ObservedRollout) -> list[Finding]:
    """Return a finding for the first difference between two rollouts of the same oracle with the same seed.

    The rewards are compared only if the prompts, the actions and the env's responses are equal. From the first action
    that differs, nothing is compared.
    """
    if _texts(first.prompt) != _texts(second.prompt):
        wrong = f"the same seed gave a different first prompt{_shown(first.prompt, second.prompt)}"
        return [Finding("seed", wrong, SEED)]
    for before, after in zip(first.turns, second.turns, strict=False):
        if before.action != after.action:
            return []  # The oracle itself wrote something else; the rest can't be compared.
        if _texts(before.messages) != _texts(after.messages):
            return list(_answers(before.messages, after.messages))
    return list(_rewards(first, second))


def _answers(first: Sequence[Message], second: Sequence[Message]) -> Iterator[Finding]:
    for before, after in zip(first, second, strict=False):
        if _texts([before]) != _texts([after]):
            name = f"tool {before['name']!r}" if "name" in before else "step()"
            change = f"{SEED}, or pass repeatable=False if the world itself never answers the same way twice"
            yield Finding(
                "seed",
                f"{name} gave different results for the same call with the same seed{_shown([before], [after])}",
                change,
            )
            return
    yield Finding("seed", f"step() returned {len(first)} messages, and then {len(second)} for the same seed", SEED)


def _rewards(first: ObservedRollout, second: ObservedRollout) -> Iterator[Finding]:
    if first.rollout is None or second.rollout is None or first.reward == second.reward:
        return
    if second.error is not None:
        yield from failed_again(second)
        return
    before, after = first.rollout.rewards, second.rollout.rewards
    named = [
        f"reward {name!r} was {before[name]!r} and then {after.get(name)!r}"
        for name in before
        if before[name] != after.get(name)
    ]
    wrong = "; ".join(named) or f"the reward was {first.reward!r} and then {second.reward!r}"
    change = f"{SEED}, or pass repeatable=False if a judge never answers the same way twice"
    yield Finding("reward", f"{wrong} for the same actions with the same seed", change)


def failed_again(second: ObservedRollout) -> Iterator[Finding]:
    """Yield a finding if a rollout that succeeded fails when it is repeated."""
    if second.error is not None:
        wrong = f"the same actions with the same seed failed the second time: {second.error}"
        yield Finding(
            "seed", wrong, "leave nothing behind that affects a second rollout, and take all randomness from the seed"
        )


def _texts(messages: Sequence[Message]) -> list[Any]:
    return [(message["role"], ANYWAY.sub("", str(message["content"]))) for message in messages]


def _shown(first: Sequence[Message], second: Sequence[Message]) -> str:
    for before, after in zip(first, second, strict=False):
        if before != after:
            return f" ({_cut(text_of(before['content']))} / {_cut(text_of(after['content']))})"
    return ""


def _cut(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def shared_state(cls: type[Env[Any]]) -> dict[str, str]:
    """Return the attributes of the class and its bases by name, with each value as comparable text."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith(("agentgym.", "builtins", "typing")):
            found |= {name: _state(value) for name, value in vars(base).items() if not name.startswith("__")}
    return found


def _state(value: Any) -> str:
    if isinstance(value, list | dict | set | bytearray) and len(value) > 10_000:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, list | dict | set | tuple | bytearray | int | float | str | bytes | None):
        return repr(value)
    return str(id(value))


def compare_state(before: dict[str, str], after: dict[str, str], name: str, shared: Sequence[str]) -> list[Finding]:
    """Return a finding for each class attribute that a rollout changed and that is not in `shared`."""
    changed = [key for key in after if before.get(key) != after[key] and key not in shared]
    return [
        Finding(
            "shared",
            f"{name}.{key} is a class attribute, which all rollouts share, and a rollout changed it",
            f"create it in __init__ (self.{key} = ...), or pass shared=[{key!r}] if they are meant to share it",
        )
        for key in changed
    ]
