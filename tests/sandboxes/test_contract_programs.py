"""The contract of every kind of sandbox for commands, for programs that keep running, and for shells."""

import asyncio
import signal
from collections.abc import Awaitable, Callable

import pytest

from agentgym.errors import ClosedError, SandboxError
from agentgym.sandboxes.protocol import Branch, ExecResult, Sandbox
from agentgym.sandboxes.remote.process import WINDOW
from tests.sandboxes.conftest import cut_after

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_program_and_its_arguments_run_without_a_shell(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["printf", "%s|", "a b", "$HOME", "*", "'"])
    assert (result.ok, result.stdout) == (True, "a b|$HOME|*|'|")
    assert (await sandbox.exec(["sh", "-c", "exit 4"])).exit_code == 4


async def test_a_missing_program_is_a_result(sandbox: Sandbox) -> None:
    missing = await sandbox.exec(["no-such-program"])
    assert (missing.status, missing.exit_code) == ("error", 127)
    assert "no-such-program" in missing.stderr
    await sandbox.write({"text": "no program"})
    assert (await sandbox.exec(["./text"])).exit_code == 126


async def test_a_command_has_its_folder_environment_and_input(sandbox: Sandbox) -> None:
    await sandbox.write({"a/b/f": ""})
    result = await sandbox.exec("ls; echo $X; cat", cwd="a/b", env={"X": "é ="}, stdin="first\nsecond\0")
    assert result.stdout_bytes == "f\né =\nfirst\nsecond\0".encode()
    assert (await sandbox.exec("cat; echo ${X-none}")).stdout == "none\n"
    assert (await sandbox.exec("true", cwd="none")).exit_code == 127


