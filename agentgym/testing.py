"""What an env's tests need, without a GPU, a model or a container; also a pytest plugin.

::

    async def test_solves(no_leaks):
        r = await ag.rollout(Bugfix, TASK, Scripted([call("bash", cmd="..."), call("submit")]))
        assert r.reward == 1.0 and r.stop_reason == "submitted"
"""

import ast
import asyncio
import copy
import json
import os
import re
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import pytest

from agentgym.env import Env, TaskT, find_env
from agentgym.errors import EngineError
from agentgym.rollouts.chat import ChatTokenizer
from agentgym.rollouts.episode import rollout
from agentgym.rollouts.marks import Marks, unbroken
from agentgym.rollouts.parsing import parse_hermes
from agentgym.sound_json import whole_characters
from agentgym.types import Adapter, Box, Boxes, Completion, ExecResult, Floats, HostFunction, Message, Sampling, Version

# ---------------------------------------------------------------------------------------------------- replies


def call(name: str, /, **arguments: Any) -> Message:
    """The assistant calls one tool."""
    return calls((name, arguments))


def calls(*named: tuple[str, dict[str, Any]]) -> Message:
    """The assistant calls several tools in one turn."""
    made = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in named]
    return Message(role="assistant", content="", tool_calls=made)  # type: ignore[typeddict-item]


def say(text: str) -> Message:
    """The assistant answers in plain text."""
    return Message(role="assistant", content=text)


def raw(text: str) -> str:
    """The assistant writes exactly this, malformed calls and all."""
    return text


Reply: TypeAlias = Message | str
Policy: TypeAlias = Callable[[str], Reply]
"""From the whole text before the assistant's turn to what the assistant answers."""


NOOP: tuple[Reply, ...] = (say("I do not know."),)


# ---------------------------------------------------------------------------------------------------- tokenizer


class ByteTokenizer:
    """A chat tokenizer with one id a byte, and one for each of the two turn marks, in the Hermes format."""

    START, END = 256, 257
    vocabulary = 258
    _marks = {"<|im_start|>": START, "<|im_end|>": END}  # noqa: RUF012
    _contents = Marks(_marks, _marks)

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        head = self._contents.text("".join(json.dumps(tool) + "\n" for tool in tools), "tool")
        parts = [f"<|im_start|>tools\n{head}<|im_end|>\n"] if tools else []
        parts += [f"<|im_start|>{m['role']}\n{self._shown(m)}<|im_end|>\n" for m in messages]
        return "".join(parts) + ("<|im_start|>assistant\n" if generation else "")

    def _shown(self, message: Message) -> str:
        return self._contents.text(self._body(message), message["role"])

    def _body(self, message: Message) -> str:
        made = [json.dumps(c["function"]) for c in message.get("tool_calls", ())]
        return "\n".join([*filter(None, [message["content"]]), *(f"<tool_call>\n{c}\n</tool_call>" for c in made)])

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in re.split(r"(<\|im_start\|>|<\|im_end\|>)", text):
            ids += [self._marks[part]] if part in self._marks else unbroken(whole_characters(part))[0].encode()
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        marks = {number: mark.encode() for mark, number in self._marks.items()}
        return b"".join(marks.get(i, bytes([i % 256])) for i in token_ids).decode(errors="replace")

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> Message:
        return parse_hermes(text)


# ---------------------------------------------------------------------------------------------------- engine


