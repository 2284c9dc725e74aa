"""What an env's tests need, without a GPU, a model or a container; the fixtures are in `agentgym.pytest_plugin`.

::

    async def test_solves(no_leaks):
        r = await ag.rollout(Bugfix, TASK, Scripted([call("bash", cmd="..."), call("submit")]))
        assert r.reward == 1.0 and r.stop_reason == "submitted"
"""

import ast
import asyncio
import copy
import json
import re
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from agentgym.env import Env, TaskT, find_env
from agentgym.errors import EngineError
from agentgym.rollouts.chat import ChatTokenizer
from agentgym.rollouts.marks import Marks, unbroken
from agentgym.rollouts.parsing import parse_hermes
from agentgym.sound_json import whole_characters
from agentgym.types import (
    Adapter,
    Box,
    Boxes,
    Completion,
    ExecResult,
    Floats,
    HostFunction,
    Message,
    Sample,
    Sampling,
    Version,
)

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


# ---------------------------------------------------------------------------------------------------- samples


def sample(prompt_ids: Sequence[int] = (1,), response_ids: Sequence[int] = (2, 3), **changes: Any) -> Sample:
    """A sample whose every response token was sampled, with log-probability -0.5 and advantage 1, but for `changes`."""
    n = len(response_ids)
    fields: dict[str, Any] = {
        "group_id": "group",
        "rollout_id": "group/0",
        "segment": 0,
        "step": 0,
        "prompt_ids": prompt_ids,
        "response_ids": response_ids,
        "loss_mask": np.ones(n, np.bool_),
        "logprobs": np.full(n, -0.5, np.float32),
        "advantages": np.ones(n, np.float32),
        "weight": 1.0,
        "policy_version": 0,
        "is_last": True,
    }
    return Sample(**(fields | changes))


# ---------------------------------------------------------------------------------------------------- contract


def check_env(
    env: type[Env[TaskT]],
    task: TaskT,
    *,
    oracle: Sequence[Reply] | Policy,
    noop: Sequence[Reply] | Policy = NOOP,
    boxes: Boxes | None = None,
    threshold: float = 1.0,
    idle_is_right: bool = False,
    repeatable: bool = True,
    secrets: Sequence[str] = (),
    shared: Sequence[str] = (),
    reward_range: tuple[float, float] | None = None,
    block_limit_s: float = 0.5,
) -> Coroutine[Any, Any, None]:
    """Assert what every agentic env owes its users: `await check_env(MyEnv, TASK, oracle=[...])`.

    One AssertionError names everything that was found, a line each: `kind: what is wrong: what to change`.

    The oracle reaches `threshold`, twice, with the same prompt, tool answers and rewards for the same seed; none of its
    tools fails or times out; no method holds up the event loop for `block_limit_s` seconds when it runs for the second
    time. The no-op stays below `threshold`. A malformed call is answered and the rollout goes on. A cancelled rollout
    ends, wherever the env waits, and closes once. Rewards are finite numbers. Nothing is left: no thread, process, open
    file, temporary folder or asyncio task. Tools have schemas, something scores the rollout, the train and test split
    have no task in common, and rollouts change nothing that belongs to the class.

    `boxes`: without them, an env that declares a sandbox is played in a real box of it; where none can be had, in a
        FakeBox, with a warning that says why.
    `noop`: a script, whose last reply is repeated for as long as the env asks, or a function of the text.
    `idle_is_right`: doing nothing is the right answer to this task, so the no-op may reach the threshold.
    `repeatable=False`: a judge or the world itself never answers the same twice; two plays are not compared.
    `secrets`: texts that the model must never read before it wrote them itself. Without being named here, a `check`
        or `solution` of the task may be in no prompt and no tool's answer, its `answer` in no exception of a tool.
    `shared`: attributes of the class that all rollouts are meant to change.
    `reward_range`: the lowest and the highest reward that a rollout may have.

    :raises AssertionError: with every finding.
    """
    from agentgym.env_checks.check import EnvCheck, Settings, run_checks  # they play with what this module makes

    cls = find_env(env)
    settings = Settings(
        cls=cls,
        task=task,
        oracle=oracle,
        noop=noop,
        boxes=boxes,
        threshold=threshold,
        idle_is_right=idle_is_right,
        repeatable=repeatable,
        secrets=secrets,
        shared=shared,
        reward_range=reward_range,
        block_limit_s=block_limit_s,
    )
    return EnvCheck(run_checks(settings), cls.__name__)
