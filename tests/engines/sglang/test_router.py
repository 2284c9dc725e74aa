"""How sessions are routed: to the server that has their prefix, as long as the servers stay balanced."""

import random
from typing import Any

import pytest

from agentgym.engines.sglang.prompts import Prompt
from agentgym.engines.sglang.router import Router
from agentgym.engines.sglang.server import Server
from agentgym.errors import EngineError


def fleet(count: int = 2) -> tuple[Router, list[Server]]:
    servers = [Server(f"http://server-{i}") for i in range(count)]
    return Router(servers), servers


def place(router: Router, session: str, ids: list[int], **how: Any) -> Server:
    return router.place(session, Prompt().then(ids), **how)


def ids_of(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(count)]


def test_a_session_stays_on_its_server_whatever_its_next_prompt() -> None:
    router, _ = fleet()
    home = place(router, "a", ids_of(100, 0))
    for i in range(20):
        place(router, f"other-{i}", ids_of(100, i))
        assert place(router, "a", ids_of(100, i)) is home


def test_a_fork_goes_to_its_prefix() -> None:
    router, _ = fleet()
    for i in range(6):
        place(router, f"{i}", ids_of(320, i))
    for i in range(6):
        fork = [*ids_of(320, i), *ids_of(40, 100)]
        assert place(router, f"fork-{i}", fork) is place(router, f"{i}", ids_of(320, i))


def test_groups_that_share_a_system_prompt_stay_together_on_balanced_servers() -> None:
    """8 groups of 4 share their first 64 ids, and each group shares its next 64."""
    router, servers = fleet()
    homes = [
        {place(router, f"{group}/{i}", ids_of(64, 0) + ids_of(64, 1 + group)) for i in range(4)} for group in range(8)
    ]
    assert sum(len(home) == 1 for home in homes) >= 6
    count = router.sessions()
    assert abs(count[servers[0]] - count[servers[1]]) <= 8


def test_one_prefix_for_all_does_not_fill_one_server() -> None:
    router, servers = fleet(4)
    for i in range(40):
        place(router, f"{i}", ids_of(512, 0))
    count = router.sessions()
    assert max(count.values()) - min(count[s] for s in servers) <= 5


def test_a_released_session_frees_its_place() -> None:
    router, servers = fleet()
    for i in range(20):
        place(router, f"{i}", ids_of(10, i))
    for i in range(20):
        router.release(f"{i}")
    router.release("never there")
    assert router.sessions()[servers[0]] == 0


def test_sessions_of_a_lost_server_move_and_its_prefixes_are_forgotten() -> None:
    router, (first, second) = fleet()
    lost = place(router, "a", ids_of(320, 0))
    router.lose(lost)
    other = second if lost is first else first
    assert place(router, "a", ids_of(320, 0)) is other
    router.revive(lost)
    assert place(router, "fork", ids_of(320, 0)) is other


def test_a_server_to_avoid_is_not_chosen_and_none_left_is_an_engine_error() -> None:
    router, (first, second) = fleet()
    assert place(router, "a", [1], avoid=[first]) is second
    assert place(router, "a", [1], avoid=[second]) is first
    with pytest.raises(EngineError, match="no server is left of the configured ones: http://server-0, http://server-1"):
        place(router, "a", [1], avoid=[first, second])
