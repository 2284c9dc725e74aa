"""The command `agentgym play`: turns read from a pipe and from a terminal."""

import fcntl
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.envs.new import renamed
from agentgym.cli.envs.turns import WrongTurn, read_turn
from agentgym.engines.scripted import call, calls, say

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
PLAY = [sys.executable, "-m", "agentgym", "play"]
FORKS = """
import agentgym as ag


@ag.register("asks")
class Asks(ag.ToolEnv[ag.Task]):
    @classmethod
    def tasks(cls, split: ag.Split) -> list[ag.Task]:
        return [ag.Task(id=split, prompt="Ask somebody.")]

    @ag.tool
    async def ask(self, question: str) -> str:
        "Ask a sub-agent."
        async with self.fork("subagent", [ag.Message(role="user", content=question)]) as agent:
            return await agent.run()

    @ag.reward
    def right(self) -> float:
        return float(self.answer == "seven")

    async def close(self) -> None:
        print("closed")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the env hello and an env that calls a sub-agent."""
    for name, text in (("hello", (ROOT / "templates/tool/env.py").read_text()), ("asks", FORKS)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "env.py").write_text(renamed(text, "tool", name))
    return tmp_path


def piped(folder: Path, *words: str, lines: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*PLAY, *words], cwd=folder, env=ENVIRONMENT, input=lines, capture_output=True, text=True, check=False
    )


def test_turns_from_a_pipe_are_shown_with_their_results_and_the_reward(folder: Path) -> None:
    done = piped(folder, "hello", lines="/tool python code=get(10)\n/tol\n\nAnswer: 20\n")
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines() == [
        "tool python(code: string): Run get(key), which looks a key up.",
        "user: Start at key 10. What is the value?",
        "> /tool python code=get(10)",
        "tool: 'value 20'",
        "> /tol",
        "there is no /tol; did you mean '/tool'?; see /help",
        "> ",
        "> Answer: 20",
        "reward 1, stopped by answer",
        "rewards: right 1",
        "metrics: tool_calls 1, tool_errors 0, malformed_calls 0, turns 2",
    ]


def test_the_envs_last_message_is_shown_even_if_no_turn_follows(folder: Path) -> None:
    done = piped(folder, "hello", lines="/tool python code=get(11)\n" * 20)
    assert done.stdout.splitlines()[-5:-2] == [
        "> /tool python code=get(11)",
        "tool: 'value 57'",
        "reward 0, stopped by turns",
    ]


def test_a_pipe_that_ends_early_closes_the_env_and_is_reported(folder: Path) -> None:
    done = piped(folder, "asks", lines="")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == [
        "closed",
        "ended early: the input ended before the rollout did; it was not scored",
    ]


def test_a_sub_agent_is_played_and_named(folder: Path) -> None:
    done = piped(folder, "asks", lines='{"name": "ask", "arguments": {"question": "3 + 4?"}}\nseven\nseven\n')
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[1:-2] == [
        "user: Ask somebody.",
        '> {"name": "ask", "arguments": {"question": "3 + 4?"}}',
        "--- conversation train/0/0.0.0",
        "user: 3 + 4?",
        "> seven",
        "--- conversation train/0/0",
        "tool: seven",
        "> seven",
        "closed",
        "reward 1, stopped by answer",
    ]


def test_self_play_names_the_side_to_move_and_the_legal_moves(folder: Path) -> None:
    done = piped(folder, "tictactoe", lines="8\nno\n2\n9\n")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("--env.opponent self: who plays O: the policy, ")
    assert lines[1].startswith("--env.illegal-moves 3: ")
    assert lines[2].startswith("user: Tic-tac-toe: three in a row win. You are X.")
    assert [line for line in lines if line.startswith(("> ", "--- "))] == [
        "> 8",
        "--- conversation tictactoe-0/0/0.0.0, role O",
        "> no",
        "> 2",
        "--- conversation tictactoe-0/0/0",
        "> 9",
    ]
    told = lines[lines.index("> no") + 1]
    assert told.startswith("user: 'no' is none of the free fields 2, 3, 4, 5, 6, 9; after 2 more ")
    assert "    X wins" in lines
    assert lines[-3:-1] == ["rewards: X 1", "rewards of roles: O 0"]


def test_one_side_plays_against_a_program_and_a_forfeit_is_reported(folder: Path) -> None:
    done = piped(folder, "tictactoe", "--env.opponent", "perfect", "--env.illegal-moves", "0", lines="no\n")
    assert done.returncode == 0, done.stdout
    assert "--env.opponent perfect: " in done.stdout
    assert "--- conversation" not in done.stdout
    assert "X forfeits the game." in done.stdout
    assert done.stdout.splitlines()[-2] == "rewards: X -1"