class Scripted:
    """An engine that answers from a script, or from a function of the text so far; a real Engine in every way.

    Each rollout plays the script from its start. Log-probabilities are -0.5 throughout. `end` is the text of
    the tokenizer's stop token.
    """

    def __init__(
        self,
        replies: Sequence[Reply] | Policy,
        *,
        tokenizer: ChatTokenizer | None = None,
        end: str = "<|im_end|>",
        context_tokens: int = 1 << 20,
    ) -> None:
        self.replies = replies
        self.context_tokens = context_tokens
        self.version = 0
        self.tokenizer = tokenizer or ByteTokenizer()
        self.end = end
        self._played: dict[str, int] = {}
        self._sessions: dict[str, set[str]] = {}

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        reply = self._next(token_ids, session)
        ids = self.tokenizer.encode((reply if isinstance(reply, str) else self._write(reply)) + self.end)
        cut = ids[:max_tokens]
        return Completion(
            token_ids=np.array(cut),
            logprobs=np.full(len(cut), -0.5, np.float32),
            finish_reason="stop" if len(cut) == len(ids) else "length",
            versions=(Version(0, self.version),),
        )

    def _write(self, reply: Message) -> str:
        """The body of the assistant's turn as the template writes it."""
        ask = Message(role="user", content="")
        opened = self.tokenizer.render([ask], [], generation=True)
        body = self.tokenizer.render([ask, reply], [], generation=False).removeprefix(opened)
        return body[: body.rindex(self.end)]

    def _next(self, token_ids: Sequence[int], session: str) -> Reply:
        if callable(self.replies):
            return self.replies(self.tokenizer.decode(token_ids))
        rollout_id = session.rpartition("/")[0]
        self._sessions.setdefault(rollout_id, set()).add(session)
        played = self._played.get(rollout_id, 0)
        if played == len(self.replies):
            raise EngineError(f"the script ended after {played} replies, and the env asked for one more")
        self._played[rollout_id] = played + 1
        return self.replies[played]

    async def release(self, session: str) -> None:
        rollout_id = session.rpartition("/")[0]
        sessions = self._sessions.get(rollout_id, set())
        sessions.discard(session)
        if not sessions:  # A fork ends before its rollout does.
            self._sessions.pop(rollout_id, None)
            self._played.pop(rollout_id, None)

    async def load_adapter(self, adapter: Adapter | None, *, version: int) -> None:
        self.version = version

    async def score(self, token_ids: Sequence[int], *, sampling: Sampling) -> Floats:
        return np.full(max(len(token_ids) - 1, 0), -0.5, np.float32)


# ---------------------------------------------------------------------------------------------------- box

Shell: TypeAlias = Mapping[str, str | ExecResult] | Callable[[str], str | ExecResult]


class FakeBox:
    """A Box inside the test's own process: files in memory, Python run for real, shell commands by table.

    It is no sandbox: only a test's own code may run in it.
    """

    digest = "fake"

    def __init__(self, shell: Shell | None = None, files: Mapping[str, str | bytes] | None = None) -> None:
        self.shell, self.initial = shell, dict(files or {})
        self.files: dict[str, bytes] = {}
        self.log: list[str] = []
        self._start()

    def _start(self) -> None:
        self.files = {_path(path): _bytes(data) for path, data in self.initial.items()}
        self.namespace: dict[str, Any] = {"__name__": "__main__"}

    async def exec(self, command: str, *, timeout_s: float = 10.0) -> ExecResult:
        self.log.append(command)
        if self.shell is None:
            raise AssertionError(f"FakeBox: no shell was given, and the env ran {command!r}")
        if not callable(self.shell) and command not in self.shell:
            raise AssertionError(f"FakeBox: no answer for {command!r}; the shell knows {sorted(self.shell)}")
        answer = self.shell(command) if callable(self.shell) else self.shell[command]
        return answer if isinstance(answer, ExecResult) else _ok(answer)

    async def python(
        self,
        code: str,
        *,
        timeout_s: float = 10.0,
        functions: Mapping[str, HostFunction] | None = None,
        fresh: bool = False,
    ) -> ExecResult:
        self.log.append(code)
        namespace = {"__name__": "__main__"} if fresh else self.namespace
        loop = asyncio.get_running_loop()
        namespace |= {name: _from_thread(function, loop) for name, function in (functions or {}).items()}
        return await asyncio.to_thread(_run_cell, code, namespace)

    async def write(self, files: Mapping[str, str | bytes], *, timeout_s: float = 30.0) -> None:
        self.files |= {_path(path): _bytes(data) for path, data in files.items()}

    async def read(self, path: str, *, limit: int = 1 << 20, timeout_s: float = 30.0) -> bytes:
        if _path(path) not in self.files:
            raise FileNotFoundError(path)
        data = self.files[_path(path)]
        if len(data) > limit:
            raise ValueError(f"{path}: {len(data)} bytes, the limit is {limit}")
        return data

    async def list(self, path: str = ".", *, timeout_s: float = 30.0) -> list[str]:
        folder = PurePosixPath(_path(path))
        inside = [PurePosixPath(name).relative_to(folder) for name in self.files if _is_in(name, folder)]
        return sorted({p.parts[0] + ("/" if len(p.parts) > 1 else "") for p in inside})

    async def put(self, source: str | Path, target: str = ".", *, timeout_s: float = 30.0) -> None:
        self.files |= _load(Path(source), target)

    async def get(
        self, source: str, target: str | Path, *, limit: int = 64 << 20, timeout_s: float = 30.0
    ) -> Sequence[str]:
        folder = PurePosixPath(_path(source))
        inside = {PurePosixPath(name).relative_to(folder): name for name in self.files if _is_in(name, folder)}
        if str(folder) in self.files:
            inside[PurePosixPath()] = str(folder)
        if not inside:
            raise FileNotFoundError(source)
        _store({Path(target, below): self.files[name] for below, name in inside.items()})
        return []

    async def fork(self, *, timeout_s: float = 30.0) -> "FakeBox":
        """A box with copies of the files and of every name that can be copied; the others are shared."""
        branch = FakeBox(self.shell, self.initial)
        branch.files = dict(self.files)
        branch.namespace = {name: _copy(value) for name, value in self.namespace.items()}
        return branch

    async def close(self) -> None:
        """Nothing to end."""

    async def __aenter__(self) -> "FakeBox":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def reset(self, *, timeout_s: float = 10.0) -> None:
        self._start()


