r"""Gymnasium, both ways: an agentgym env as a `gymnasium.Env`, and a Gymnasium env as a tool.

Out: `register_gymnasium(Chase)`, then `gymnasium.make("agentgym/Chase-v0")`. An action is what the assistant
writes, an observation what it reads next::

    reset  ->  "user: Start at key 31. What is the value?"
    step('<tool_call>\n{"name": "python", "arguments": {"code": "get(31)"}}\n</tool_call>')  ->  "tool: 'see 52'"
    step("Answer: 17")  ->  "", 1.0, terminated

In: `GymnasiumToolEnv`, an env like any other, whose one tool `act` is the step of a Gymnasium env.
"""

import asyncio
import concurrent.futures
import copy
import re
import string
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar, TypeAlias, TypeVar

from pydantic import Field, JsonValue

try:
    import gymnasium
except ImportError as error:
    raise ImportError("agentgym.bridges.gymnasium needs Gymnasium: pip install 'agentgym[gymnasium]'") from error

from agentgym.boxes import Boxes, Sandbox, cut_middle
from agentgym.chat.parsing import parse_hermes
from agentgym.environments.env import Env, Split, close
from agentgym.environments.limits import Limits
from agentgym.environments.registry import find_env
from agentgym.environments.rewards import reward
from agentgym.environments.task_rows import as_tasks
from agentgym.environments.tool_env import ToolEnv
from agentgym.errors import ToolError
from agentgym.messages import Message
from agentgym.tools.tool import Stop, tool
from agentgym.types import StepResult, StopReason, Task

T = TypeVar("T")

LATIN = "".join(letter for letter in map(chr, range(0xC0, 0x180)) if letter.isalpha())
CHARSET = string.digits + string.ascii_letters + string.punctuation + " \t\n" + LATIN
"""What an observation may hold: printable ASCII, tab, newline and the Latin letters from U+00C0 to U+017F."""
_OUTSIDE = re.compile(f"[^{re.escape(CHARSET)}]")


# ---------------------------------------------------------------------------------------------------- out


def register_gymnasium(env: str | type[Env[Any]], id: str | None = None, **kwargs: Any) -> str:
    """Make an env known to `gymnasium.make` and `make_vec` and give its id, "agentgym/<class>-v0" by default.

    `kwargs` go to `ExportedEnv`, as do those given to `make`. Registering the same again changes nothing;
    ValueError where the id already means something else.
    """
    id = id or f"agentgym/{find_env(env).__name__}-v0"
    given = {"env": env, **kwargs}
    known = gymnasium.registry.get(id)
    if known is None:
        gymnasium.register(id, entry_point=f"{__name__}:{ExportedEnv.__name__}", kwargs=given)
    elif known.kwargs != given:
        raise ValueError(f"id: {id!r} is already registered, with {known.kwargs}")
    return id


class ExportedEnv(gymnasium.Env):  # type: ignore[misc]
    """An agentgym env as a synchronous `gymnasium.Env` over text; `close` gives everything back, also twice.

    An action is the assistant's turn in the Hermes format: plain text, or one or more
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. An observation holds the new messages as
    "role: content"; a character outside `CHARSET` becomes "?", and past `max_length` characters the middle
    is cut. Actions are taken as they are.

    The env's limits on turns and seconds truncate; the score is then part of the last reward. Its limits on
    tokens and its compaction have no meaning here: whoever acts keeps the context. The tools' schemas are in
    `info["tools"]` of `reset`, and `info["task"]` is the task's id.

    In `make_vec` an env with text in `vectorization_mode="async"` needs `vector_kwargs={"shared_memory": False}`:
    Gymnasium reads text from its shared memory only once, before the first reset.

    Everything of the env runs in one task of one private event loop, so several of these never share a box.
    `sandbox` replaces the one the env declares; `boxes` is an open pool that does not belong to another event
    loop, such as FakeBoxes. Errors of the env and of its box reach the caller unchanged.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(
        self,
        env: str | type[Env[Any]],
        *,
        split: Split = "train",
        tasks: Sequence[Task] | None = None,
        sandbox: Sandbox | None = None,
        boxes: Boxes | None = None,
        max_length: int = 16_384,
    ) -> None:
        self.cls = find_env(env)
        self.tasks: Sequence[Task] = as_tasks(self.cls, self.cls.tasks(split) if tasks is None else tasks)
        if not self.tasks:
            raise ValueError("tasks: empty")
        self.sandbox = self.cls.sandbox if sandbox is None else sandbox
        self.boxes = boxes
        self.max_length = max_length
        self.action_space = gymnasium.spaces.Text(max_length, min_length=0, charset=CHARSET)
        self.observation_space = gymnasium.spaces.Text(max_length, min_length=0, charset=CHARSET)
        self._worker: _Worker | None = None
        self._player: _Player | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start on a task that the seed picks, or on number `options["task"]`; all options go on to the env."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(len(self.tasks)))
        task = self.tasks[(options or {}).get("task", drawn)]
        env_seed = int(self.np_random.integers(1 << 31))
        worker, player = self._open()
        messages, info = worker.run(lambda: player.reset(task, seed=env_seed, options=options))
        return self._text(messages), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the assistant's turn; ResetNeeded before the first reset and after the end."""
        worker, player = self._worker, self._player
        if worker is None or player is None or player.env is None:
            raise gymnasium.error.ResetNeeded(f"{self.cls.__name__}: call reset() before step()")
        messages, earned, terminated, truncated, info = worker.run(lambda: player.step(parse_hermes(action)))
        return self._text(messages), earned, terminated, truncated, info

    def close(self) -> None:
        """Close the env, give back its box, close the pool and end the thread."""
        worker, player = self._worker, self._player
        self._worker = self._player = None
        if worker is None or player is None:
            return
        try:
            worker.run(player.close)
        finally:
            worker.close()

    def _open(self) -> "tuple[_Worker, _Player]":
        # Not in the constructor: a vector env makes one copy only to look at its spaces, and may fork after it.
        self._worker = self._worker or _Worker()
        self._player = self._player or _Player(self.cls, self.sandbox, self.boxes)
        return self._worker, self._player

    def _text(self, messages: Sequence[Message]) -> str:
        text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        return cut_middle(_OUTSIDE.sub("?", text), self.max_length)


