"""Invalid arguments: each raises a ValueError that names it before anything reaches the sandbox."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from agentgym.sandboxes.fake.sandbox import FakeSandbox
from agentgym.sandboxes.local.local import Process
from agentgym.sandboxes.protocol import SandboxPool

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with Process(unsafe=True).open(1) as opened:
        yield opened


class OfBytes:
    """A path of bytes, which Python's own functions accept."""

    def __fspath__(self) -> bytes:
        return b"got"


async def enter(block: Any) -> None:
    async with block:
        pass


async def of_a_program(sandbox: Any, call: str, *arguments: object, **named: object) -> None:
    async with sandbox.start("cat") as process:
        await getattr(process, call)(*arguments, **named)


async def of_a_stream(sandbox: Any, *arguments: object, **named: object) -> None:
    async with sandbox.start("cat") as process:
        await process.stdout.read(*arguments, **named)


WRONG: dict[str, tuple[str, Callable[[Any], Awaitable[object]]]] = {
    "a command that is a number": ("command: must be text, or a list", lambda sandbox: sandbox.exec(3)),
    "no command": ("command: must be text, or a list", lambda sandbox: sandbox.exec(None)),
    "an empty command": ("command: must be text, or a list", lambda sandbox: sandbox.exec([])),
    "a command of bytes": ("command: must be text, or a list", lambda sandbox: sandbox.exec(b"ls")),
    "a program that is a number": ("command: must be text, or a list", lambda sandbox: enter(sandbox.start(3))),
    "a folder that is a number": ("cwd: must be text, got 3", lambda sandbox: sandbox.exec("true", cwd=3)),
    "variables in a list": ("env: must be a mapping", lambda sandbox: sandbox.exec("true", env=["a"])),
    "a variable that is a number": (r"env\['a'\]: must be text", lambda sandbox: sandbox.exec("true", env={"a": 3})),
    "an input that is a number": ("stdin: must be text or bytes", lambda sandbox: sandbox.exec("true", stdin=3)),
    "a time limit that is a string": (
        "timeout_s: must be a number of seconds",
        lambda sandbox: sandbox.exec("true", timeout_s="3"),
    ),
    "no time limit": ("timeout_s: must be a number of seconds", lambda sandbox: sandbox.read("f", timeout_s=None)),
    "a limit that is not a number": (
        "output_limit: must be a whole",
        lambda sandbox: sandbox.exec("true", output_limit=1.5),
    ),
    "code that is a number": ("code: must be text", lambda sandbox: sandbox.python(3)),
    "functions in a list": ("functions: must be a mapping", lambda sandbox: sandbox.python("1", functions=[print])),
    "a function that is text": (
        r"functions\['f'\]: must be a function",
        lambda sandbox: sandbox.python("1", functions={"f": "x"}),
    ),
    "one file without a name": ("files: must be a mapping", lambda sandbox: sandbox.write("x")),
    "a content that is a number": (r"files\['a'\]: must be text or bytes", lambda sandbox: sandbox.write({"a": 3})),
    "no content": (r"files\['a'\]: must be text or bytes", lambda sandbox: sandbox.write({"a": None})),
    "a path that is a number": ("files: a path: must be text, got 3", lambda sandbox: sandbox.write({3: "x"})),
    "a path to read that is a number": ("path: must be text, got 3", lambda sandbox: sandbox.read(3)),
    "a path to list that is a number": ("path: must be text, got 3", lambda sandbox: sandbox.list(3)),
    "a limit of NaN bytes": ("limit: must be a whole number", lambda sandbox: sandbox.read("f", limit=float("nan"))),
    "a limit that is a string": ("limit: must be a whole number", lambda sandbox: sandbox.get("f", "f", limit="3")),
    "a negative limit": ("limit: must be a whole number", lambda sandbox: sandbox.archive(limit=-1)),
    "a source that is a number": ("source: must be a path on this machine", lambda sandbox: sandbox.put(3)),
    "a target that is a number": ("target: must be a path on this machine", lambda sandbox: sandbox.get("f", 3)),
    "a target that is a path of bytes": (
        "target: must be a path on this machine, as text, got b'got'",
        lambda sandbox: sandbox.get("f", OfBytes()),
    ),
    "a snapshot at a number": ("path: must be a path on this machine", lambda sandbox: sandbox.snapshot(3)),
    "a snapshot from a number": ("path: must be a path on this machine", lambda sandbox: sandbox.restore(3)),
    "an archive that is a number": ("archive: must be text or bytes", lambda sandbox: sandbox.unpack(3)),
    "hidden files in a list": (
        "files: expected a mapping",
        lambda sandbox: sandbox.verify(command="true", files=["x"]),
    ),
    "hidden tests that are a number": ("code: must be text", lambda sandbox: sandbox.verify(code=3)),
    "a time limit over a week": (
        "timeout_s: .* at most 604800, got 604801",
        lambda sandbox: sandbox.exec("true", timeout_s=604_801),
    ),
    "a time limit too large for a float": (
        "timeout_s: .* at most",
        lambda sandbox: sandbox.python("1", timeout_s=10**400),
    ),
    "a time limit that cannot be printed": (
        "timeout_s: .* too long to print",
        lambda sandbox: sandbox.read("f", timeout_s=10**5000),
    ),
    "a verdict after a week": (
        "timeout_s: .* at most 604798",
        lambda sandbox: sandbox.verify(command="a", timeout_s=604_799),
    ),
    "a start with a negative time limit": ("timeout_s: ", lambda sandbox: enter(sandbox.start("true", timeout_s=-1))),
    "a shell with a negative time limit": ("timeout_s: ", lambda sandbox: enter(sandbox.shell(timeout_s=-100))),
    "a shell without a limit": ("timeout_s: ", lambda sandbox: enter(sandbox.shell(timeout_s=None))),
    "fresh as bytes": ("fresh: must be True or False", lambda sandbox: sandbox.python("1", fresh=b"x")),
    "a progress callback that is a number": (
        "progress: must be a function",
        lambda sandbox: sandbox.put(__file__, progress=1),
    ),
    "a progress callback that is a string": (
        "progress: must be a function",
        lambda sandbox: sandbox.get("f", "f", progress="x"),
    ),
    "an archive in a folder": ("archive: '.' is a folder", lambda sandbox: sandbox.unpack("")),
    "an input that is None": ("data: must be text or bytes", lambda sandbox: of_a_program(sandbox, "write", None)),
    "a wait that is a string": ("timeout_s: must be", lambda sandbox: of_a_program(sandbox, "wait", timeout_s="x")),
    "a read of nothing": ("size: must be a whole number", lambda sandbox: of_a_stream(sandbox, None)),
    "an endless read": ("timeout_s: must be", lambda sandbox: of_a_stream(sandbox, 1, timeout_s=float("inf"))),
    "a port that is a string": ("port: ", lambda sandbox: enter(sandbox.port("8000"))),
}


@pytest.mark.parametrize("what", WRONG)
async def test_an_invalid_argument_is_named_and_costs_no_sandbox(pool: SandboxPool, what: str) -> None:
    said, call = WRONG[what]
    fake = FakeSandbox(shell=lambda _: "")
    async with pool.lease() as sandbox:
        for each in (sandbox, fake):
            with pytest.raises(ValueError, match=said):
                await call(each)
            await each.write({"f": "x"})
            assert await each.read("f") == b"x"


@pytest.mark.parametrize("path", ["../f", "a/../../f", "/etc/f"])
async def test_a_path_outside_the_working_folder_is_refused_by_a_fake_sandbox_too(path: str) -> None:
    sandbox = FakeSandbox()
    for call in (sandbox.write({path: "x"}), sandbox.read(path), sandbox.list(path)):
        with pytest.raises(ValueError, match="is outside the working folder"):
            await call