class FakeBoxes:
    """A pool of FakeBoxes; `leased` holds those in use, `made` all there ever were."""

    def __init__(self, make: Callable[[], Box] = FakeBox) -> None:
        self.make = make
        self.leased: list[Box] = []
        self.made: list[Box] = []

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Box]:
        box = self.make()
        self.made.append(box)
        self.leased.append(box)
        try:
            yield box
        finally:
            self.leased.remove(box)


def _path(path: str) -> str:
    return str(PurePosixPath(path))


def _load(source: Path, target: str) -> dict[str, bytes]:
    if not source.is_dir():
        return {_path(source.name if target in ("", ".") else target): source.read_bytes()}
    found = [path for path in sorted(source.rglob("*")) if not path.is_dir()]
    return {_path(f"{target}/{path.relative_to(source)}"): path.read_bytes() for path in found}


def _store(files: Mapping[Path, bytes]) -> None:
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:
        return value  # A module, a lock, an open file.


def _is_in(name: str, folder: PurePosixPath) -> bool:
    return PurePosixPath(name).is_relative_to(folder) and PurePosixPath(name) != folder


def _bytes(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else data


def _ok(stdout: str) -> ExecResult:
    return ExecResult(status="ok", exit_code=0, stdout=stdout, stderr="")


def _from_thread(function: HostFunction, loop: asyncio.AbstractEventLoop) -> Callable[..., object]:
    """The host function as blocking code in another thread may call it."""

    async def answer(*args: Any, **kwargs: Any) -> object:
        value = function(*args, **kwargs)
        return await value if isinstance(value, Awaitable) else value

    return lambda *args, **kwargs: asyncio.run_coroutine_threadsafe(answer(*args, **kwargs), loop).result()


def _run_cell(code: str, namespace: dict[str, Any]) -> ExecResult:
    printed: list[str] = []
    namespace["print"] = lambda *values, sep=" ", end="\n", **_: printed.append(sep.join(map(str, values)) + end)
    error = ""
    try:
        tree = ast.parse(code)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<cell>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
            printed += [] if value is None else [f"{value!r}\n"]
    except (Exception, SystemExit):
        error = traceback.format_exc(limit=-1)
    status = "error" if error else "ok"
    return ExecResult(status=status, exit_code=int(bool(error)), stdout="".join(printed), stderr=error)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- contract


async def check_env(
    env: type[Env[TaskT]],
    task: TaskT,
    *,
    oracle: Sequence[Reply] | Policy,
    noop: Sequence[Reply] | Policy = NOOP,
    boxes: Boxes | None = None,
    threshold: float = 1.0,
) -> None:
    """Assert what every agentic env owes its users.

    The oracle reaches `threshold` and the no-op does not; a malformed call is answered and the rollout
    goes on; a cancelled rollout closes its env; tools have schemas; the same seed gives the same prompt.
    """
    cls = find_env(env)
    if boxes is None and cls.sandbox is not None:
        boxes = FakeBoxes()
    solved = await rollout(cls, task, Scripted(oracle), boxes=boxes)
    assert solved.error is None, f"oracle: {solved.error}"
    assert solved.reward is not None
    assert solved.reward >= threshold, f"oracle: reward {solved.reward} < {threshold}, {solved.rewards}"
    idle = await rollout(cls, task, Scripted(noop), boxes=boxes)
    assert idle.error is None, f"no-op: {idle.error}"
    assert idle.reward is not None
    assert idle.reward < threshold, f"no-op: reward {idle.reward} >= {threshold}, {idle.rewards}"
    await _check_malformed_call(cls, task, boxes)
    await _check_seed(cls, task, boxes, noop)
    await _check_cancel(cls, task, boxes)
    await _check_cancel_in_step(cls, task, boxes, oracle)


async def _check_malformed_call(cls: type[Env[Any]], task: Any, boxes: Boxes | None) -> None:
    if cls.limits.turns < 2:
        return
    broken = Scripted([raw('<tool_call>\n{"name": oops\n</tool_call>'), *[say("stop")] * 3])
    played = await rollout(cls, task, broken, boxes=boxes)
    assert played.error is None, f"malformed call: {played.error}"
    assert len(played.messages) >= 2, "malformed call: the rollout must go on, with a tool message the model reads"


async def _check_cancel(cls: type[Env[Any]], task: Any, boxes: Boxes | None) -> None:
    asked = asyncio.Event()
    closed: list[bool] = []

    class Watched(cls):  # type: ignore[misc, valid-type]
        async def close(self) -> None:
            closed.append(True)
            await super().close()

    class Waiting(Scripted):
        async def generate(self, *args: Any, **kwargs: Any) -> Completion:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    playing = asyncio.create_task(rollout(Watched, task, Waiting([]), boxes=boxes))
    await asked.wait()
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    assert playing.cancelled(), "cancel: the rollout swallowed its cancellation"
    assert closed == [True], f"cancel: close() was called {len(closed)} times, expected once"


async def _check_seed(cls: type[Env[Any]], task: Any, boxes: Boxes | None, noop: Sequence[Reply] | Policy) -> None:
    prompts = []
    for _ in range(2):
        played = await rollout(cls, task, Scripted(noop), boxes=boxes, seed=7)
        first = played.segments[0]
        prompts.append(first.token_ids[: first.turns[0].start].tolist())
    assert prompts[0] == prompts[1], "seed: the same seed must give the same first prompt"


async def _check_cancel_in_step(
    cls: type[Env[Any]], task: Any, boxes: Boxes | None, oracle: Sequence[Reply] | Policy
) -> None:
    stepping = asyncio.Event()
    went_on: list[bool] = []

    class Stepping(cls):  # type: ignore[misc, valid-type]
        async def step(self, action: Message) -> Any:
            stepping.set()
            result = await super().step(action)
            current = asyncio.current_task()
            # The runner ends such a rollout all the same; the fault is that the step returned at all.
            went_on.append(current is not None and current.cancelling() > 0)
            return result

    class Once(Scripted):
        async def generate(self, *args: Any, **kwargs: Any) -> Completion:
            if stepping.is_set():
                current = asyncio.current_task()
                went_on.append(current is not None and current.cancelling() > 0)
                if went_on[-1]:
                    raise EngineError("the rollout was cancelled")
                await asyncio.Event().wait()
            return await super().generate(*args, **kwargs)

    playing = asyncio.create_task(rollout(Stepping, task, Once(oracle), boxes=boxes))
    await stepping.wait()
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    assert not any(went_on), "cancel: step() swallowed a cancellation, and the rollout went on"
    assert playing.cancelled(), "cancel: step() swallowed a cancellation"


# ---------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture
def boxes() -> FakeBoxes:
    """A pool of FakeBoxes with no shell."""
    return FakeBoxes()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail the test if it leaves a thread or a child process behind."""
    threads, children = set(threading.enumerate()), _children()
    yield
    left = [t.name for t in threading.enumerate() if t not in threads and not t.name.startswith("asyncio_")]
    assert not left, f"threads left running: {left}"
    assert not _children() - children, f"child processes left running: {_children() - children}"


def _children() -> set[int]:
    """Ids of this process's children, where the system tells (Linux)."""
    path = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    try:
        with open(path) as file:  # noqa: PTH123
            return {int(pid) for pid in file.read().split()}
    except OSError:
        return set()