class _Player:
    """Plays one episode after another, one env and one box at a time."""

    def __init__(self, cls: type[Env[Any]], sandbox: Sandbox | None, boxes: Boxes | None) -> None:
        self.cls, self.sandbox, self.boxes = cls, sandbox, boxes
        self.env: Env[Any] | None = None
        self.episode = AsyncExitStack()
        self.pool = AsyncExitStack()

    async def reset(
        self, task: Task, *, seed: int, options: dict[str, Any] | None
    ) -> tuple[list[Message], dict[str, Any]]:
        await self._end()
        env = self.cls(task)
        async with AsyncExitStack() as stack:
            if self.cls.sandbox is not None:
                env.box = await stack.enter_async_context((await self._boxes()).lease())
            stack.push_async_callback(close, env)
            messages, info = await env.reset(seed=seed, options=options)
            self.episode = stack.pop_all()
        self.env, self.turns = env, 0
        self.deadline = asyncio.get_running_loop().time() + self.cls.limits.seconds
        # A copy: a class has one schema of each tool, and Gymnasium's users may write into what they get.
        return messages, {"task": task.id, "tools": copy.deepcopy(env.tools), **info}

    async def _boxes(self) -> Boxes:
        if self.boxes is None:
            assert self.sandbox is not None
            self.boxes = await self.pool.enter_async_context(self.sandbox.open(1))
        return self.boxes

    async def step(self, action: Message) -> StepResult:
        env = self.env
        assert env is not None
        self.turns += 1
        result = await self._limited(env, action)
        rewards: dict[str, float] = dict(result.info.get("rewards") or {})
        earned = sum(rewards.values()) if rewards else float(result.reward)
        if not (result.terminated or result.truncated):
            return result._replace(reward=earned)
        if not rewards:
            async with asyncio.timeout(self.cls.limits.seconds):
                scores = await env.score()
            earned, rewards = earned + sum(scores.values()), rewards | scores
        await self._end()
        stop_reason = str(result.info.get("stop_reason", StopReason.DONE))
        info = {**result.info, "stop_reason": stop_reason, "rewards": rewards, "metrics": dict(env.metrics)}
        return result._replace(reward=float(earned), info=info)

    async def _limited(self, env: Env[Any], action: Message) -> StepResult:
        """The env's step, truncated where a limit says so."""
        try:
            async with asyncio.timeout_at(self.deadline) as deadline:
                result = StepResult(*await env.step(action))
        except TimeoutError:
            if not deadline.expired():
                raise
            return StepResult([], 0.0, False, True, {"stop_reason": StopReason.SECONDS})
        if self.turns < self.cls.limits.turns or result.terminated or result.truncated:
            return result
        return result._replace(truncated=True, info={**result.info, "stop_reason": StopReason.TURNS})

    async def _end(self) -> None:
        self.env = None
        await self.episode.aclose()

    async def close(self) -> None:
        try:
            await self._end()
        finally:
            await self.pool.aclose()


_Answer: TypeAlias = "concurrent.futures.Future[Any]"
_Call: TypeAlias = tuple[Callable[[], Coroutine[Any, Any, Any]], _Answer]


