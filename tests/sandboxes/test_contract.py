"""The contract of `types.Sandbox`, which every kind of sandbox fulfills."""

import asyncio
import errno
from pathlib import Path

import pytest

from agentgym.errors import EngineError, SandboxError, ToolError
from agentgym.sandboxes.protocol import Sandbox, SandboxPool, SandboxSpec
from agentgym.sandboxes.protocol.content import UnusablePath
from tests.sandboxes.conftest import cut_after, one_more_minute

pytestmark = pytest.mark.asyncio(loop_scope="module")


def still_running(mark: str) -> str:
    """Return code that lists the processes with that word in their command; other processes may end while it looks."""
    return f"""
import os
def command(pid):
    try:
        return open(f'/proc/{{pid}}/cmdline', 'rb').read().split(b'\\0')
    except OSError:
        return []
[pid for pid in os.listdir('/proc') if pid.isdigit() and b'{mark}' in command(pid)]
"""


async def test_names_persist_and_the_last_expression_is_printed_by_repr(sandbox: Sandbox) -> None:
    assert (await sandbox.python("x = 'a'\nprint(x)")).stdout == "a\n"
    result = await sandbox.python("x * 2")
    assert result.stdout == "'aa'\n"
    assert result.ok
    assert not result.state_lost


async def test_an_exception_is_a_result_whose_traceback_shows_only_the_cell(sandbox: Sandbox) -> None:
    result = await sandbox.python("x = 5\n1 / 0")
    assert (await sandbox.python("x")).stdout == "5\n"
    assert (result.status, result.exit_code) == ("error", 1)
    assert "ZeroDivisionError" in result.stderr
    assert "server" not in result.stderr


async def test_syntax_errors_and_exits_are_results(sandbox: Sandbox) -> None:
    assert "SyntaxError" in (await sandbox.python("def")).stderr
    assert (await sandbox.python("raise SystemExit(3)")).exit_code == 3
    assert (await sandbox.python("import sys; sys.exit()")).ok
    assert (await sandbox.python("")).ok