async def test_large_input_arrives_whole(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 40_000
    assert (await sandbox.exec("wc -c; wc -c < /dev/null", stdin=data)).stdout.split() == [str(len(data)), "0"]


async def test_output_is_kept_as_bytes_and_as_text(sandbox: Sandbox) -> None:
    result = await sandbox.exec("printf '\\377ok'; printf '\\200' >&2")
    assert (result.stdout, result.stderr) == ("�ok", "�")
    assert (result.stdout_bytes, result.stderr_bytes) == (b"\xffok", b"\x80")
    assert (await sandbox.exec("printf é")).stdout_bytes == "é".encode()


@pytest.mark.parametrize("limit", [2, 10, 1000, 40_000, 1 << 20])
async def test_a_call_keeps_as_much_output_as_its_limit_allows(sandbox: Sandbox, limit: int) -> None:
    text = "".join(f"{i:07}\n" for i in range(100_000))
    await sandbox.write({"text": text})
    for result in (
        await sandbox.exec("cat text", output_limit=limit),
        await sandbox.python("print(open('text').read(), end='')", output_limit=limit),
    ):
        head, tail = text[: limit // 2], text[-(limit // 2) :]
        if len(text) <= limit:
            assert result.stdout == text
        else:
            assert result.stdout == f"{head}\n[... {len(text) - 2 * (limit // 2)} bytes cut ...]\n{tail}"
        assert result.truncated == (len(text) > limit)
    assert len((await sandbox.exec("cat text")).stdout) < 70_000


async def read_all(read: Callable[[], Awaitable[bytes]]) -> bytes:
    found = b""
    while piece := await read():
        found += piece
    return found


async def test_a_program_runs_alongside_other_calls_and_takes_input(sandbox: Sandbox) -> None:
    async with sandbox.start("while read line; do echo got $line; done; echo end >&2; exit 3") as process:
        await process.write("one\n")
        assert await process.stdout.read(timeout_s=20) == b"got one\n"
        assert (await sandbox.exec("echo beside")).stdout == "beside\n"
        assert (await sandbox.python("1 + 1")).stdout == "2\n"
        await process.write(b"two\n")
        await process.close_stdin()
        assert [piece async for piece in process.stdout] == [b"got two\n"]
        assert await process.wait(timeout_s=20) == 3
        assert process.exit_code == 3
        assert await read_all(process.stderr.read) == b"end\n"


async def test_program_output_arrives_while_another_call_runs(sandbox: Sandbox) -> None:
    async with sandbox.start(["cat"]) as process:
        waiting = asyncio.create_task(sandbox.exec("while [ ! -e done ]; do sleep 0.01; done", timeout_s=60))
        await process.write("x" * (3 * WINDOW // 2))
        assert len(await process.stdout.read(WINDOW)) > 0
        await process.write("more")
        await process.close_stdin()
        rest = await read_all(process.stdout.read)
        assert rest.endswith(b"xmore")
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert (await sandbox.exec("echo on")).stdout == "on\n"


async def reaches(sandbox: Sandbox, size: int) -> None:
    """Wait until the file has that many bytes."""
    assert (await sandbox.exec(f"touch wrote; while [ $(wc -c < wrote) -lt {size} ]; do sleep 0.01; done")).ok


async def test_a_program_with_endless_output_waits_for_its_reader(sandbox: Sandbox) -> None:
    line = f"echo {'x' * 1023}"
    async with sandbox.start(f"while :; do echo >> wrote; {line}; done") as process:
        most = (WINDOW + (64 << 10)) // 1024 + 4
        await reaches(sandbox, WINDOW // 1024)
        assert len(await sandbox.read("wrote")) <= most
        got = 0
        async for piece in process.stdout:
            got += len(piece)
            if got > 4 * WINDOW:
                break
        assert process.exit_code is None
    assert (await sandbox.exec("echo on")).stdout == "on\n"


async def test_a_program_takes_input_of_any_size_as_fast_as_it_reads(sandbox: Sandbox) -> None:
    async with sandbox.start("wc -c") as process:
        await process.write(bytes(5 * WINDOW))
        await process.close_stdin()
        assert int(await process.stdout.read(timeout_s=20)) == 5 * WINDOW
    async with sandbox.start("sleep 60") as process:
        with pytest.raises(TimeoutError):
            await process.write(bytes(5 * WINDOW), timeout_s=0.2)


async def test_writing_to_a_program_that_reads_no_more_breaks_the_pipe(sandbox: Sandbox) -> None:
    async with sandbox.start("exec <&-; echo closed; sleep 60") as process:
        await process.stdout.read(timeout_s=20)
        with pytest.raises(BrokenPipeError):
            await process.write("x" * WINDOW * 2)
    async with sandbox.start("true") as process:
        await process.wait(timeout_s=20)
        with pytest.raises(BrokenPipeError):
            await process.write("x")


async def test_a_program_that_is_killed_or_left_ends_with_all_it_started(sandbox: Sandbox) -> None:
    command = "echo $$; sleep 600 & setsid sleep 600 & echo $!; wait"
    running = "for pid in %s; do if kill -0 $pid 2>/dev/null; then echo $pid; fi; done"
    async with sandbox.start(command) as process:
        pids = await process.stdout.read(timeout_s=20)
        while pids.count(b"\n") < 2:
            pids += await process.stdout.read(timeout_s=20)
        assert len((await sandbox.exec(running % pids.decode().replace("\n", " "))).stdout.split()) == 2
        await process.kill()
        assert process.exit_code == -signal.SIGKILL
    assert (await sandbox.exec(running % pids.decode().replace("\n", " "))).stdout == ""
    async with sandbox.start(command) as process:
        pids = await process.stdout.read(timeout_s=20)
    assert (await sandbox.exec(running % pids.decode().replace("\n", " "))).stdout == ""


async def test_a_signal_goes_to_the_program(sandbox: Sandbox) -> None:
    async with sandbox.start("trap 'echo caught; exit 9' TERM; echo ready; while :; do sleep 0.01; done") as process:
        await process.stdout.read(timeout_s=20)
        await process.kill(signal.SIGTERM)
        assert await process.wait(timeout_s=20) == 9
        assert await read_all(process.stdout.read) == b"caught\n"


async def test_waiting_for_a_program_can_time_out_while_it_keeps_running(sandbox: Sandbox) -> None:
    async with sandbox.start(["cat"]) as process:
        with pytest.raises(TimeoutError):
            await process.wait(timeout_s=0.05)
        with pytest.raises(TimeoutError):
            await process.stdout.read(timeout_s=0.05)
        await process.write("still here")
        assert await process.stdout.read(timeout_s=20) == b"still here"


async def test_many_programs_run_at_once_up_to_a_limit(sandbox: Sandbox) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number in range(10):
            tasks.create_task(_echo(sandbox, f"{number}\n"))
    assert (await sandbox.exec("echo on")).stdout == "on\n"


async def _echo(sandbox: Sandbox, text: str) -> None:
    async with sandbox.start(["cat"]) as process:
        await process.write(text)
        assert await process.stdout.read(timeout_s=20) == text.encode()


async def test_a_program_that_cannot_start_reports_why(sandbox: Sandbox) -> None:
    async with sandbox.start(["no-such-program"]) as process:
        assert await process.wait(timeout_s=20) == 127
        assert b"no-such-program" in await read_all(process.stderr.read)


async def test_a_program_survives_a_cell_that_loses_its_state_and_ends_with_the_episode(sandbox: Sandbox) -> None:
    async with sandbox.start(["cat"]) as process:
        assert (await sandbox.python("import os; os._exit(0)")).state_lost
        assert (await sandbox.python("import subprocess\nsubprocess.Popen(['sleep', '60'])")).ok
        deaf = "import signal\nsignal.signal(2, signal.SIG_IGN)\nprint('deaf', flush=True)\nwhile True: pass"
        assert (await cut_after("deaf", lambda: sandbox.python(deaf, timeout_s=0.2))).state_lost
        await process.write("here")
        assert await process.stdout.read(timeout_s=20) == b"here"
        await sandbox.reset()
        with pytest.raises(SandboxError):
            await process.stdout.read()
        with pytest.raises(SandboxError):
            await process.wait()
    assert (await sandbox.exec("echo on")).stdout == "on\n"


async def test_programs_are_paused_while_a_verifier_runs(sandbox: Sandbox) -> None:
    async with sandbox.start("while :; do echo x >> wrote; done") as process:
        await reaches(sandbox, 1)
        code = "import os, time\na = os.path.getsize('wrote'); time.sleep(.1); os.path.getsize('wrote') - a"
        assert (await sandbox.python(code, fresh=True)).stdout == "0\n"
        size = len(await sandbox.read("wrote", limit=1 << 26))
        await reaches(sandbox, size + 1)
        assert process.exit_code is None


async def test_programs_of_a_branch_end_with_it(sandbox: Sandbox) -> None:
    await sandbox.write({"f": "trunk"})
    async with sandbox.start(["cat"]) as mine:
        branch: Branch
        async with await sandbox.fork() as branch:
            await branch.write({"f": "branch"})
            async with branch.start("cat f; exec sleep 600") as process, branch.shell() as shell:
                assert await process.stdout.read(timeout_s=20) == b"branch"
                assert (await shell.run("cat f")).stdout == "branch"
                await branch.close()
                assert await process.wait(timeout_s=20) == -signal.SIGKILL
        await mine.write("here")
        assert await mine.stdout.read(timeout_s=20) == b"here"


async def test_a_shell_keeps_its_folder_variables_and_functions(sandbox: Sandbox) -> None:
    async with sandbox.shell(env={"GIVEN": "g"}) as shell:
        first = await shell.run("mkdir -p x; cd x\nexport A='1 2'\nB=3; f() { echo \"f $1\"; return 5; }")
        assert (first.ok, first.stdout, first.stderr) == (True, "", "")
        second = await shell.run('basename "$PWD"; echo "$A $B $GIVEN"; echo err >&2; f x')
        assert (second.status, second.exit_code) == ("error", 5)
        assert (second.stdout, second.stderr) == ("x\n1 2 3 g\nf x\n", "err\n")
        assert (await sandbox.exec("echo ${A-none}; basename $PWD")).stdout.startswith("none\n")
        assert not second.state_lost


async def test_two_shells_share_only_files(sandbox: Sandbox) -> None:
    async with sandbox.shell() as one, sandbox.shell(cwd="/") as two:
        await one.run("A=1; echo one > f")
        assert (await two.run("echo ${A-none}; pwd")).stdout == "none\n/\n"


async def test_no_output_of_code_ends_a_shell_run(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        for command in (
            "echo 0; echo 0 >&2",
            "printf '0\\n%.0s' 1 2 3",
            "cat",
            "read x",
            "echo '",
            "echo $(",
            "}",
            "((",
            "'",
        ):
            await shell.run(command)
        result = await shell.run("echo 'a\nb'; cat <<END\n0\nEND\nfalse")
        assert (result.stdout, result.exit_code) == ("a\nb\n0\n", 1)
        assert not result.state_lost


async def test_a_shell_at_its_limit_is_interrupted_and_keeps_its_state(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        await shell.run("A=1")
        for command in ("sleep 60; echo after", "while :; do :; done; echo after", "f() { sleep 60; echo after; }; f"):
            words = f"echo before; {command}"
            result = await cut_after("before", lambda words=words: shell.run(words, timeout_s=0.3))  # type: ignore[misc]
            assert (result.status, result.stdout, result.state_lost) == ("timeout", "before\n", False)
        assert (await shell.run("echo $A")).stdout == "1\n"


async def test_a_shell_that_ignores_interrupts_restarts(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        command = "A=1; trap '' INT; echo deaf; while :; do :; done"
        result = await cut_after("deaf", lambda: shell.run(command, timeout_s=0.3))
        assert result.status == "timeout"
        assert result.state_lost
        assert (await shell.run("echo ${A-none}")).stdout == "none\n"


async def test_a_shell_that_ends_restarts_and_reports_it(sandbox: Sandbox) -> None:
    async with sandbox.shell(cwd="/") as shell:
        result = await shell.run("A=1; echo out; exit 3")
        assert (result.exit_code, result.stdout, result.state_lost) == (3, "out\n", True)
        assert (await shell.run("echo ${A-none}; pwd")).stdout == "none\n/\n"
        killed = await shell.run("kill -9 $$")
        assert (killed.status, killed.state_lost) == ("killed", True)


async def test_shell_jobs_keep_running_between_runs_and_end_with_the_shell(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        started = await shell.run("sleep 600 & echo $!")
        assert (started.stderr, started.ok) == ("", True)
        pid = int(started.stdout)
        assert (await sandbox.exec("true")).ok
        assert (await shell.run(f"kill -0 {pid} && echo runs")).stdout == "runs\n"
    assert (await sandbox.exec(f"kill -0 {pid} 2>/dev/null && echo runs")).stdout == ""


async def test_jobs_of_a_shell_that_exits_end_with_it(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        pid = int((await shell.run("sleep 600 & echo $!; exit")).stdout)
        assert (await sandbox.exec(f"kill -0 {pid} 2>/dev/null && echo runs")).stdout == ""


async def test_a_large_command_and_large_output_pass_through_a_shell(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        assert (await shell.run(f"A={'x' * 500_000}; echo ${{#A}}")).stdout == "500000\n"
        result: ExecResult = await shell.run("echo $A; echo end", output_limit=1000)
        assert result.truncated
        assert result.stdout.endswith("end\n")
        assert (await shell.run("echo $A", output_limit=1 << 20)).stdout == "x" * 500_000 + "\n"


async def test_a_closed_shell_is_refused(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        pass
    with pytest.raises(ClosedError, match=r"the shell was closed .* when its `async with` block ended"):
        await shell.run("true")


async def test_a_branch_has_a_shell_in_its_own_folder(sandbox: Sandbox) -> None:
    await sandbox.write({"f": "trunk"})
    async with await sandbox.fork() as branch, branch.shell() as shell:
        await shell.run("echo branch > f")
        assert await branch.read("f") == b"branch\n"
    assert await sandbox.read("f") == b"trunk"