class _Worker:
    """A thread with an event loop where everything runs in one task, so what it opened it can also close."""

    def __init__(self) -> None:
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="agentgym-gymnasium", daemon=True
        )
        self._thread.start()
        started.result()

    async def _serve(self, started: "concurrent.futures.Future[None]") -> None:
        task = asyncio.current_task()
        assert task is not None
        self._loop, self._task, self._calls = asyncio.get_running_loop(), task, asyncio.Queue[_Call | None]()
        started.set_result(None)
        while (call := await self._calls.get()) is not None:
            work, answer = call
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(await work())
            # Whatever it is, a cancellation too, belongs to the caller, who would otherwise wait for ever.
            except BaseException as failure:
                answer.set_exception(failure)
            while task.cancelling():
                task.uncancel()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do the work and wait for its outcome; interrupted, the work is cancelled and the worker goes on."""
        answer: _Answer = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(self._calls.put_nowait, (work, answer))
            outcome: T = answer.result()
        except BaseException:
            self._loop.call_soon_threadsafe(self._cancel, answer)
            raise
        return outcome

    def _cancel(self, answer: _Answer) -> None:
        if not (answer.cancel() or answer.done()):
            self._task.cancel()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._calls.put_nowait, None)
        self._thread.join()


# ---------------------------------------------------------------------------------------------------- in


class GymnasiumTask(Task):
    """One start of a Gymnasium env: `gymnasium.make(env_id, **kwargs)`, reset with `seed`."""

    env_id: str
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    seed: int = 0


class GymnasiumToolEnv(ToolEnv[GymnasiumTask]):
    """A Gymnasium env with discrete actions as one tool; the reward is the sum of its rewards.

    The first observation and the choice of actions are put behind the task's prompt. It ends when the
    Gymnasium env does: `done` where that terminated, `truncated` where it was truncated. A subclass names
    the actions in `action_names`, in the order of their numbers, and may say in `describe` how an
    observation reads. The Gymnasium env is stepped in threads, never two at once.
    """

    limits = Limits(turns=100)
    action_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, task: GymnasiumTask) -> None:
        super().__init__(task)
        self.gym: Any = None
        self.total = 0.0
        self._lock = threading.Lock()

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        messages, info = await super().reset(seed=seed, options=options)
        first = await asyncio.to_thread(self._start)
        # Behind the last message, not in one of its own: many templates refuse two user messages in a row.
        messages[-1] = messages[-1] | {"content": f"{messages[-1]['content']}\n\n{first}"}
        return messages, info

    def _start(self) -> str:
        with self._lock:
            self.gym = gymnasium.make(self.task.env_id, **self.task.kwargs)
            if "render_mode" not in self.task.kwargs and "ansi" in self.gym.metadata.get("render_modes", ()):
                self.gym.close()
                self.gym = gymnasium.make(self.task.env_id, **self.task.kwargs, render_mode="ansi")
            observation, _ = self.gym.reset(seed=self.task.seed)
            return f"Actions: {', '.join(self._choices())}\n\n{self.describe(observation)}"

    def describe(self, observation: Any) -> str:
        """An observation as the model reads it: what an "ansi" rendering shows, else `str`.

        Coloured text, by which such renderings mark a place, stands in [brackets].
        """
        if self.gym.render_mode == "ansi":
            return re.sub(r"(?:\x1b\[[0-9;]+m)+(.*?)\x1b\[0m", r"[\1]", self.gym.render(), flags=re.DOTALL)
        return str(observation)

    @tool(timeout_s=60)
    def act(self, action: int | str) -> str | Stop:
        """Take one action, by its name or number; the answer shows what it led to."""
        with self._lock:
            observation, earned, terminated, truncated, _ = self.gym.step(self._number(action))
            self.total += float(earned)
            text = self.describe(observation)
        if terminated or truncated:
            return Stop("done" if terminated else "truncated", text)
        return text

    def _choices(self) -> list[str]:
        space = self.gym.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"{self.task.env_id}: only Discrete actions can be a tool's, these are {space}")
        if len(self.action_names) not in (0, space.n):
            raise ValueError(f"action_names: {len(self.action_names)} for the {space.n} actions of {self.task.env_id}")
        return list(self.action_names or map(str, range(space.start, space.start + space.n)))

    def _number(self, action: int | str) -> int:
        choices, start = self._choices(), int(self.gym.action_space.start)
        numbers = {str(start + i): start + i for i in range(len(choices))}
        numbers |= {name: start + i for i, name in enumerate(choices)}
        if str(action) not in numbers:
            raise ToolError(f"no action {action!r}; the actions are: {', '.join(choices)}")
        return numbers[str(action)]

    @reward
    def gym_return(self) -> float:
        """The sum of the rewards that the Gymnasium env gave."""
        return self.total

    async def close(self) -> None:
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        # A step that never returns holds the lock: leave that env behind rather than hang with it.
        if self._lock.acquire(timeout=10.0):
            try:
                if self.gym is not None:
                    self.gym.close()
            finally:
                self._lock.release()
