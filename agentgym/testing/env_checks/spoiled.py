"""Hostile content that a policy may write or leave in its sandbox, and a sandbox that shows it to an env."""

import asyncio
import copy
import errno
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentgym.errors import EngineError, EnvError, MachineError, SandboxContentError, SandboxError
from agentgym.sandboxes.protocol import ExecResult, Sandbox, Verdict
from agentgym.sandboxes.protocol.content import NotAFile, WrongContent, of_number
from agentgym.types.messages import Message, ToolCall

MB = 1 << 20
TEXTS: Mapping[str, str] = {
    "nothing": "",
    "1 MB of text": "a " * (MB // 2),
    "the character NUL": "a\0b",
    "broken JSON": '{"answer": [1, ',
    "JSON of another type, null": "null",
    "JSON of another type, a list": "[null]",
    "JSON of another type, an empty object": "{}",
    "JSON of 100,000 levels": "[" * 100_000 + "]" * 100_000,
    "a number of 5,000 digits": "9" * 5000,
    "a number that is not finite": "NaN",
    "a number that is too large": "1e999",
    "a division by zero": "1/0",
    "a path that leads out": "../../\0/etc/passwd",
}
"""Texts that a model may write, by their description."""
NO_TEXT: Mapping[str, bytes] = {"bytes that are not UTF-8": b"\xff\xfe\x00\x01"}
MOST_VARIED = 4
"""Maximum number of an object's keys that each get wrong values."""


def wrong_types(text: str) -> Iterator[tuple[str, str]]:
    """Yield variants of a correct JSON text with values of other types, each after its description."""
    try:
        right = json.loads(text)
    except (ValueError, RecursionError):
        return
    keys: list[Any] = list(right)[:MOST_VARIED] if isinstance(right, dict) else []
    for key in keys:
        wrong: Any
        for wrong in (None, [], "x", {"x": [None]}):
            yield f"JSON whose {key!r} is {json.dumps(wrong)}", json.dumps({**right, key: wrong})
        yield f"JSON without {key!r}", json.dumps({name: value for name, value in right.items() if name != key})


ARGUMENTS: Mapping[str, Mapping[type, Any]] = {
    "numbers of 900 digits": {int: 10**900, float: 1e308, str: "9" * 900, list: [], dict: {}},
    "numbers below zero": {int: -1, float: -1e308, str: "-1", list: [None], dict: {"x": None}},
    "texts with NUL": {str: "../a\0b"},
    "empty texts": {int: 0, float: 0.0, str: "", list: [""], dict: {"": ""}},
}
"""Replacements for a call's arguments, by type; arguments of other types stay unchanged."""


def hostile_calls(calls: Iterable[ToolCall]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield hostile variants of each tool's first correct call: description, name and arguments."""
    seen: set[str] = set()
    for call in calls:
        name, given = call["function"]["name"], call["function"]["arguments"]
        if name in seen or not isinstance(given, Mapping):
            continue
        seen.add(name)
        for what, kinds in ARGUMENTS.items():
            yield what, name, {key: kinds.get(type(value), value) for key, value in given.items()}


@dataclass(slots=True)
class Hostile:
    """The hostile content that an env gets in one rollout, and the errors that its own code raised."""

    text: str | None = None
    """The text that replaces everything that the model says; None changes nothing."""
    answers: Sequence[tuple[str, str | None]] = ()
    """Answers with which the env is scored again, each after its description; None stands for a missing answer."""
    sandbox: bool = False
    """Whether the env is scored again for each hostile content of its sandbox."""
    raised: list[tuple[str, BaseException]] = field(default_factory=list)
    """The descriptions of contents for which the env raised an error, each with that error."""

    def said(self, message: Message) -> Message:
        """Return a message with the hostile text in it."""
        if self.text is None:
            return message
        changed = copy.copy(message)
        changed["content"] = self.text
        return changed


Score = Callable[[], Awaitable[dict[str, float]]]


async def score_of_each(hostile: Hostile, env: Any, score: Score) -> dict[str, float]:
    """Return the env's real score, and try the scoring with hostile content.

    The env is scored again for each of `hostile.answers` and, if `hostile.sandbox`, for each hostile content of its
    sandbox. Errors are recorded in `hostile.raised`.

    Args:
        hostile: The hostile content, and the record of errors.
        env: The env.
        score: Computes the env's score.
    """
    real, metrics = env._sandbox, dict(env.metrics)
    shown = SpoiledSandbox(real) if hostile.sandbox and real is not None else None
    env._sandbox = real if shown is None else shown
    try:
        first = await score()
        for what, content in [] if shown is None else shown.contents():
            assert shown is not None
            shown.spoil(content)
            await _scored(hostile, f"a sandbox that holds {what}", score)
    finally:
        env._sandbox = real
    given = getattr(env, "answer", None)
    for what, env.answer in hostile.answers:
        await _scored(hostile, what, score)
    if hostile.answers:
        env.answer = given
    env.metrics = metrics
    return first


async def _scored(hostile: Hostile, what: str, score: Score) -> None:
    """Score once more, and record an error unless it comes from an engine, a sandbox or the machine.

    Args:
        hostile: The record to which an error is added.
        what: A description of the hostile content, for that record.
        score: Computes the score. A score that isn't finite also counts as an error.
    """
    try:
        wrong = {name: value for name, value in (await score()).items() if not math.isfinite(value)}
        if wrong:
            raise EnvError(f"its score is {wrong}, which is not finite")
    except (SandboxError, EngineError, MachineError):
        pass
    except Exception as error:
        hostile.raised.append((what, error))


class SpoiledSandbox:
    """A sandbox that behaves like the real one until `spoil`, then as if all its files and outputs were hostile."""

    def __init__(self, real: Sandbox) -> None:
        self.real = real
        self.content: bytes | SandboxContentError | None = None
        """The content of every file; None for the real one."""
        self.seen: list[bytes] = []
        """The content of the files that were read, and the output of programs."""
        self.is_asked = False
        self.verdicts: list[Verdict] = []
        self.asked_verdicts = 0

    def spoil(self, content: bytes | SandboxContentError) -> None:
        """From this call on, return this content from all files and all programs."""
        self.content, self.asked_verdicts = content, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def contents(self) -> Iterator[tuple[str, bytes | SandboxContentError]]:
        """Yield hostile contents of the sandbox, each after its description; nothing if no reward reads the sandbox."""
        if not self.is_asked:
            return
        yield "a file that is missing", of_number(errno.ENOENT, "it")
        yield "a folder in place of a file", NotAFile("it is a folder")
        yield from ((what, text.encode()) for what, text in TEXTS.items())
        yield from NO_TEXT.items()
        for right in self.seen[:1]:
            with suppress(UnicodeDecodeError):
                yield from ((what, text.encode()) for what, text in wrong_types(right.decode()))

    def _spoiled(self, limit: int = 1 << 62) -> bytes:
        assert self.content is not None
        if isinstance(self.content, SandboxContentError):
            raise self.content.with_traceback(None)
        if len(self.content) > limit:
            raise WrongContent(f"{len(self.content)} bytes, but the limit is {limit}")
        return self.content

    async def read(self, path: str, *, limit: int = 1 << 20, timeout_s: float = 30.0) -> bytes:
        """Return the hostile content."""
        self.is_asked = True
        if self.content is not None:
            return self._spoiled(limit)
        self.seen.append(await self.real.read(path, limit=limit, timeout_s=timeout_s))
        return self.seen[-1]

    read_text = Sandbox.read_text

    async def list(self, path: str = ".", *, timeout_s: float = 30.0) -> list[str]:
        """Return unexpected names."""
        self.is_asked = True
        if self.content is None:
            return await self.real.list(path, timeout_s=timeout_s)
        return ["a\nb", "a\udcffb", f"{'n' * 254}/"] if self._spoiled() else []

    async def get(self, source: str, target: str | Path, *, limit: int = 64 * MB, **settings: Any) -> Any:
        """Write the hostile content to the target. If it is a folder in place of a file, create a folder there."""
        self.is_asked = True
        if self.content is None:
            return await self.real.get(source, target, limit=limit, **settings)
        if isinstance(self.content, NotAFile):
            await asyncio.to_thread(Path(target).mkdir, parents=True, exist_ok=True)
            return ["link"]
        data = self._spoiled(limit)
        await asyncio.to_thread(_write, Path(target), data)
        return []

    async def archive(self, path: str = ".", target: str | Path | None = None, **settings: Any) -> bytes:
        """Return the real archive, or raise WrongContent once the sandbox is spoiled.

        A hostile archive isn't tried: its files would be the same as those that `get` writes, and how to read an
        archive is up to the caller.
        """
        self.is_asked = True
        if self.content is None:
            return await self.real.archive(path, target, **settings)
        raise WrongContent("the archive is over its limit")

    async def exec(self, *args: Any, **settings: Any) -> ExecResult:
        """Return a result with the hostile text as its output."""
        return await self._ran(self.real.exec, *args, **settings)

    async def python(self, *args: Any, **settings: Any) -> ExecResult:
        """Return a result with the hostile text as its output."""
        return await self._ran(self.real.python, *args, **settings)

    async def _ran(self, run: Callable[..., Awaitable[ExecResult]], *args: Any, **settings: Any) -> ExecResult:
        self.is_asked = True
        if self.content is None:
            result = await run(*args, **settings)
            self.seen.append(result.stdout_bytes)
            return result
        if isinstance(self.content, SandboxContentError):
            return ExecResult(status="timeout", exit_code=-9, stdout="", stderr="", state_lost=True)
        text = self.content[: 64 << 10].decode("utf-8", "replace")
        return ExecResult(status="ok", exit_code=0, stdout=text, stderr="")

    async def verify(self, **settings: Any) -> Verdict:
        """Return the real verdict, because the host makes it and nothing in it is hostile.

        A spoiled sandbox returns the earlier verdicts again, in their order, so that each is computed only once.
        """
        if self.content is None or self.asked_verdicts >= len(self.verdicts):
            self.verdicts.append(await self.real.verify(**settings))
            return self.verdicts[-1]
        self.asked_verdicts += 1
        return self.verdicts[self.asked_verdicts - 1]


def _write(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
