"""The same work done in other ways in `benchmarks.sandbox`: by the engine and by other kits, in turns with ours."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from agentgym.machine.process_identity import owner
from agentgym.sandboxes.docker.client import connect
from agentgym.sandboxes.docker.docker import Docker
from agentgym.sandboxes.docker.images.names import default_image
from agentgym.sandboxes.protocol import SandboxPool
from benchmarks.sandbox.measure import (
    AS_PROGRAM,
    CALLS_PER_EPISODE,
    Action,
    Figures,
    by_turns,
    container_pids,
    cpu_s,
    engine_pids,
    milliseconds,
    percentile,
    side,
)
from benchmarks.sandbox.peer import Peer
from benchmarks.sandbox.sandboxes import AT_ONCE, Amount, cell, episode, leased, program

LEAST = ["true"]


async def container_of_ours(sandboxes: SandboxPool) -> None:
    """Do the work of another kit's episode: a new container, a new Python for each call, and the container's end."""
    async with sandboxes.lease() as sandbox:
        for _ in range(CALLS_PER_EPISODE):
            await program(sandbox)()
        await sandbox.close()  # type: ignore[attr-defined]


async def docker_exec(spec: Docker, amount: Amount) -> Figures:
    """Measure the same cells by the engine in a separate container: latency, processor time, and its start."""
    image = spec.image or default_image()
    with engine_clients(1) as ([client], run), waiting_containers(client, image, 1) as [name]:
        pids = [*engine_pids(), *container_pids(client.inspect_container(name)["State"]["Pid"])]
        spent = time.process_time() + cpu_s(pids)
        taken = await milliseconds(partial(run, exec_once, client, name, AS_PROGRAM), amount.execs)
        spent = time.process_time() + cpu_s(pids) - spent
        least = await milliseconds(partial(run, exec_once, client, name, LEAST), amount.execs)
        new = await new_containers(client, image, amount.repeats)
    return {
        "call_p50_ms": percentile(taken, 50),
        "call_p99_ms": percentile(taken, 99),
        "cpu_ms_per_call_1": spent / amount.execs * 1e3,
        "least_p50_ms": percentile(least, 50),
        "new_sandbox_p50_ms": percentile(new, 50),
    }


async def new_containers(client: Any, image: str, times: int) -> list[float]:
    """Return the milliseconds that each container takes to start by the engine, in ascending order."""
    made: list[str] = []

    async def start() -> None:
        made.append(await asyncio.to_thread(new_container, client, image))

    try:
        return await milliseconds(start, times)
    finally:
        for name in made:
            client.remove_container(name, force=True, v=True)


async def peer_alone(peer: Peer, amount: Amount) -> Figures:
    """Measure another kit's calls in each of its ways, and a new container."""
    figures: Figures = {}
    for way in peer.hello["ways"]:
        found = await peer.ask("latency", way=way, times=amount.execs)
        figures |= {f"{way}_{name}": value for name, value in found.items()}
    new = await peer.ask("new_sandboxes", times=amount.repeats)
    return figures | {"new_sandbox_p50_ms": percentile(new, 50)}


async def side_by_side(spec: Docker, peers: Mapping[str, Peer], amount: Amount) -> Figures:
    """Return the rates of calls and episodes of our containers, of the engine and of other kits, all in turns."""
    figures: Figures = {}
    image = spec.image or default_image()
    for count in AT_ONCE:
        async with spec.open(count) as sandboxes, spec.open(count) as new:
            with engine_clients(count) as (clients, run):
                async with leased(sandboxes, count) as held:
                    with waiting_containers(clients[0], image, count) as names:
                        pairs = zip(clients, names, strict=True)
                        by_engine: list[Action] = [partial(run, exec_once, *pair, AS_PROGRAM) for pair in pairs]
                        sides = {"ours_session": side([cell(sandbox) for sandbox in held])}
                        sides |= {"ours_program": side([program(sandbox) for sandbox in held])}
                        sides |= {"docker_exec_program": side(by_engine)}
                        for name, peer in peers.items():
                            sides |= {f"{name}_{way}": peer.side("calls", way, count) for way in peer.hello["ways"]}
                        figures |= per_s("calls", count, await by_turns(sides, amount.seconds, amount.turns))
                engine_new: list[Action] = [partial(run, container_episode, client, image) for client in clients]
                sides = {"ours_reset": side([partial(episode, sandboxes)] * count)}
                sides |= {"ours_new": side([partial(container_of_ours, new)] * count)}
                sides |= {"docker_exec_new": side(engine_new)}
                for name, peer in peers.items():
                    sides[f"{name}_new"] = peer.side("episodes", peer.hello["ways"][0], count)
                figures |= per_s("episodes", count, await by_turns(sides, amount.seconds, amount.turns))
    return figures


def per_s(work: str, count: int, rates: Mapping[str, float]) -> Figures:
    """Return each side's rate under the name of its result."""
    return {f"{name}_{work}_per_s_{count}": value for name, value in rates.items()}


@contextlib.contextmanager
def engine_clients(count: int) -> Iterator[tuple[list[Any], Callable[..., Awaitable[None]]]]:
    """Yield connections to the engine, and a function that runs another function in a thread.

    There is a thread per connection.
    """
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(count) as threads, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(contextlib.closing(connect())) for _ in range(count)]
        yield clients, partial(loop.run_in_executor, threads)


def exec_once(client: Any, container: str, command: Sequence[str]) -> None:
    """Run one command and check its output, as a kit without a server in the sandbox does."""
    made = client.exec_create(container, command)
    said = client.exec_start(made["Id"])
    assert said == (b"" if command is LEAST else b"2\n"), said


def new_container(client: Any, image: str) -> str:
    """Start a container that waits for commands, and return its id."""
    limits = client.create_host_config(network_mode="none", read_only=True, cap_drop=["ALL"], pids_limit=128)
    made = client.create_container(
        image, ["sleep", "600"], entrypoint=[], host_config=limits, labels={"agentgym.owner": owner()}
    )
    client.start(made["Id"])
    return str(made["Id"])


@contextlib.contextmanager
def waiting_containers(client: Any, image: str, count: int) -> Iterator[list[str]]:
    """Yield `count` containers of the engine, which are removed at the end."""
    names: list[str] = []
    try:
        names += (new_container(client, image) for _ in range(count))
        yield names
    finally:
        for name in names:
            client.remove_container(name, force=True, v=True)


def container_episode(client: Any, image: str) -> None:
    """Start a container, run one command for each call, and remove it."""
    with waiting_containers(client, image, 1) as [name]:
        for _ in range(CALLS_PER_EPISODE):
            exec_once(client, name, AS_PROGRAM)