def test_the_rewards_of_roles_are_shown_at_the_end(folder: Path) -> None:
    done = piped(folder, "tictactoe", "--env.illegal-moves", "0", lines="5\nno\n")
    assert done.stdout.splitlines()[-3:-1] == ["rewards: X 0.5", "rewards of roles: O -1"], done.stdout


class Terminal:
    """The command running in a pseudo-terminal."""

    def __init__(self, descriptor: int, process: "subprocess.Popen[bytes]") -> None:
        self.descriptor, self.process, self.said = descriptor, process, ""

    def read_to(self, text: str) -> None:
        """Read new output until it contains the text."""
        said = ""
        while text not in said:
            said += os.read(self.descriptor, 1 << 12).decode()
        self.said += said

    def end(self) -> int:
        """Wait for the process to end and return its exit code."""
        while True:
            try:
                piece = os.read(self.descriptor, 1 << 12)
            except OSError:  # EIO: the other end is closed.
                break
            if not piece:
                break
            self.said += piece.decode()
        return self.process.wait()


@contextmanager
def terminal(folder: Path, *words: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*PLAY, *words],
        cwd=folder,
        env=ENVIRONMENT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_an_env_can_be_played_in_a_terminal(folder: Path) -> None:
    with terminal(folder, "hello") as screen:
        screen.read_to("> ")
        os.write(screen.descriptor, b"/tool python code=get(10)\n")
        screen.read_to("'value 20'\r\n> ")
        os.write(screen.descriptor, b"Answer: 20\n")
        assert screen.end() == 0
    assert "What is the value?\r\n> " in screen.said
    assert "reward 1, stopped by answer" in screen.said


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        (b"\x04", 0, "ended early: the input ended before the rollout did; it was not scored"),
        (b"\x03", 130, "ended early: the rollout was not scored"),
        (b"/quit\n", 0, "ended early: the rollout was not scored"),
    ],
    ids=["Ctrl-D", "Ctrl-C", "/quit"],
)
def test_a_player_who_quits_ends_it_cleanly(folder: Path, typed: bytes, code: int, said: str) -> None:
    with terminal(folder, "asks") as screen:
        screen.read_to("> ")
        os.write(screen.descriptor, typed)
        assert screen.end() == code, screen.said
    lines = screen.said.splitlines()
    assert "closed" in screen.said
    assert lines[-1] == said
    assert "Traceback" not in screen.said


TOOLS: dict[str, Any] = {
    "look": {"parameters": {"properties": {"key": {"type": "string"}, "deep": {"type": "boolean"}}}},
    "sql": {"parameters": {"properties": {"query": {"type": "string"}}}},
}


@pytest.mark.parametrize(
    ("line", "turn"),
    [
        ("  two words ", say("  two words ")),
        ("/say /tool is a word", say("/tool is a word")),
        ("/tool look key=31 deep=true", call("look", key="31", deep=True)),
        ("/tool look key='a b' deep=maybe", call("look", key="a b", deep="maybe")),
        ("/tool sql query=select count(*) from x where a='b'", call("sql", query="select count(*) from x where a='b'")),
        ("/tool sql query=select 'it''s", call("sql", query="select 'it''s")),
        ("/tool sql query='a b'", call("sql", query="a b")),
        ("/tool other count=3 name=x", call("other", count=3, name="x")),
        ('{"name": "look", "arguments": {"key": "a\\nb"}}', call("look", key="a\nb")),
        ('[{"name": "look"}, {"name": "other", "arguments": {"x": [1]}}]', calls(("look", {}), ("other", {"x": [1]}))),
    ],
)
def test_lines_are_parsed_as_turns(line: str, turn: object) -> None:
    assert read_turn(line, TOOLS) == turn


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/tol look", "there is no /tol; did you mean '/tool'?"),
        ("/tool", "/tool: name a tool, as in /tool look key=31"),
        ("/tool look 31", "/tool: '31' has no name; write KEY=VALUE"),
        ("/tool sql select 1", "/tool: 'select' has no name; write KEY=VALUE"),
        ("/tool look key='31", "/tool: No closing quotation"),
        ("{oops", "this is not JSON "),
        ('{"tool": "look"}', 'a call needs a "name" and its "arguments"; /say sends text'),
        ("[]", 'a call needs a "name"'),
        ('{"name": "look", "arguments": "31"}', '"arguments" must be an object, as in {"key": 31}'),
    ],
)
def test_a_line_that_is_not_a_turn_gets_a_hint(line: str, said: str) -> None:
    with pytest.raises(WrongTurn) as wrong:
        read_turn(line, TOOLS)
    assert str(wrong.value).startswith(said)
