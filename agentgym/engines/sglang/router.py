"""Chooses a server for each session: while the load stays balanced, one that has already computed its prefix."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from agentgym.engines.sglang.prompts import Prompt
from agentgym.engines.sglang.server import NoServer, Server

_REMEMBERED = 1 << 16
"""Number of prompt blocks that are remembered for each server. The least recently used blocks are forgotten first."""
_SLACK = 4
"""A server isn't chosen, whatever prefix it has computed, if it has at least this many sessions more than the least
loaded server. If half of the least loaded server's number of sessions is larger, that half is used instead.
"""


class _Home(NamedTuple):
    """A session's server, its prompt, and how many of the prompt's blocks are recorded as computed by the server."""

    server: Server
    prompt: Prompt | None = None
    noted: int = 0


class Router:
    """Assigns sessions to servers. A session stays on its server until it is released or the server is lost."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = tuple(servers)
        self._home: dict[str, _Home] = {}
        self._seen: dict[Server, OrderedDict[int, None]] = {server: OrderedDict() for server in servers}

    @property
    def alive(self) -> list[Server]:
        """The servers that are not lost."""
        return [server for server in self.servers if server.alive]

    def place(self, session: str, prompt: Prompt, *, avoid: Sequence[Server] = ()) -> Server:
        """Return a session's server: its current one if that is usable, else the best one for this prompt.

        Servers with many more sessions than the least loaded one are left out. Of the others, the best server is the
        one that has computed the longest prefix of the prompt. On a tie, it is the least loaded one.

        Raises:
            NoServer: If no server is left.
        """
        home = self._home.get(session)
        if home is None or not home.server.alive or home.server in avoid:
            usable = [server for server in self.alive if server not in avoid]
            if not usable:
                raise NoServer(
                    f"no server is left of the configured ones: {', '.join(map(repr, self.servers)) or 'none'}"
                )
            home = self._home[session] = _Home(self._best(usable, prompt))
        if len(self.servers) > 1:
            self._remember(session, home, prompt)
        return home.server

    def release(self, session: str) -> None:
        """Forget a session. Unknown sessions are ignored."""
        self._home.pop(session, None)

    def lose(self, server: Server) -> None:
        """Assign no sessions to a server until `revive`, and forget its sessions and the prefixes that it computed."""
        server.alive = False
        self._seen[server].clear()
        self._home = {session: home for session, home in self._home.items() if home.server is not server}

    def revive(self, server: Server) -> None:
        """Assign sessions to a server again."""
        server.alive = True

    def sessions(self) -> Counter[Server]:
        """Return the number of sessions on each server."""
        return Counter(home.server for home in self._home.values())

    def _best(self, usable: Sequence[Server], prompt: Prompt) -> Server:
        if len(usable) == 1:
            return usable[0]
        count = self.sessions()
        emptiest = min(count[server] for server in usable)
        limit = emptiest + max(_SLACK, emptiest // 2)
        near = [server for server in usable if count[server] < limit]
        return min(near, key=lambda server: (-self._known(server, prompt.blocks), count[server]))

    def _known(self, server: Server, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's blocks, counted from the first, the server has already computed."""
        seen = self._seen[server]
        return next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))

    def _remember(self, session: str, home: _Home, prompt: Prompt) -> None:
        """Record the blocks of a session's prompt for its server, except those already recorded for the session."""
        blocks, seen = prompt.blocks, self._seen[home.server]
        for block in blocks[home.noted if home.prompt is prompt else 0 :]:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > _REMEMBERED:
            seen.popitem(last=False)
        self._home[session] = _Home(home.server, prompt, len(blocks))
