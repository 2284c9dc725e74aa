"""An engine whose turns are typed: it prints what a model would read, and each line of stdin is a turn."""

import asyncio
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from agentgym.cli.envs.turns import HELP, WrongTurn, read_turn
from agentgym.cli.output import flush, say
from agentgym.engines.scripted import Reply, Scripted
from agentgym.errors import EngineError
from agentgym.rollouts.conversation import Conversation
from agentgym.types.completion import Completion, Sampling
from agentgym.types.rollout import Rollout
from agentgym.types.transcript import message_parts, printable

CONTEXT = 1 << 30
"""Maximum bytes of a conversation."""
PIECE = 1 << 16
_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)


class Player(Scripted):
    """Asks for each turn on the terminal, one conversation at a time."""

    def __init__(self) -> None:
        super().__init__([], context_tokens=CONTEXT)
        self.left = ""
        """Why the player left before the end, or ""."""
        self._lines = Lines(sys.stdin.fileno())
        self._echoes = not sys.stdin.isatty()
        self._one = asyncio.Lock()
        self._reply: Reply = ""
        self._shown: dict[str, str] = {}
        """The text printed so far for each conversation, as the model reads it."""
        self._last = ""
        self._roles: dict[str, str] = {}
        """The role of each forked conversation, by its sessions' names without the last "." and the number after it."""
        self._tools: dict[str, Any] = {}

    def know_role(self, conversation: Conversation) -> None:
        """Show the conversation's role with its name from now on."""
        self._roles[conversation.segment.session.rpartition(".")[0]] = conversation.speaker.role

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        async with self._one:
            self._show(self.tokenizer.decode(token_ids), session)
            self._reply = await self._ask()
            made = await super().generate(
                token_ids, session=session, max_tokens=max_tokens, sampling=sampling, seed=seed
            )
            self._shown[session] = self.tokenizer.decode([*token_ids, *made.token_ids])
            return made

    def _next(self, token_ids: Sequence[int], session: str) -> Reply:
        return self._reply

    def _show(self, text: str, session: str) -> None:
        """Print the new part of a conversation, preceded by its name if another one was printed last."""
        if self._last and session != self._last:
            role = self._roles.get(session.rpartition(".")[0])
            say(f"--- conversation {session}" + (f", role {role}" if role else ""))
        self._last = session
        for role, content in _MESSAGE.findall(text.removeprefix(self._shown.get(session, ""))):
            if role == "tools":
                made = [json.loads(line)["function"] for line in content.splitlines()]
                self._tools = {tool["name"]: tool for tool in made}
                for line in map(tool_line, self._tools.values()):
                    say(line)
            else:
                say(message_line(role, content))

    async def _ask(self) -> Reply:
        """Return the next line that is a turn.

        Raises:
            EngineError: If the player left or the input ended.
        """
        while True:
            if not self._echoes:
                sys.stdout.write("> ")
            flush()
            line = await self._lines.next()
            if line is None:
                self.left = "the input ended before the rollout did; it was not scored"
                raise EngineError(self.left)
            if self._echoes:
                say(f"> {printable(line)}")
            if line.strip() == "/quit":
                self.left = "the rollout was not scored"
                raise EngineError(self.left)
            if line.strip() == "/help":
                for shown in (*HELP, *map(tool_line, self._tools.values())):
                    say(shown)
            elif line.strip():
                try:
                    return read_turn(line, self._tools)
                except WrongTurn as error:
                    say(f"{error}; see /help")


def message_line(role: str, content: str) -> str:
    """Return a message as it is displayed, with continuation lines indented."""
    return printable(f"{role}: " + content.replace("\n", "\n    "))


def tool_line(tool: dict[str, Any]) -> str:
    """Return a tool as one line: its name, its parameters with their types, and its description."""
    parameters: dict[str, Any] = tool["parameters"].get("properties", {})
    given = ", ".join(f"{name}: {one.get('type', 'any')}" for name, one in parameters.items())
    return printable(f"tool {tool['name']}({given}): {' '.join(str(tool.get('description', '')).split())}")


def last_answer(rollout: Rollout) -> Iterator[str]:
    """Yield the env's messages after the last turn, as they are displayed."""
    turns = [turn for segment in rollout.segments for turn in segment.turns]
    for message in max(turns, key=lambda turn: turn.number).env_messages if turns else ():
        for _, text in message_parts(message):
            yield message_line(message["role"], text)


class Lines:
    """Reads lines from a file descriptor. A wait can be cancelled, and doesn't keep the process from exiting."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._read = b""
        self._ended = False

    async def next(self) -> str | None:
        """Return the next line without its newline, or None at the end of the input."""
        while b"\n" not in self._read and not self._ended:
            piece = await self._piece()
            self._read += piece
            self._ended = not piece
        line, newline, rest = self._read.partition(b"\n")
        self._read = rest
        return line.decode(errors="replace").removesuffix("\r") if line or newline else None

    async def _piece(self) -> bytes:
        loop = asyncio.get_running_loop()
        came: asyncio.Future[bytes] = loop.create_future()

        def hand_over(piece: bytes) -> None:
            if not came.done():
                came.set_result(piece)

        def read() -> None:
            # os.read holds none of Python's locks, so the process can exit while it waits.
            try:
                piece = os.read(self._descriptor, PIECE)
            except OSError:  # The terminal is gone.
                piece = b""
            with suppress(RuntimeError):  # The loop has ended.
                loop.call_soon_threadsafe(hand_over, piece)

        threading.Thread(target=read, name="agentgym-stdin", daemon=True).start()
        return await came
