"""Arguments that make no sense: each is named by a ValueError, before anything reaches the box."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from agentgym.sandboxes.fake.box import FakeBox
from agentgym.sandboxes.local.local import Process
from agentgym.sandboxes.protocol import Boxes

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[Boxes]:
    async with Process(unsafe=True).open(1) as opened:
        yield opened


async def enter(block: Any) -> None:
    async with block:
        pass


async def of_a_program(box: Any, call: str, *arguments: object, **named: object) -> None:
    async with box.start("cat") as process:
        await getattr(process, call)(*arguments, **named)


async def of_a_stream(box: Any, *arguments: object, **named: object) -> None:
    async with box.start("cat") as process:
        await process.stdout.read(*arguments, **named)


WRONG: dict[str, tuple[str, Callable[[Any], Awaitable[object]]]] = {
    "a command that is a number": ("command: must be text, or a list", lambda box: box.exec(3)),
    "no command": ("command: must be text, or a list", lambda box: box.exec(None)),
    "an empty command": ("command: must be text, or a list", lambda box: box.exec([])),
    "a command of bytes": ("command: must be text, or a list", lambda box: box.exec(b"ls")),
    "a program that is a number": ("command: must be text, or a list", lambda box: enter(box.start(3))),
    "a folder that is a number": ("cwd: must be text, got 3", lambda box: box.exec("true", cwd=3)),
    "variables in a list": ("env: must be a mapping", lambda box: box.exec("true", env=["a"])),
    "a variable that is a number": (r"env\['a'\]: must be text", lambda box: box.exec("true", env={"a": 3})),
    "an input that is a number": ("stdin: must be text or bytes", lambda box: box.exec("true", stdin=3)),
    "a time limit in words": ("timeout_s: must be a number of seconds", lambda box: box.exec("true", timeout_s="3")),
    "no time limit": ("timeout_s: must be a number of seconds", lambda box: box.read("f", timeout_s=None)),
    "a limit that is no number": ("output_limit: must be a whole", lambda box: box.exec("true", output_limit=1.5)),
    "code that is a number": ("code: must be text", lambda box: box.python(3)),
    "functions in a list": ("functions: must be a mapping", lambda box: box.python("1", functions=[print])),
    "a function that is text": (
        r"functions\['f'\]: must be a function",
        lambda box: box.python("1", functions={"f": "x"}),
    ),
    "one file without a name": ("files: must be a mapping", lambda box: box.write("x")),
    "a content that is a number": (r"files\['a'\]: must be text or bytes", lambda box: box.write({"a": 3})),
    "no content": (r"files\['a'\]: must be text or bytes", lambda box: box.write({"a": None})),
    "a path that is a number": ("files: a path: must be text, got 3", lambda box: box.write({3: "x"})),
    "a path to read that is a number": ("path: must be text, got 3", lambda box: box.read(3)),
    "a path to list that is a number": ("path: must be text, got 3", lambda box: box.list(3)),
    "a limit of nan bytes": ("limit: must be a whole number", lambda box: box.read("f", limit=float("nan"))),
    "a limit in words": ("limit: must be a whole number", lambda box: box.get("f", "f", limit="3")),
    "a negative limit": ("limit: must be a whole number", lambda box: box.archive(limit=-1)),
    "a source that is a number": ("source: must be a path of this machine", lambda box: box.put(3)),
    "a target that is a number": ("target: must be a path of this machine", lambda box: box.get("f", 3)),
    "a snapshot at a number": ("path: must be a path of this machine", lambda box: box.snapshot(3)),
    "a snapshot from a number": ("path: must be a path of this machine", lambda box: box.restore(3)),
    "an archive that is a number": ("archive: must be text or bytes", lambda box: box.unpack(3)),
    "hidden files in a list": ("files: .* give a mapping", lambda box: box.verify(command="true", files=["x"])),
    "hidden tests that are a number": ("code: must be text", lambda box: box.verify(code=3)),
    "a time limit of over a week": (
        "timeout_s: .* of at most 604800, got 604801",
        lambda box: box.exec("true", timeout_s=604_801),
    ),
    "a time limit that no float holds": ("timeout_s: .* of at most", lambda box: box.python("1", timeout_s=10**400)),
    "a time limit that cannot be shown": (
        "timeout_s: .* too long to be",
        lambda box: box.read("f", timeout_s=10**5000),
    ),
    "a verdict after a week": ("timeout_s: .* at most 604798", lambda box: box.verify(command="a", timeout_s=604_799)),
    "a start before it": ("timeout_s: ", lambda box: enter(box.start("true", timeout_s=-1))),
    "a shell that ends before it": ("timeout_s: ", lambda box: enter(box.shell(timeout_s=-100))),
    "a shell without a limit": ("timeout_s: ", lambda box: enter(box.shell(timeout_s=None))),
    "fresh as bytes": ("fresh: must be True or False", lambda box: box.python("1", fresh=b"x")),
    "a progress that is a number": ("progress: must be a function", lambda box: box.put(__file__, progress=1)),
    "a progress in words": ("progress: must be a function", lambda box: box.get("f", "f", progress="x")),
    "an archive in a folder": ("archive: '.' is a folder", lambda box: box.unpack("")),
    "an input that is nothing": ("data: must be text or bytes", lambda box: of_a_program(box, "write", None)),
    "a wait in words": ("timeout_s: must be", lambda box: of_a_program(box, "wait", timeout_s="x")),
    "a read of nothing": ("size: must be a whole number", lambda box: of_a_stream(box, None)),
    "a read for ever": ("timeout_s: must be", lambda box: of_a_stream(box, 1, timeout_s=float("inf"))),
    "a port in words": ("port: ", lambda box: enter(box.port("8000"))),
}


@pytest.mark.parametrize("what", WRONG)
async def test_an_argument_that_makes_no_sense_is_named_and_costs_no_box(pool: Boxes, what: str) -> None:
    said, call = WRONG[what]
    fake = FakeBox(shell=lambda _: "")
    async with pool.lease() as box:
        for each in (box, fake):
            with pytest.raises(ValueError, match=said):
                await call(each)
            await each.write({"f": "x"})
            assert await each.read("f") == b"x"


@pytest.mark.parametrize("path", ["../f", "a/../../f", "/etc/f"])
async def test_a_path_that_leads_out_is_refused_by_a_fake_box_too(path: str) -> None:
    box = FakeBox()
    for call in (box.write({path: "x"}), box.read(path), box.list(path)):
        with pytest.raises(ValueError, match="is outside of the working folder"):
            await call
