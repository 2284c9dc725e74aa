"""The check of an env: all its parts in order, and one report."""

import asyncio
import logging
import re
import warnings
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentgym.engines.base import Engine
from agentgym.engines.scripted import Reply, ReplyPolicy, Scripted, raw
from agentgym.environments.env import Env
from agentgym.environments.resources import open_resources
from agentgym.environments.task_sandboxes import chooses, open_sandboxes
from agentgym.errors import SandboxError
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.testing.env_checks.comparing import compare, compare_state, failed_again, shared_state
from agentgym.testing.env_checks.declared import check_class, check_tasks
from agentgym.testing.env_checks.findings import Finding, report
from agentgym.testing.env_checks.hidden import check_hidden
from agentgym.testing.env_checks.hostile import check_hostile, quiet
from agentgym.testing.env_checks.leaks import LeakWatch
from agentgym.testing.env_checks.observed import RESET, SCORE, ObservedRollout
from agentgym.testing.env_checks.plays import Once, Repeating, Stage
from agentgym.testing.env_checks.stalls import StallWatch
from agentgym.types.messages import text_of
from agentgym.types.task import Task

log = logging.getLogger(__name__)

BROKEN_CALL = raw('<tool_call>\n{"name": oops\n</tool_call>')
ONLY = "it can only be evaluated there, not trained"
CANCEL_CHANGE = (
    "let asyncio.CancelledError propagate (`except Exception` does, `except:` and `except BaseException` do not)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `check_env`, which documents them."""

    cls: type[Env[Any]]
    task: Task
    oracle: Sequence[Reply] | ReplyPolicy | None
    """The replies that solve the task; None runs only the parts that need no solution."""
    noop: Sequence[Reply] | ReplyPolicy
    sandboxes: SandboxPool | None = None
    threshold: float
    idle_is_right: bool
    repeatable: bool
    secrets: Sequence[str] = ()
    shared: Sequence[str] = ()
    reward_range: tuple[float, float] | None = None
    block_limit_s: float = 0.5
    models: Mapping[str, Engine] = field(default_factory=dict)


class EnvCheck(Coroutine[Any, Any, None]):
    """The coroutine of a check, which is recorded until it is awaited, so that a missing `await` is detected."""

    unawaited: ClassVar[list["EnvCheck"]] = []

    def __init__(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.work, self.name = work, name
        self.unawaited.append(self)

    def __await__(self) -> Generator[Any, Any, None]:
        self._begin()
        return self.work.__await__()

    def send(self, value: Any) -> Any:
        """Run the check until it waits."""
        self._begin()
        return self.work.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception where the check waits."""
        self._begin()
        return self.work.throw(*error)

    def close(self) -> None:
        """End the check without running the rest."""
        self._begin()
        self.work.close()

    def _begin(self) -> None:
        if self in self.unawaited:
            self.unawaited.remove(self)


def forgotten() -> list[str]:
    """Return the names of the envs whose check was created and never awaited, and close these checks."""
    names = [check.name for check in EnvCheck.unawaited]
    for check in list(EnvCheck.unawaited):
        check.close()
    return names


async def run_checks(settings: Settings) -> None:
    """Run every check; raise one AssertionError with all findings."""
    report(settings.cls.__name__, await find_mistakes(settings))


async def find_mistakes(settings: Settings) -> list[Finding]:
    """Run every check, and return the findings without duplicates."""
    findings = check_class(settings.cls)
    if not findings:
        findings = check_tasks(settings.cls)
        with LeakWatch(
            processes=settings.sandboxes is None or isinstance(settings.sandboxes, FakeSandboxPool)
        ) as leaks:
            leaks.see_tasks()
            findings += await _played(settings)
            left = [*await leaks.left_tasks(), *await asyncio.to_thread(leaks.left)]
        findings += _check_left(left)
    return list({str(finding): finding for finding in findings}.values())


def _check_left(left: Sequence[str]) -> Iterator[Finding]:
    """Yield one finding for each kind of thing that the rollouts left behind, however many there are of it.

    Args:
        left: A line for each thing left behind, as `LeakWatch` returns them.
    """
    kinds: dict[str, list[str]] = {}
    for line in left:
        kinds.setdefault(line.split()[1], []).append(line)
    for lines in kinds.values():
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        yield Finding("leak", f"after its rollouts {lines[0]}{more}", "end it in close(), which always runs")


async def _played(settings: Settings, *, sees: bool = False) -> list[Finding]:
    """Run all the checked rollouts, and return the findings of their checks.

    If the env shows an image, all rollouts are run again with an engine that reads images.

    Args:
        settings: The arguments of `check_env`.
        sees: Whether the engine reads images.
    """
    async with AsyncExitStack() as stack:
        # Replies that solve nothing fail hidden cases; `_check_oracle` reports the cases that the oracle fails.
        stack.enter_context(quiet("agentgym.rollouts.rollout_warnings"))
        sandboxes, no_sandbox = await stack.enter_async_context(_sandboxes(settings.cls, settings.sandboxes))
        stage = Stage(settings.cls, settings.task, sandboxes, settings.models, sees=sees)
        await stack.enter_async_context(open_resources(stage.cls))
        findings, plays = await _solved(settings, stage, no_sandbox)
        solved = plays[-1] if plays else None
        for check in (_check_noop, _check_broken_call):
            found, play = await check(settings, stage)
            findings += found
            plays.append(play)
        findings += await _check_cancel(settings, stage, solved)
        findings += await check_hostile(stage, settings.oracle, settings.noop, plays)
    if stage.shows_images and not sees:
        log.warning("%s shows images: it is checked as on an endpoint with vision, and %s", settings.cls.__name__, ONLY)
        return await _played(settings, sees=True)
    findings += check_hidden(settings.task, settings.secrets, plays)
    return [*findings, *_check_rewards(settings, plays), *_check_closed(plays)]


async def _solved(settings: Settings, stage: Stage, no_sandbox: str) -> tuple[list[Finding], list[ObservedRollout]]:
    """Run the oracle, and run it again unless the first rollout failed.

    Args:
        settings: The arguments of `check_env`.
        stage: Runs the rollouts.
        no_sandbox: The reason why fake sandboxes are used, or "".

    Returns:
        The findings and the rollouts. Both are empty if there is no oracle.
    """
    if settings.oracle is None:
        return [], []
    first = await stage.run("oracle", Scripted(settings.oracle))
    findings = list(_check_oracle(settings, first, no_sandbox))
    if first.error is not None:
        return findings, [first]
    found, second = await _again(settings, settings.oracle, stage, first)
    return [*findings, *found], [first, second]


@asynccontextmanager
async def _sandboxes(
    cls: type[Env[Any]], sandboxes: SandboxPool | None
) -> AsyncIterator[tuple[SandboxPool | None, str]]:
    """Yield the sandboxes to check with, and the reason why they are fake, or "" if they aren't.

    They are the given `sandboxes`; or a pool of the kind that the env declares, None if it declares none; or fake
    ones if none of that kind can be started.
    """
    if sandboxes is not None or (cls.sandbox_spec is None and not chooses(cls)):
        yield sandboxes, ""
        return
    async with AsyncExitStack() as stack:
        try:
            found, reason = await stack.enter_async_context(open_sandboxes(cls, 1)), ""
        except (SandboxError, ImportError) as error:
            found, reason = (
                FakeSandboxPool(),
                f"no sandbox of {cls.__name__} could be started here ({error}), so a FakeSandbox was used",
            )
            warnings.warn(f"check_env: {reason}", stacklevel=2)
        yield found, reason


def _check_oracle(settings: Settings, play: ObservedRollout, no_sandbox: str) -> Iterator[Finding]:
    failed = [
        text_of(message["content"]).removeprefix("error: ")
        for turn in play.turns
        for message in turn.messages
        if message["role"] == "tool" and text_of(message["content"]).startswith("error: ")
    ]
    if play.error is not None and not play.bad_rewards:
        change = no_sandbox or "fix the env or the oracle's replies, so that the rollout finishes"
        yield Finding("oracle", f"the rollout failed: {play.error}", change)
    elif play.reward is not None and play.reward < settings.threshold:
        scores = dict(play.rollout.rewards) if play.rollout is not None else {}
        cases = play.rollout.failed_cases if play.rollout is not None else {}
        hint = "check what its tools returned" + (f": {failed[-1]:.300}" if failed else "")
        if cases:
            name, why = next(iter(cases.items()))
            hint = f"check why {len(cases)} of its hidden cases failed, such as {name!r:.100}: {why:.300}"
        yield Finding("oracle", f"reward {play.reward} < {settings.threshold}, {scores}", no_sandbox or hint)
    for text in failed:
        yield from _check_failure(text, no_sandbox)


def _check_failure(text: str, no_sandbox: str) -> Iterator[Finding]:
    """Yield a finding if a tool timed out or raised. A ToolError is meant for the model and is not a finding.

    Args:
        text: The error that the model read, without "error: ".
        no_sandbox: The reason why fake sandboxes are used, or "". If given, it replaces the advice for a tool that
            raised.
    """
    late = re.fullmatch(r"(tool '.*') timed out after (.*)", text)
    broken = re.match(r"(tool '[^']*') failed: (.*)", text, re.DOTALL)
    if late is not None:
        wrong = f"{late[1]} took longer than its limit of {late[2]} in the oracle's rollout"
        yield Finding("timeout", wrong, "raise its timeout_s, or make it faster")
    elif broken is not None:
        change = "fix the tool, or raise ag.ToolError if the model should read this message"
        yield Finding("tool", f"{broken[1]} raised {broken[2]:.300} in the oracle's rollout", no_sandbox or change)


async def _again(
    settings: Settings, oracle: Sequence[Reply] | ReplyPolicy, stage: Stage, first: ObservedRollout
) -> tuple[list[Finding], ObservedRollout]:
    """Run the oracle again, and compare it with its first rollout, `first`.

    This finds differences, state that rollouts share, code that blocks the event loop, and a score that changes when
    it is computed twice.

    Returns:
        The findings and the second rollout.
    """
    before = shared_state(stage.cls)
    with StallWatch(settings.cls, settings.block_limit_s) as stalls:
        second = await stage.run("oracle-again", Scripted(oracle), score_twice=True)
    findings = compare(first, second) if settings.repeatable else list(failed_again(second))
    if not findings and (settings.repeatable or second.second_score_failed):
        change = "make the reward leave the state that it reads unchanged, or save its first result in self"
        failed = [f"the second time raised {second.second_score_failed}"] if second.second_score_failed else []
        findings = [Finding("reward", f"scored twice, {text}", change) for text in [*failed, *second.changed_scores]]
    findings += compare_state(before, shared_state(stage.cls), settings.cls.__name__, settings.shared)
    return [*findings, *stalls.findings()], second


async def _check_noop(settings: Settings, stage: Stage) -> tuple[list[Finding], ObservedRollout]:
    play = await stage.run("no-op", Repeating(settings.noop))
    if play.bad_rewards:
        return [], play  # The reward itself has a finding.
    if play.error is not None:
        return [
            Finding("no-op", f"the rollout failed: {play.error}", "a model that does nothing useful must be scored too")
        ], play
    if play.reward is not None and play.reward >= settings.threshold and not settings.idle_is_right:
        scores = dict(play.rollout.rewards) if play.rollout is not None else {}
        wrong = f"reward {play.reward} >= {settings.threshold}, {scores}"
        change = (
            "doing nothing must earn less than a solution; pass idle_is_right=True (--idle-is-right) if it is right"
        )
        return [Finding("no-op", wrong, change)], play
    return [], play


async def _check_broken_call(settings: Settings, stage: Stage) -> tuple[list[Finding], ObservedRollout]:
    engine = Once([BROKEN_CALL])
    play = await stage.run("malformed-call", engine)
    if engine.went_on:
        return [], play
    if play.error is not None:
        wrong = f"a malformed call ended the rollout with an error: {play.error}"
        return [Finding("malformed call", wrong, "respond to it with a message, as ToolEnv.step does")], play
    if settings.cls.limits.turns > 1 and stage.offers_tools:
        wrong = "a malformed call ended the rollout"
        return [
            Finding("malformed call", wrong, "continue the rollout, with a tool message that says what was wrong")
        ], play
    return [], play


async def _check_cancel(settings: Settings, stage: Stage, solved: ObservedRollout | None) -> list[Finding]:
    """Cancel rollouts at different places, and check that each of them ends and is closed.

    One rollout is cancelled while it waits for the engine. If `solved`, the last rollout of the oracle, is given, the
    oracle is also cancelled in reset and in each tool and reward that waited in that rollout.
    """
    waiting = await stage.cancel_while_sampling()
    plays = [waiting]
    if waiting.error is None and not waiting.ended_as_cancelled:
        return [Finding("cancel", "the rollout swallowed its cancellation", CANCEL_CHANGE)]
    findings: list[Finding] = []
    if solved is None or settings.oracle is None:
        return list(_check_closed(plays))
    for turn, where in _waits(solved):
        play = await stage.run("cancelled", Scripted(settings.oracle), cancel_in=turn)
        plays.append(play)
        if play.swallowed_by is not None:
            findings.append(Finding("cancel", f"{where} swallowed a cancellation", CANCEL_CHANGE))
        elif play.cancelled.is_set() and not play.ended_as_cancelled:
            findings.append(Finding("cancel", f"the rollout did not end when {where} was cancelled", CANCEL_CHANGE))
    return [*findings, *_check_closed(plays)]


def _waits(oracle: ObservedRollout) -> list[tuple[int, str]]:
    """Return each turn in which the oracle's rollout waited, and the name of the code that waited.

    A turn is a number, or RESET or SCORE. Each tool and reward is listed only for the first time that it waited.
    """
    found = {RESET: "reset() or setup()"} if oracle.waited_in_reset else {}
    for number, turn in enumerate(oracle.turns):
        if turn.waited_in is not None and turn.waited_in not in found.values():
            found[number] = turn.waited_in
    if oracle.waited_in_score is not None and oracle.waited_in_score not in found.values():
        found[SCORE] = oracle.waited_in_score
    return list(found.items())


def _check_rewards(settings: Settings, plays: Sequence[ObservedRollout]) -> Iterator[Finding]:
    for play in plays:
        for name, wrong in play.bad_rewards.items():
            named = name if name == "step()" else f"reward {name!r}"
            yield Finding("reward", f"{named} {wrong}", "return a finite number, or raise if there is none")
        low, high = settings.reward_range or (float("-inf"), float("inf"))
        if play.reward is not None and not low <= play.reward <= high:
            yield Finding(
                "reward", f"{play.reward} is not within reward_range {low}..{high}", "scale it, or widen the range"
            )


def _check_closed(plays: Sequence[ObservedRollout]) -> Iterator[Finding]:
    for play in plays:
        if play.closed != 1:
            yield Finding(
                "cancel",
                f"close() was called {play.closed} times",
                "don't call close() in the env; the runner calls it once",
            )
