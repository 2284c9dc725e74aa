"""Environments whose typed methods are the model's tools."""

import logging
from collections.abc import Collection, Coroutine, Iterator, MutableMapping, Sequence
from functools import cache
from typing import Any, ClassVar

from agentgym.environments.env import Env, TaskT, has_group_reward
from agentgym.environments.rewards import counted_content, reward_value, rewards_of, role_totals
from agentgym.errors import AgentGymError, EnvError, SandboxKilledError, boundary
from agentgym.tools.at_once import started
from agentgym.tools.calls import ToolResult, dispatch, offered
from agentgym.tools.declarations import check_awaited, check_free, check_reward
from agentgym.tools.dynamic import DynamicTool, by_name
from agentgym.tools.tool import check_tool_types, class_tools, declared
from agentgym.types.messages import Message, ToolCall
from agentgym.types.rollout import StopReason
from agentgym.types.task import StepResult

log = logging.getLogger(__name__)


class ToolEnv(Env[TaskT]):
    """An env whose `@ag.tool` methods are the model's tools and whose `@ag.reward` methods score the rollout.

    The rollout ends when the model answers without a tool call (`self.answer` is the text) or when a tool returns
    `ag.Stop`. If a token limit cuts off a turn, `self.answer` is the text up to there.
    """

    _counts: ClassVar[tuple[str, ...]] = ("tool_calls", "tool_errors", "malformed_calls")
    """The metrics that every rollout has, with 0 if nothing was counted."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        made: type = cls
        for attribute, name, _ in declared(made):
            check_free(attribute, _TAKEN, f"tool {name!r} of {cls.__name__}", f', as in `@ag.tool(name="{name}")`')
        for name in rewards_of(made):
            check_free(name, _TAKEN, f"reward {name!r} of {cls.__name__}", "")
            check_reward(getattr(cls, name), f"reward {name!r} of {cls.__name__}")
        # After the name checks, whose message is clearer for a tool called "close".
        super().__init_subclass__(**kwargs)
        for method in ("setup", "extra_tools", "call_tools"):
            check_awaited(made, method)
        check_tool_types(made)

    def __init__(self, task: TaskT) -> None:
        super().__init__(task)
        cls: type = type(self)
        _warn_of_no_reward(cls)
        self.answer: str | None = None
        self._extra_tools: dict[str, DynamicTool] = {}
        self.metrics |= dict.fromkeys(self._counts, 0.0)

    async def setup(self) -> None:
        """Prepare the sandbox and the env's own state; called once, before the model gets its first prompt."""

    async def extra_tools(self) -> Sequence[DynamicTool]:
        """Return this instance's tools in addition to those of its class; called once, after `setup`."""
        return ()

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [made.schema for made in offered(self).values() if made.root]

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        with boundary(EnvError, f"{type(self).__name__}.setup"):
            returned: object = await self.setup()  # type: ignore[func-returns-value]
        self._begin_play(returned)
        cls: type = type(self)
        with boundary(EnvError, cls.__name__):
            declared_tools = class_tools(cls)
        with boundary(EnvError, f"{cls.__name__}.extra_tools"):
            self._extra_tools = by_name(await self.extra_tools(), declared_tools)
        return await super().reset(seed=seed, options=options)

    def _begin_play(self, returned: object) -> None:
        """Raise EnvError if `setup` returned a value or `metrics` isn't a dict; add missing counts to `metrics`."""
        if returned is not None:
            said = "a rollout begins with a turn of the model; remove tasks that are already over from the data set"
            raise EnvError(f"{type(self).__name__}.setup: returned {returned!r:.80}, but must return None: {said}")
        with boundary(EnvError, where := f"{type(self).__name__}.metrics"):
            metrics: object = self.metrics
        if not isinstance(metrics, MutableMapping):
            raise EnvError(f"{where}: must be a dict of numbers by name, got {type(metrics).__name__}")
        for name in self._counts:
            metrics.setdefault(name, 0.0)

    async def step(self, action: Message) -> StepResult:
        calls = action.get("tool_calls")
        if not calls:
            self.answer = action["content"]
            return _end([], StopReason.ANSWER)
        messages, stop = await self.call_tools(calls)
        if stop is not None:
            return _end(messages, stop)
        return StepResult(messages, 0.0, False, False, {})

    async def step_cut(self, action: Message) -> StepResult | None:
        """Set `self.answer` to the text of the last turn, which a token limit cut off; see `Env.step_cut`.

        Args:
            action: The assistant's message as far as it was sampled, without its tool calls.
        """
        self.answer = action["content"]
        return _end([], StopReason.LENGTH)

    async def call_tools(
        self, calls: Sequence[ToolCall], allowed_tools: Collection[str] | None = None
    ) -> tuple[list[Message], str | None]:
        """Make the calls in order, and return their tool messages and the stop reason of a tool that ended the rollout.

        Adjacent calls to parallel tools run at the same time, at most `limits.parallel_calls` of them. If a call stops
        the rollout, later calls are not made; those that run at the same time are cancelled, and nothing about them is
        counted.

        Args:
            calls: The tool calls of one turn.
            allowed_tools: Names of the tools that this caller may use; None allows those of the root conversation.

        Returns:
            The tool messages, and the reason if a tool stopped the rollout, otherwise None.
        """
        messages: list[Message] = []
        if len(calls) == 1:  # The usual case, which needs no wrapper.
            (call,) = calls
            result = await self._dispatched(call, allowed_tools)
            self._count(call, result)
            return [_tool_message(call, result)], result.stop
        for neighbors in self._neighbors(calls):
            work = [self._dispatched(call, allowed_tools) for call in neighbors]
            async with started(work, most=self.limits.parallel_calls) as results:
                for call, coming in zip(neighbors, results, strict=True):
                    result = await coming
                    self._count(call, result)
                    messages.append(_tool_message(call, result))
                    if result.stop is not None:
                        return messages, result.stop
        return messages, None

    def _neighbors(self, calls: Sequence[ToolCall]) -> Iterator[list[ToolCall]]:
        """Yield groups of calls that may run together: adjacent calls to parallel tools, and any other call alone."""
        beside: list[ToolCall] = []
        for call in calls:
            made = offered(self).get(call["function"]["name"])
            if made is not None and made.parallel:
                beside.append(call)
                continue
            if beside:
                yield beside
            beside = []
            yield [call]
        if beside:
            yield beside

    async def score(self) -> dict[str, float]:
        """Return each reward method's value by name, without its weight; raise EnvError for a method that fails.

        The weighted sums of each role's methods are added to `self.role_rewards`.
        """
        cls: type = type(self)
        scores = {name: await self._value(name) for name in rewards_of(cls)}
        self.role_rewards |= role_totals(cls, scores)
        return scores

    async def _value(self, name: str) -> float:
        """Return a reward's value: 0.0 if the policy's code killed the sandbox or left something unusable in it."""
        method, where = getattr(self, name), f"{type(self).__name__}: reward {name!r}"
        try:
            return await reward_value(method, where, self._threads)
        except SandboxKilledError:
            counted = "sandbox_killed"
        except AgentGymError as error:
            counted = counted_content(error, where, method)
            if not counted:
                raise
        self._add(counted)
        return 0.0

    def _dispatched(self, call: ToolCall, allowed_tools: Collection[str] | None) -> Coroutine[Any, Any, ToolResult]:
        function = call["function"]
        return dispatch(self, function["name"], function["arguments"], allowed_tools=allowed_tools)

    def _count(self, call: ToolCall, result: ToolResult) -> None:
        function = call["function"]
        self._add("tool_calls", not result.malformed)
        if not result.error:
            return
        self._add("tool_errors")
        if not result.malformed:  # A malformed call may name a tool that doesn't exist.
            self._add(f"tool_errors/{function['name']}")
        self._add("malformed_calls", result.malformed)
        if result.failed:
            self.tool_failures[function["name"]] += 1

    def _add(self, name: str, number: float = 1.0) -> None:
        """Add to a metric, even if the env has removed it meanwhile."""
        self.metrics[name] = self.metrics.get(name, 0.0) + number


def _tool_message(call: ToolCall, result: ToolResult) -> Message:
    message: Message = {"role": "tool", "content": result.content, "name": call["function"]["name"]}
    if "id" in call:
        message["tool_call_id"] = call["id"]
    return message


def _end(messages: list[Message], reason: str) -> StepResult:
    """Return the step that ends the rollout; the runner then calls `score`."""
    return StepResult(messages, 0.0, True, False, {"stop_reason": reason})


@cache
def _warn_of_no_reward(cls: type) -> None:
    scored = [getattr(cls, name) is not getattr(ToolEnv, name) for name in ("score", "step")]
    scored.append(has_group_reward(cls))
    if not rewards_of(cls) and not any(scored):
        said = "has no @ag.reward and overrides neither score nor step, so every rollout has the reward 0.0"
        log.warning("%s %s", cls.__name__, said)


_TAKEN = frozenset(
    {
        *dir(ToolEnv),
        *("task", "metrics", "answer", "tool_failures", "role_rewards"),
        *("_sandbox", "_resources", "_extra_tools", "_forks", "_models", "_threads"),
    }
)
"""Names that no tool or reward may have, because Env and ToolEnv use them."""
