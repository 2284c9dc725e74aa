"""Warnings about rollouts: unusual failures of hidden test cases, a context that is too short, tools never called."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.chat.tools_check import check_tools
from agentgym.engines.base import Engine
from agentgym.engines.messages import MessageEngine
from agentgym.environments.env import Env
from agentgym.environments.mixture import Mixture
from agentgym.environments.rewards import ZERO
from agentgym.store.tool_counts import calls_in, is_malformed
from agentgym.tools.tool import class_tools
from agentgym.types.rollout import Rollout
from agentgym.types.transcript import printable, shorten

_LOG = logging.getLogger(__name__)
_WRONG = re.compile(rf"AssertionError\b|{re.escape(ZERO)}|.* is not right$|exit code 1$|it returned a ", re.DOTALL)
"""The failure reasons that are usual in training, which mean that the code under test is wrong."""
MAX_KINDS = 8
"""Maximum number of kinds of reasons logged per env, since the code under test chooses some of their words."""
_warned_of_cases: dict[str, set[str]] = {}


def warn_of_cases_without_an_outcome(env: str, failed: Mapping[str, str]) -> None:
    """Log one warning per env and kind of reason, such as ImportError, for cases that failed without a wrong result."""
    kinds = _warned_of_cases.setdefault(env, set())
    for name, why in failed.items():
        kind = " ".join(re.findall(r"\w+", why)[:1])
        if _WRONG.match(why) or kind in kinds or len(kinds) == MAX_KINDS:
            continue
        kinds.add(kind)
        _LOG.warning(
            "%s: the hidden test case %r failed: %s; more cases of this kind are only counted (failed_cases)",
            *(env, printable(shorten(name, 100)), printable(shorten(why, 500))),
        )


_warned_of_contexts: "WeakKeyDictionary[ChatTokenizer | MessageEngine, set[tuple[type[Env[Any]], int]]]" = (
    WeakKeyDictionary()
)
"""The envs and context sizes that were warned about, by engine.

The key is the engine's tokenizer, because a gate around an engine has the same tokenizer. An engine that takes
messages has no tokenizer, and is itself the key.
"""


def warn_of_short_context(env: type[Env[Any]], engine: Engine) -> None:
    """Log one warning per env and engine when a rollout ends at the engine's context, not at the env's limit."""
    held, wanted = engine.context_tokens, env.limits.context_tokens
    known = engine if isinstance(engine, MessageEngine) else engine.tokenizer
    warned = _warned_of_contexts.setdefault(known, set())
    if held >= wanted or (env, held) in warned:
        return
    warned.add((env, held))
    _LOG.warning(
        "%s: a rollout ended at the engine's context of %d tokens, but limits.context_tokens is %d; raise the "
        "engine's context_tokens as far as the model and the memory allow, or lower the env's limit",
        env.__name__,
        held,
        wanted,
    )


def check_env_tools(env: type[Env[Any]], engine: Engine) -> None:
    """Check, before the first rollout, that the engine's chat template lets the model use the env's tools.

    Tools that an instance of the env adds are checked in its rollouts.

    Raises:
        ValueError: If the tokenizer refuses tools that its chat template doesn't show.
    """
    members: list[type] = [member.env for member in env.members.values()] if issubclass(env, Mixture) else [env]
    if not isinstance(engine, MessageEngine) and any(class_tools(member) for member in members):
        check_tools(engine.tokenizer)


LEAST_OFFERED = 8
"""Minimum number of scored rollouts with tools before it is worth a warning that none of them called a tool."""


@dataclass(slots=True)
class ToolUse:
    """Counts of scored rollouts that had tools, and of their calls."""

    offered: int = 0
    """Number of rollouts with tools."""
    calls: int = 0
    malformed: int = 0
    """Number of calls that could not be parsed."""

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Count the scored rollouts among these."""
        had = [r for r in rollouts if r.reward is not None and any(segment.tools for segment in r.segments)]
        self.offered += len(had)
        for rollout in had:
            written = [call for message in rollout.messages for call in calls_in(message)]
            malformed = max(sum(map(is_malformed, written)), int(rollout.metrics.get("malformed_calls", 0)))
            self.malformed += malformed
            # The env's count lacks calls that a limit cut off, and those that an agent program or its own step makes.
            self.calls += max(len(written) - malformed, int(rollout.metrics.get("tool_calls", 0)))

    def warning(self) -> str | None:
        """Return a sentence if at least `LEAST_OFFERED` rollouts had tools and none called one, otherwise None."""
        if self.calls or self.offered < LEAST_OFFERED:
            return None
        wrote = f" ({self.malformed} malformed calls)" if self.malformed else ""
        return (
            f"None of {self.offered} rollouts with tools has called one{wrote}: the chat template may not show tools, "
            "the model may write calls in a format that is not parsed, or it may be too small to call tools; "
            "`agentgym doctor --model MODEL` checks the template and the format, and for an endpoint "
            "`--tools prompt` describes the tools in the prompt."
        )
