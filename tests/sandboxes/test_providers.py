"""The sandbox contract: our sandboxes fulfill it, and a provider that breaks it is told where."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agentgym.sandboxes.local.local import Process
from agentgym.sandboxes.protocol import ExecResult, Sandbox, SandboxPool, SandboxSpec, Verdict
from agentgym.testing import check_sandbox
from agentgym.testing.sandbox_checks.check import CHECKS, POOL
from tests.sandboxes.conftest import make

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_each_of_our_sandboxes_fulfills_the_contract(spec: SandboxSpec) -> None:
    await check_sandbox(spec)


async def test_sandboxes_with_a_network_fulfill_the_contract() -> None:
    await check_sandbox(make("bubblewrap", network="loopback"))


@pytest.mark.slow
@pytest.mark.docker
async def test_sandboxes_under_gvisor_fulfill_the_contract() -> None:
    await check_sandbox(make("runsc"))


class Nothing:
    """A sandbox whose calls all do nothing."""

    digest = "nothing"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return DOES_NOTHING[name]


async def nothing(*_: object, **__: object) -> None:
    return None


@asynccontextmanager
async def no_block(*_: object, **__: object) -> AsyncIterator[None]:
    yield


def no_answer(*_: object, **__: object) -> None:
    return None


DOES_NOTHING: dict[str, Callable[..., Any]] = {
    name: nothing for name in vars(Sandbox) if not name.startswith("_") and name != "digest"
} | {"start": no_block, "shell": no_block, "port": no_block, "requests": no_answer, "service": no_answer}


@dataclass
class Provider:
    """A pool that ignores leases, its size and its end."""

    sandbox: Any

    @asynccontextmanager
    async def open(self, size: int) -> AsyncIterator["Provider"]:
        yield self

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Any]:
        yield self.sandbox


async def test_a_provider_that_does_nothing_fails_every_check_of_sandbox_and_pool() -> None:
    with pytest.raises(AssertionError, match="Provider fails check_sandbox") as raised:
        await check_sandbox(Provider(Nothing()))
    lines = str(raised.value).splitlines()[1:]
    assert [line.partition(":")[0] for line in lines] == [name for name in [*CHECKS, *POOL] if name != "digest"]


async def test_a_hanging_provider_is_named_and_the_next_check_starts() -> None:
    class Hangs(Nothing):
        async def exec(self, command: object, **_: object) -> None:
            await asyncio.Event().wait()

    with pytest.raises(AssertionError, match=r"exec: did not end within 0\.2 s") as raised:
        await check_sandbox(Provider(Hangs()), timeout_s=0.2)
    assert "\nshell: " in str(raised.value)


async def test_there_is_a_check_for_every_method_of_a_sandbox() -> None:
    assert set(CHECKS) >= {*DOES_NOTHING, "digest"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with Process(unsafe=True).open(1) as opened:
        yield opened


@pytest.mark.parametrize("name", DOES_NOTHING)
async def test_one_method_that_does_nothing_is_found_by_its_check(pool: SandboxPool, name: str) -> None:
    async with pool.lease() as sandbox:
        setattr(sandbox, name, DOES_NOTHING[name])
        with pytest.raises((AssertionError, TypeError, AttributeError, OSError)):
            await CHECKS[name](sandbox)


Call = Callable[..., Any]


def always_ok(_: Call) -> Call:
    async def exec_(command: object, **__: object) -> ExecResult:
        return ExecResult(status="ok", exit_code=0, stdout="", stderr="")

    return exec_


def without(setting: str) -> Callable[[Call], Call]:
    """Return a wrapper that drops this setting from each call."""

    def spoil(call: Call) -> Call:
        return lambda *args, **settings: call(*args, **{k: v for k, v in settings.items() if k != setting})

    return spoil


def all_pass(_: Call) -> Call:
    async def verify(**given: object) -> Verdict:
        ran = ExecResult(status="ok", exit_code=0, stdout="", stderr="")
        return Verdict(cases={"test_two": None, "test_none": None}, output="", result=ran)

    return verify


def reversed_names(call: Call) -> Call:
    async def list_(path: str = ".", **_: object) -> list[str]:
        return [*reversed(await call(path))]

    return list_


def missing_is_empty(call: Call) -> Call:
    async def read(path: str, **settings: Any) -> bytes:
        try:
            return bytes(await call(path, **settings))
        except FileNotFoundError:
            return b""

    return read


def plain_errors(call: Call) -> Call:
    async def read(path: str, **settings: Any) -> bytes:
        try:
            return bytes(await call(path, **settings))
        except FileNotFoundError as error:
            raise FileNotFoundError(path) from error

    return read


def lossy(call: Call) -> Call:
    async def exec_(command: object, **settings: Any) -> ExecResult:
        done = await call(command, **settings)
        return ExecResult(status=done.status, exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr)

    return exec_


def invented_status(call: Call) -> Call:
    async def exec_(command: object, **settings: Any) -> ExecResult:
        done = await call(command, **settings)
        return ExecResult(status="failed", exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr)  # type: ignore[arg-type]

    return exec_


def keeps_nothing_out(call: Call) -> Call:
    async def get(source: str, target: Path, **settings: Any) -> list[str]:
        await call(source, target, **settings)
        return []

    return get


def shares(call: Call) -> Call:
    async def fork(**_: object) -> Any:
        sandbox = call.__self__  # type: ignore[attr-defined]
        return await sandbox_that_is_its_own_branch(sandbox)

    return fork


def blanks_branches(call: Call) -> Call:
    async def fork(**settings: Any) -> Any:
        branch = await call(**settings)
        await branch.write({"large": bytes(1 << 20)})
        return branch

    return fork


async def sandbox_that_is_its_own_branch(sandbox: Any) -> Any:
    class Same:
        def __getattr__(self, name: str) -> Any:
            return getattr(sandbox, name)

        async def __aenter__(self) -> Any:
            return sandbox

        async def __aexit__(self, *_: object) -> None:
            return None

    return Same()


def always_open(_: Call) -> Call:
    return lambda *args, **settings: no_block()


def empties_first(call: Call) -> Call:
    async def restore(path: Path, **settings: Any) -> None:
        await call.__self__.exec("rm -rf *")  # type: ignore[attr-defined]
        await call(path, **settings)

    return restore


SPOILED: dict[str, tuple[str, str, Callable[[Call], Call], str]] = {
    "every command succeeds": ("exec", "exec", always_ok, "a command that fails: status: expected 'error', got 'ok'"),
    "the folder is ignored": ("exec", "exec", without("cwd"), "cwd, env and stdin: stdout: "),
    "the variables are ignored": ("exec", "exec", without("env"), "cwd, env and stdin: stdout: "),
    "the input is ignored": ("exec", "exec", without("stdin"), "cwd, env and stdin: stdout: "),
    "bytes are lost": ("exec", "exec", lossy, "the bytes of stdout: "),
    "a status is invented": (
        "exec",
        "exec",
        invented_status,
        "expected a status of agentgym.sandboxes.protocol.Status, got 'f",
    ),
    "output has no limit": ("output limits", "exec", without("output_limit"), "cut output is within its limit"),
    "fresh is ignored": ("python", "python", without("fresh"), "a fresh cell: expected 'False\\n', got 'True\\n'"),
    "functions are ignored": ("functions", "python", without("functions"), "a host function: expected '41\\n'"),
    "every test passes": ("verify", "verify", all_pass, "the case that failed has a reason: expected this to be true"),
    "names are not sorted": (
        "list",
        "list",
        reversed_names,
        "list: expected ['a', 'b/', 'c'], got ['c', 'b/', 'a']",
    ),
    "a missing file is empty": ("read", "read", missing_is_empty, "read of a missing file: expected FileNotFoundError"),
    "a file has no limit": ("read", "read", without("limit"), "read over the limit: expected ValueError"),
    "content errors have another type": (
        "read",
        "read",
        plain_errors,
        "a missing file: expected a SandboxContentError, got",
    ),
    "get has no limit": ("get", "get", without("limit"), "get over the limit: expected ValueError, got the result"),
    "omitted files are not reported": (
        "get",
        "get",
        keeps_nothing_out,
        "the links that get leaves out: expected ['link'], got []",
    ),
    "an archive has no limit": ("archive", "archive", without("limit"), "archive over the limit: expected ValueError"),
    "a snapshot has no limit": ("snapshot", "snapshot", without("limit"), "snapshot over the limit: expected ValueErr"),
    "an invalid snapshot empties the folder": (
        "restore",
        "restore",
        empties_first,
        "the files after it: expected ['f', 'g', 'there/']",
    ),
    "a branch is the sandbox itself": (
        "fork",
        "fork",
        shares,
        "the parent's file after a change in a branch: expected b'before', got b'br",
    ),
    "a branch has zeros": ("fork", "fork", blanks_branches, "a large earlier file in a branch: expected b'\\x00\\x01"),
    "any port is forwarded": ("port", "port", always_open, "expected a LocalAddress, got None"),
}


@pytest.mark.parametrize("what", SPOILED)
async def test_a_broken_promise_is_named(pool: SandboxPool, what: str) -> None:
    check, name, spoil, said = SPOILED[what]
    async with pool.lease() as sandbox:
        setattr(sandbox, name, spoil(getattr(sandbox, name)))
        with pytest.raises(AssertionError) as raised:
            await CHECKS[check](sandbox)
        assert said in str(raised.value), str(raised.value)


@dataclass
class Careless:
    """Pool of plain-process sandboxes that gives one sandbox to two leases and keeps sandboxes after their lease."""

    @asynccontextmanager
    async def open(self, size: int) -> AsyncIterator[SandboxPool]:
        async with Process(unsafe=True).open(max(size, 1)) as opened, opened.lease() as sandbox:
            yield Provider(sandbox)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("open", r"open\(0\): expected ValueError, got the result None"),
        ("lease", r"the files of the next lease: expected \[\], got \['left'\]"),
        ("close", "a call of a sandbox after its lease: expected ClosedError, got the result ExecResult"),
    ],
)
async def test_a_careless_pool_is_named(name: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        await POOL[name](Careless())