async def test_a_shell_command_has_its_exit_code_and_both_streams(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo out; echo err >&2; exit 7")
    assert (await sandbox.exec("true")).ok
    assert (await sandbox.exec("kill -9 $$")).status == "killed"
    assert (result.status, result.exit_code, result.stdout, result.stderr) == ("error", 7, "out\n", "err\n")


async def test_a_command_that_cannot_start_is_a_result(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("a\0b")).exit_code == 126
    assert (await sandbox.exec("#" * 200_000)).exit_code == 126
    with pytest.raises(ValueError, match="command"):
        await sandbox.exec("#" * 2_000_000)


async def test_a_cell_at_its_limit_is_interrupted_and_keeps_its_state(sandbox: Sandbox) -> None:
    code = "import time\nx = 1\nprint('partial')\ntime.sleep(60)"
    result = await cut_after("partial", lambda: sandbox.python(code, timeout_s=1.0))
    assert (await sandbox.python("x")).stdout == "1\n"
    assert result.status == "timeout"
    assert not result.state_lost
    assert result.stdout == "partial\n"


async def test_a_command_at_its_limit_is_killed_with_all_it_started(sandbox: Sandbox) -> None:
    await sandbox.python("x = 1")
    mark = one_more_minute()
    command = f"echo partial; (setsid sleep {mark} &); sleep {mark}"
    result = await cut_after("partial", lambda: sandbox.exec(command, timeout_s=1.0))
    left = await sandbox.python(still_running(mark))
    assert (await sandbox.python("x")).stdout == "1\n"
    assert result.status == "timeout"
    assert result.stdout == "partial\n"
    assert left.stdout == "[]\n"


async def test_processes_that_a_command_leaves_end_with_it_and_the_session_continues(sandbox: Sandbox) -> None:
    await sandbox.python("import subprocess\np = subprocess.Popen(['sleep', '60'])")
    mark = one_more_minute()
    assert (await sandbox.exec(f"setsid sleep {mark} >/dev/null 2>&1 & sleep {mark} & echo started")).ok
    left = await sandbox.python(still_running(mark))
    assert left.stdout == "[]\n"
    assert (await sandbox.python("p.poll()")).stdout == ""


async def test_long_output_keeps_its_head_and_tail_and_reports_the_cut(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo first; head -c 1000000 /dev/zero | tr '\\0' x; echo; echo last")
    python = await sandbox.python("print('first', 'y' * 300000, 'last')")
    for got in (result, python):
        assert got.ok
        assert got.truncated
        assert got.stdout.startswith("first")
        assert got.stdout.endswith("last\n")
        assert "bytes cut" in got.stdout
        assert len(got.stdout) < 70_000


async def test_output_that_just_fits_is_whole(sandbox: Sandbox) -> None:
    text = "".join(chr(97 + i % 26) for i in range(65_536))
    for size in (32_767, 32_768, 32_769, 65_536):
        await sandbox.write({"text": text[:size]})
        result = await sandbox.exec("cat text")
        assert result.stdout == text[:size]
        assert not result.truncated


async def test_output_between_two_calls_belongs_to_neither(sandbox: Sandbox) -> None:
    code = "import threading\ngo = threading.Event()\n"
    code += "t = threading.Thread(target=lambda: (go.wait(), print('late', flush=True)))\nt.start()"
    assert (await sandbox.python(code)).ok
    assert (await sandbox.python("go.set(); t.join()")).stdout == "late\n"
    assert (await sandbox.python("1")).stdout == "1\n"


async def test_files_are_written_and_read_whole(sandbox: Sandbox) -> None:
    big = bytes(range(256)) * 8192
    await sandbox.write({"a/b/c.txt": "héllo", "big": big, "empty": ""})
    assert await sandbox.read("a/b/c.txt") == "héllo".encode()
    assert await sandbox.read("./big", limit=len(big)) == big
    assert await sandbox.read("empty") == b""
    assert await sandbox.list() == ["a/", "big", "empty"]
    assert await sandbox.list("a") == ["b/"]
    assert (await sandbox.python("open('a/b/c.txt').read()")).stdout == "'héllo'\n"
    assert (await sandbox.exec("pwd; cat a/b/c.txt")).stdout.endswith("héllo")
    await sandbox.write({f"many/{i}": str(i) for i in range(450)})
    assert len(await sandbox.list("many")) == 450


async def test_file_errors_are_pythons_own(sandbox: Sandbox) -> None:
    await sandbox.write({"f": "12345"})
    with pytest.raises(FileNotFoundError):
        await sandbox.read("none")
    with pytest.raises(FileNotFoundError):
        await sandbox.list("none")
    with pytest.raises(ValueError, match="5 bytes, but the limit is 4"):
        await sandbox.read("f", limit=4)
    with pytest.raises(NotADirectoryError):
        await sandbox.write({"f/g": ""})
    with pytest.raises(UnusablePath, match="too long") as caught:
        await sandbox.write({"n" * 300: ""})
    assert caught.value.errno == errno.ENAMETOOLONG
    assert await sandbox.read("f") == b"12345"


async def test_modules_in_the_working_folder_can_be_imported(sandbox: Sandbox) -> None:
    await sandbox.write({"solution.py": "answer = 42"})
    assert (await sandbox.python("import solution; solution.answer")).stdout == "42\n"
    assert (await sandbox.python("import solution; solution.answer", fresh=True)).stdout == "42\n"


async def test_fresh_code_sees_nothing_of_the_session_which_continues(sandbox: Sandbox) -> None:
    await sandbox.write({"json.py": "raise SystemExit('shadowed')"})
    await sandbox.python("import builtins\nx = 1\nbuiltins.sum = None\nimport threading, time")
    assert "NameError" in (await sandbox.python("x", fresh=True)).stderr
    result = await sandbox.python("import json\nsum([1, 2])", fresh=True)
    assert result.ok
    assert result.stdout == "3\n"
    assert not result.state_lost
    assert (await sandbox.python("x, sum")).stdout == "(1, None)\n"


async def test_fresh_code_that_never_ends_leaves_the_session_alone(sandbox: Sandbox) -> None:
    await sandbox.python("x = 1")
    result = await sandbox.python(
        "import os, signal\nsignal.signal(2, signal.SIG_IGN)\nos.fork()\nwhile True: pass",
        fresh=True,
        timeout_s=1.0,
    )
    assert result.status == "timeout"
    assert not result.state_lost
    assert (await sandbox.python("x")).stdout == "1\n"


async def test_code_can_call_functions_of_the_host(sandbox: Sandbox) -> None:
    seen = []

    async def get(key: int, *, plus: int = 0) -> dict[str, int]:
        await asyncio.sleep(0)
        seen.append(key)
        return {"value": key + plus}

    def add(*numbers: int) -> int:
        return sum(numbers)

    result = await sandbox.python("print(get(31, plus=1)['value'])\nadd(1, 2, 3)", functions={"get": get, "add": add})
    assert result.stdout == "32\n6\n"
    again = await sandbox.python("get", functions={})
    fresh = await sandbox.python("add(2, 2)", functions={"add": add}, fresh=True)
    assert "NameError" in again.stderr
    assert fresh.stdout == "4\n"
    assert seen == [31]


async def test_a_host_function_that_fails_is_a_runtime_error_in_the_code(sandbox: Sandbox) -> None:
    def bad() -> None:
        raise KeyError("secret/path.py")

    def rude() -> None:
        raise ToolError("not today")

    code = "for f in (bad, rude, odd):\n    try: f()\n    except RuntimeError as e: print(e)"
    result = await sandbox.python(code, functions={"bad": bad, "rude": rude, "odd": lambda: object()})
    assert (await sandbox.python("1")).ok
    assert result.stdout.splitlines()[:2] == ["the host function 'bad' raised KeyError", "not today"]
    assert "JSON" in result.stdout


async def test_an_infrastructure_error_of_a_host_function_ends_the_call(sandbox: Sandbox) -> None:
    async def ask() -> str:
        raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        await sandbox.python("try: ask()\nexcept BaseException: pass\nwhile True: pass", functions={"ask": ask})
    assert (await sandbox.python("1 + 1")).stdout == "2\n"


async def test_waiting_for_a_host_function_counts_toward_the_limit(sandbox: Sandbox) -> None:
    ended = asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    await sandbox.python("x = 1")
    while not ended.is_set():  # A loaded machine may reach the time limit before the call.
        result = await sandbox.python("slow()", timeout_s=1.0, functions={"slow": slow})
    assert result.status == "timeout"
    assert not result.state_lost
    assert (await sandbox.python("get()", functions={"get": lambda: 5})).stdout == "5\n"
    assert (await sandbox.python("x")).stdout == "1\n"


async def test_too_many_host_function_calls_are_refused(sandbox: Sandbox) -> None:
    polite = await sandbox.python("for i in range(1001): f()", functions={"f": lambda: 0}, timeout_s=30)
    assert "RuntimeError: more than 1000 host function calls" in polite.stderr
    stubborn = "while True:\n    try: f()\n    except RuntimeError: pass"
    assert (await sandbox.python(stubborn, functions={"f": lambda: 0}, timeout_s=30)).status == "protocol"
    assert "ValueError" in (await sandbox.python("f('x' * 2_000_000)", functions={"f": lambda x: 0})).stderr
    assert (await sandbox.python("1")).ok


async def test_a_host_function_cannot_call_the_sandbox_that_waits_for_it(sandbox: Sandbox) -> None:

    async def loop() -> str:
        return (await sandbox.exec("echo hi")).stdout

    result = await sandbox.python("loop()", functions={"loop": loop})
    assert "the host function 'loop' raised RuntimeError" in result.stderr


async def test_bad_arguments_are_value_errors(sandbox: Sandbox) -> None:
    for timeout_s in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout_s"):
            await sandbox.exec("true", timeout_s=timeout_s)
    with pytest.raises(ValueError, match="functions"):
        await sandbox.python("1", functions={"not a name": lambda: 0})
    with pytest.raises(ValueError, match="limit"):
        await sandbox.read("x", limit=-1)
    for limit in (1, (16 << 20) + 1):
        with pytest.raises(ValueError, match="output_limit"):
            await sandbox.exec("true", output_limit=limit)
    for env in ({"": "x"}, {"a=b": "x"}, {"a": "\0"}):
        with pytest.raises(ValueError, match="env"):
            await sandbox.exec("true", env=env)
    with pytest.raises(ValueError, match="command"):
        await sandbox.exec([])
    with pytest.raises(ValueError, match="stdin"):
        await sandbox.exec("true", stdin=bytes(17 << 20))


async def test_reset_leaves_no_name_file_or_process(sandbox: Sandbox) -> None:
    await sandbox.write({"a/b": "x"})
    mark = one_more_minute()
    await sandbox.python(f"import subprocess\nx = 1\np = subprocess.Popen(['sleep', '{mark}'])")
    await sandbox.reset()
    assert await sandbox.list() == []
    assert "NameError" in (await sandbox.python("x")).stderr
    left = await sandbox.python(still_running(mark))
    assert left.stdout == "[]\n"


async def test_calls_on_one_sandbox_take_turns(sandbox: Sandbox) -> None:
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(sandbox.python(f"{i}")) for i in range(20)]
    assert [call.result().stdout for call in calls] == [f"{i}\n" for i in range(20)]


async def test_a_closed_sandbox_raises_sandbox_error(spec: SandboxSpec) -> None:
    async with spec.open(1) as sandboxes, sandboxes.lease() as sandbox:
        pass
    with pytest.raises(SandboxError):
        await sandbox.python("1")


async def test_the_digest_is_the_same_for_each_lease_and_names_the_interpreter(sandboxes: SandboxPool) -> None:
    digests = set()
    for _ in range(2):
        async with sandboxes.lease() as sandbox:
            digests.add(sandbox.digest)
    assert len(digests) == 1
    assert "python3" in digests.pop()


HALF = "\ud800"
"""A lone surrogate: JSON can hold it, but no file can have it in its name."""


async def test_a_path_with_a_lone_surrogate_is_refused_and_the_sandbox_survives(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    await sandbox.python("x = 'kept'")
    for call in (
        sandbox.read(HALF),
        sandbox.list(HALF),
        sandbox.list(f"a/{HALF}/b"),
        sandbox.get(HALF, tmp_path / "got"),
    ):
        with pytest.raises(ValueError, match="lone surrogate"):
            await call
    with pytest.raises(ValueError, match="lone surrogate"):
        await sandbox.write({HALF: "x"})
    (tmp_path / "f").write_text("x")
    with pytest.raises(ValueError, match="lone surrogate"):
        await sandbox.put(tmp_path / "f", HALF)
    assert (await sandbox.python("x")).stdout == "'kept'\n"
    assert await sandbox.list() == []


async def test_a_name_that_is_not_valid_text_is_still_a_path(sandbox: Sandbox) -> None:
    await sandbox.write({"\udcff": b"bytes"})
    assert await sandbox.read("\udcff") == b"bytes"


@pytest.mark.parametrize("fresh", [False, True])
async def test_modules_of_the_server_do_not_shadow_modules_of_the_code(sandbox: Sandbox, fresh: bool) -> None:
    own = ["server", "files", "call", "limits", "worker", "start"]
    await sandbox.write({f"{name}.py": f"mine = {name!r}" for name in own})
    said = await sandbox.python(f"import {', '.join(own)}\n[m.mine for m in ({', '.join(own)})]", fresh=fresh)
    assert said.stdout == f"{own}\n"
