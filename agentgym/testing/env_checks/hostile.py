"""Check that nothing the policy writes or leaves in its sandbox makes the env raise, which would lose the reward."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from agentgym.agent_api.env import AgentEnv
from agentgym.engines.scripted import Reply, ReplyPolicy, Scripted, call, say
from agentgym.environments.env import has_group_reward
from agentgym.environments.tool_env import ToolEnv
from agentgym.errors import EngineError, MachineError, SandboxError
from agentgym.errors.tracebacks import describe, place_of
from agentgym.scheduling.group_rewards import GroupRewards
from agentgym.testing.env_checks.findings import Finding
from agentgym.testing.env_checks.observed import ObservedRollout
from agentgym.testing.env_checks.plays import Repeating, Stage
from agentgym.testing.env_checks.spoiled import TEXTS, Hostile, hostile_calls, wrong_types
from agentgym.types.messages import ToolCall, text_of
from agentgym.types.rollout import Rollout

CHANGE = (
    "score this content as 0.0 instead of raising an exception; a rollout that raises has no reward, and a policy "
    "learns to provoke that"
)
NOT_OF_THE_ENV = tuple(kind.__name__ for kind in (SandboxError, EngineError, MachineError))


class Raised:
    """The errors that the env raised, one for each raising line, with the contents that caused them."""

    def __init__(self, known: Sequence[ObservedRollout]) -> None:
        self.known = {play.error for play in known}
        self.met: dict[str, list[str]] = {}

    def add(self, what: str, error: str) -> None:
        """Record an error, unless a rollout without hostile content had the same error.

        Args:
            what: A description of the hostile content.
            error: The error's text.
        """
        if error not in self.known:
            self.met.setdefault(error, []).append(what)

    def add_play(self, what: str, play: ObservedRollout) -> None:
        """Record the error that ended a rollout, and the errors of its additional scorings.

        Args:
            what: A description of the rollout's hostile content.
            play: The rollout.
        """
        failure = None if play.rollout is None else play.rollout.failure
        if play.error is not None and (failure is None or failure.type not in NOT_OF_THE_ENV):
            self.add(what, play.error)
        for met, error in play.hostile.raised if play.hostile is not None else ():
            place = place_of(error)
            self.add(met, describe(error) + (f", at {place}" if place and place not in describe(error) else ""))

    def findings(self) -> Iterator[Finding]:
        """Yield one finding for each line that raised."""
        lines: dict[str, tuple[str, list[str]]] = {}
        for error, met in self.met.items():
            line = error.rpartition(", at ")[2]
            lines.setdefault(line, (error, []))[1].extend(met)
        for error, met in lines.values():
            more = f" (and for {len(met) - 1} more)" if len(met) > 1 else ""
            yield Finding("hostile", f"for {met[0]}{more} the rollout has no reward: {error:.500}", CHANGE)


async def check_hostile(
    stage: Stage,
    oracle: Sequence[Reply] | ReplyPolicy | None,
    noop: Sequence[Reply] | ReplyPolicy,
    plays: Sequence[ObservedRollout],
) -> list[Finding]:
    """Run the env with hostile texts, and score the oracle's rollout with each hostile content in its sandbox."""
    raised, scored = Raised(plays), list[Rollout]()
    right = text_of(plays[0].turns[-1].action["content"]) if oracle is not None and plays[0].turns else ""
    texts = [*TEXTS.items(), *wrong_types(right)]
    is_agent, is_tools = issubclass(stage.cls, AgentEnv), issubclass(stage.cls, ToolEnv)
    with quiet("agentgym.errors.tracebacks"):  # The check itself reports errors of rewards.
        for what, text in [] if is_agent else texts:
            play = await stage.run("hostile", Repeating([say("x")]), hostile=Hostile(text=text))
            raised.add_play(f"a model that says {what}", play)
            scored += [play.rollout] if play.rollout is not None and play.rollout.reward is not None else []
        for what, name, arguments in [] if is_agent else hostile_calls(_calls(plays)):
            play = await stage.run("hostile", Repeating([call(name, **arguments), say("x")]))
            raised.add_play(f"a model that calls {name!r} with {what}", play)
        answers = [(f"the answer {what}", text) for what, text in (texts if is_agent else [])]
        silent = [("a model that gives no answer", None)] if is_tools else []
        again = Hostile(sandbox=True, answers=[*silent, *answers])
        engine = Repeating(noop) if oracle is None else Scripted(oracle)
        raised.add_play("hostile content of its sandbox", await stage.run("hostile", engine, hostile=again))
        if scored and has_group_reward(stage.cls):
            await _add_group_reward(raised, stage, scored[:8])
    return list(raised.findings())


def _calls(plays: Sequence[ObservedRollout]) -> Iterator[ToolCall]:
    """Yield the calls of the first rollout, which is the oracle's if there is one."""
    for turn in plays[0].turns if plays else ():
        yield from turn.action.get("tool_calls", ())


async def _add_group_reward(raised: Raised, stage: Stage, rollouts: Sequence[Rollout]) -> None:
    """Compute the group reward of rollouts with hostile texts, and record the errors that it raises."""
    for rollout in await GroupRewards(stage.cls, stage.models or {}).added(stage.task, rollouts, seed=7):
        if rollout.failure is not None and rollout.failure.type not in NOT_OF_THE_ENV:
            raised.add("a group of such answers", str(rollout.failure))


@contextmanager
def quiet(logger: str) -> Iterator[None]:
    """Drop the messages of a logger during the `with`."""
    log = logging.getLogger(logger)

    def drop(_: logging.LogRecord) -> bool:
        return False

    log.addFilter(drop)
    try:
        yield
    finally:
        log.removeFilter(drop)
