"""The choice of a server for each session: one that has its prefix, while all servers stay evenly filled."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from agentgym.engines.sglang.server import NoServer, Server

_BLOCK = 32
"""Ids in a block; prefixes are compared block by block, so a shorter one does not count."""
_REMEMBERED = 1 << 16
"""Blocks that are remembered of each server, those used last."""
_SLACK = 4
"""A server is chosen for its prefix while it has at most this many sessions, or half as many again, above the least."""


class Router:
    """Places sessions on servers; a session stays until it is released, or its server is lost."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = tuple(servers)
        self._home: dict[str, Server] = {}
        self._seen: dict[Server, OrderedDict[int, None]] = {server: OrderedDict() for server in servers}

    @property
    def alive(self) -> list[Server]:
        """The servers that are not lost."""
        return [server for server in self.servers if server.alive]

    def place(self, session: str, token_ids: Sequence[int], *, avoid: Sequence[Server] = ()) -> Server:
        """Return the session's server: its own while that may be asked, else the best one for these ids.

        Among those with few sessions the one that computed the longest prefix of the ids; then the emptiest one.
        Raises NoServer where none is left.
        """
        usable = [server for server in self.alive if server not in avoid]
        if not usable:
            raise NoServer(f"no server is left of {', '.join(map(repr, self.servers)) or 'none'}")
        home = self._home.get(session)
        if home not in usable:
            home = self._best(usable, token_ids)
            self._home[session] = home
        if len(self.servers) > 1:
            self._remember(home, token_ids)
        return home

    def release(self, session: str) -> None:
        """Forget a session; unknown ones are forgotten already."""
        self._home.pop(session, None)

    def lose(self, server: Server) -> None:
        """Place nothing on a server, and forget what it had, until `revive`."""
        server.alive = False
        self._seen[server].clear()
        self._home = {session: home for session, home in self._home.items() if home is not server}

    def revive(self, server: Server) -> None:
        """Place sessions on a server again."""
        server.alive = True

    def sessions(self) -> Counter[Server]:
        """Return the number of sessions on each server."""
        return Counter(self._home.values())

    def _best(self, usable: Sequence[Server], token_ids: Sequence[int]) -> Server:
        if len(usable) == 1:
            return usable[0]
        count = self.sessions()
        emptiest = min(count[server] for server in usable)
        limit = emptiest + max(_SLACK, emptiest // 2)
        near = [server for server in usable if count[server] < limit]
        blocks = list(_blocks(token_ids))
        return min(near, key=lambda server: (-self._known(server, blocks), count[server]))

    def _known(self, server: Server, blocks: Sequence[int]) -> int:
        """The number of leading blocks that the server has seen."""
        seen = self._seen[server]
        return next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))

    def _remember(self, server: Server, token_ids: Sequence[int]) -> None:
        seen = self._seen[server]
        for block in _blocks(token_ids):
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > _REMEMBERED:
            seen.popitem(last=False)


def _blocks(token_ids: Sequence[int]) -> Iterator[int]:
    """Yield a hash for each whole block of ids, of that block and all before it."""
    number = 0
    for end in range(_BLOCK, len(token_ids) + 1, _BLOCK):
        number = hash((number, *token_ids[end - _BLOCK : end]))
        yield number
