"""The code sandbox: calls, episodes, resets, forks, memory, many boxes, beside the same work by other means.

`python -m benchmarks.sandbox [--json] [--quick] [--kinds docker bubblewrap] [--image NAME] [--boxes N]
[--swe-rex VENV] [--inspect-ai VENV]`

A call is one Python cell (`1 + 1`) in an interpreter that waits, and its answer. An episode is a lease, eight calls,
and the verified reset that follows. Other means come to the same answers in one run with ours, by turns, with as many
at once and with the same image:

- `docker_exec`: by the engine's API and not by its command line, a new Python for each call. `true` is the least that
  a `docker exec` can be.
- `swerex`, where its environment is named: SWE-ReX's server in the container. A call is a new Python by its `execute`
  (`program`), or a line for a Python that waits in its shell session (`session`). Its episodes use `program`, which
  has no session to start.
- `inspect`, where its environment is named: inspect_ai's docker sandbox. A call is a new Python by its `exec`.

They have no reset: an episode of theirs is a new container, eight calls and its end. So there are two comparisons. The
same work: a new Python by our `exec` beside theirs (`programs`), a cell beside a line of SWE-ReX's session
(`sessions`), a new container, eight new Pythons and its end on both sides (`new containers`). And what a user gains:
our cells (`calls`) and our episodes with a reset (`episodes`) over the fastest way that they have.

Calls go into warm containers, one at a time and into eight at once. Processor time is that of the calling process, of
the commands it starts, of the engine's daemons, and of the container with its shim.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentgym.boxes import Box, Boxes, Sandbox
from agentgym.process_identity import owner
from agentgym.sandboxes.containers.client import connect
from agentgym.sandboxes.containers.image import default_image
from agentgym.sandboxes.docker import Docker, why_no_docker
from agentgym.sandboxes.local import Bubblewrap, why_no_bubblewrap
from benchmarks.harness import Goal, at_least, at_most, report
from benchmarks.sandbox_measure import (
    AS_PROGRAM,
    CALLS_PER_EPISODE,
    CELL,
    Action,
    Figures,
    available_mib,
    by_turns,
    container_pids,
    cpu_s,
    engine_pids,
    milliseconds,
    percentile,
    pss_mib,
    rate,
    side,
    tree,
)
from benchmarks.sandbox_peer import Peer

LEAST = ["true"]
BOXES = (1, 8, 32)
AT_ONCE = (1, 8)
STARTS_AT_ONCE = 4
HEAPS_MB = (0, 100)
REFERENCE: dict[str, float | str] = {
    "gVisor (ptrace), a call, ms": 1.6,
    "gVisor (ptrace), a new box, ms": "340-450",
}
LIMITS: dict[str, dict[str, float]] = {
    "bubblewrap": {
        "call_p50_ms": 0.12,
        "call_p99_ms": 5.0,
        "cpu_ms_per_call_1": 0.12,
        "reset_p50_ms": 2.5,
        "new_box_p50_ms": 45.0,
        "pool_lease_p50_ms": 0.05,
        "fork_100mb_p50_ms": 6.0,
        "idle_box_pss_mib": 20.0,
    },
    "docker": {
        "call_p50_ms": 0.2,
        "call_p99_ms": 5.0,
        "cpu_ms_per_call_8": 0.6,
        "reset_p50_ms": 3.0,
        "new_box_p50_ms": 250.0,
        "pool_lease_p50_ms": 1.0,
        "fork_100mb_p50_ms": 7.0,
        "idle_box_pss_mib": 20.0,
    },
}
"""The most that a figure of each kind of box should be."""
CALLS_PER_S, EPISODES_PER_S, BOXES_AT_ONCE = 3500, 200, 500
PROGRAMS = {"swerex": "benchmarks.sandbox_swerex", "inspect": "benchmarks.sandbox_inspect"}
NAMES = {"docker_exec": "docker exec", "swerex": "SWE-ReX", "inspect": "inspect_ai"}
SAME = {"programs": 1.0, "new containers": 1.0}
TIMES: dict[str, dict[str, float]] = {
    "docker_exec": {"calls": 250.0, "episodes": 50.0, **SAME},
    "swerex": {"calls": 10.0, "sessions": 10.0, "episodes": 10.0, **SAME},
    "inspect": {"calls": 10.0, "episodes": 10.0, **SAME},
}
"""How many times as fast as each of them our containers should be, with as many at once on both sides."""
COMPARED = {
    "programs": ("ours_program_calls", ("program_calls",)),
    "sessions": ("ours_session_calls", ("session_calls",)),
    "new containers": ("ours_new_episodes", ("new_episodes",)),
    "calls": ("ours_session_calls", ("program_calls", "session_calls")),
    "episodes": ("ours_reset_episodes", ("new_episodes",)),
}
"""The side of ours in each comparison, and those of other means, of which the fastest counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much of everything is done."""

    calls: int
    """For latencies."""
    seconds: float
    """For each rate."""
    turns: int
    """In which the sides of a comparison alternate."""
    repeats: int
    """Of what takes long: new boxes, forks."""
    execs: int
    """Calls by other means, on one container."""
    boxes: int
    """Open at once."""


FULL = Amount(calls=3000, seconds=5.0, turns=4, repeats=15, execs=60, boxes=BOXES_AT_ONCE)
QUICK = Amount(calls=300, seconds=1.0, turns=1, repeats=4, execs=12, boxes=16)


def cell(box: Box) -> Action:
    """One call of the box, checked."""

    async def call() -> None:
        assert (await box.python(CELL)).stdout == "2\n"

    return call


def program(box: Box) -> Action:
    """A new Python in the box, checked: what another kit does for each call."""

    async def call() -> None:
        assert (await box.exec(AS_PROGRAM)).stdout == "2\n"

    return call


async def episode(boxes: Boxes) -> None:
    """A lease and its calls; the reset that follows is waited for by the next lease."""
    async with boxes.lease() as box:
        for _ in range(CALLS_PER_EPISODE):
            await box.python(CELL)


async def fresh_episode(boxes: Boxes) -> None:
    """The same in a box that is ended after it, so that the next one must be started."""
    async with boxes.lease() as box:
        for _ in range(CALLS_PER_EPISODE):
            await box.python(CELL)
        await box.close()  # type: ignore[attr-defined]


async def container_of_ours(boxes: Boxes) -> None:
    """The work of another kit's episode: a new container, a new Python for each call, and the container's end."""
    async with boxes.lease() as box:
        for _ in range(CALLS_PER_EPISODE):
            await program(box)()
        await box.close()  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def leased(boxes: Boxes, count: int) -> AsyncIterator[list[Box]]:
    """That many boxes at once, each of which has answered a call."""
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(boxes.lease()) for _ in range(count)]
        for box in held:
            await box.python(CELL)
        yield held


# ---------------------------------------------------------------------------------------------------- processes


def our_containers(client: Any) -> list[str]:
    """The running containers of this process."""
    found = client.containers(filters={"label": f"agentgym.owner={owner()}"})
    return [container["Id"] for container in found]


def box_pids(kind: str) -> list[int]:
    """Every process inside our boxes, and what holds them up: bwrap itself, or the containers' shims and the engine."""
    if kind == "bubblewrap":
        return [pid for pid in tree(os.getpid()) if pid != os.getpid()]
    client = connect()
    try:
        first = [client.inspect_container(name)["State"]["Pid"] for name in our_containers(client)]
    finally:
        client.close()
    return [*engine_pids(), *(inner for pid in first for inner in container_pids(pid))]


# ---------------------------------------------------------------------------------------------------- our boxes


async def calls(sandbox: Sandbox, kind: str, amount: Amount) -> Figures:
    """Latency on one box; rate and processor time on 1, 8 and 32; memory of 32 idle ones."""
    figures: Figures = {}
    for count in BOXES:
        before = available_mib()
        async with sandbox.open(count) as boxes, leased(boxes, count) as held:
            pids = box_pids(kind)
            if count == BOXES[0]:
                taken = await milliseconds(cell(held[0]), amount.calls)
                figures |= {"call_p50_ms": percentile(taken, 50), "call_p99_ms": percentile(taken, 99)}
                taken = await milliseconds(partial(held[0].exec, "true"), amount.calls // 10)
                figures |= {"shell_p50_ms": percentile(taken, 50)}
            if count == BOXES[-1]:
                figures["idle_box_pss_mib"] = pss_mib(sorted({*pids} - {*engine_pids()})) / count
                figures["idle_box_all_in_mib"] = (before - available_mib()) / count
            spent = time.process_time() + cpu_s(pids)
            figures[f"calls_per_s_{count}"], done = await rate([cell(box) for box in held], amount.seconds)
            figures[f"cpu_ms_per_call_{count}"] = (time.process_time() + cpu_s(pids) - spent) / done * 1e3
    return figures


async def episodes(sandbox: Sandbox, amount: Amount) -> Figures:
    """Reset, episodes on 1 and on 8 warm boxes, and one in a new box each time."""
    figures: Figures = {}
    async with sandbox.open(1) as boxes, boxes.lease() as box:
        resets = []
        for _ in range(amount.calls // 10):
            await box.python(CELL)
            resets += await milliseconds(box.reset, 1)
        figures["reset_p50_ms"] = percentile(sorted(resets), 50)
    for count in AT_ONCE:
        async with sandbox.open(count) as warm, sandbox.open(count) as new:
            async with leased(warm, count):
                pass
            ours, fresh = [partial(episode, warm)] * count, [partial(fresh_episode, new)] * count
            sides = {"episodes": side(ours), "fresh_episodes": side(fresh)}
            rates = await by_turns(sides, amount.seconds, amount.turns)
            figures |= {f"{name}_per_s_{count}": value for name, value in rates.items()}
    return figures


async def leases(sandbox: Sandbox, amount: Amount) -> Figures:
    """A new box, and one from the warm pool."""
    new, warm = [], []
    async with sandbox.open(amount.repeats) as boxes, contextlib.AsyncExitStack() as stack:

        async def lease() -> None:
            await stack.enter_async_context(boxes.lease())

        new = await milliseconds(lease, amount.repeats)
        await stack.aclose()
        for _ in range(amount.repeats):
            await asyncio.sleep(0.1)  # Until the resets in the background have ended.
            warm += await milliseconds(lease, 1)
            await stack.aclose()
    return {"new_box_p50_ms": percentile(new, 50), "pool_lease_p50_ms": percentile(sorted(warm), 50)}


async def forks(sandbox: Sandbox, amount: Amount) -> Figures:
    """A branch of a box whose heap holds this much; nothing where boxes cannot be forked."""
    figures: Figures = {}
    for heap_mb in HEAPS_MB:
        async with sandbox.open(1) as boxes, boxes.lease() as box:
            fork = getattr(box, "fork", None)
            if fork is None:
                return {}
            await box.python(f"heap = bytearray(b'1') * ({heap_mb} << 20)")
            taken = []
            for _ in range(amount.repeats):
                began = time.perf_counter()
                branch = await fork()
                taken.append((time.perf_counter() - began) * 1e3)
                await branch.close()
            figures[f"fork_{heap_mb}mb_p50_ms"] = percentile(sorted(taken), 50)
    return figures


async def many(sandbox: Sandbox, amount: Amount) -> Figures:
    """How many boxes are open at once and answer, and how long their start takes; a failure is named on stderr."""
    before = available_mib()
    began = time.perf_counter()
    async with sandbox.open(amount.boxes) as boxes, contextlib.AsyncExitStack() as stack:
        turns = asyncio.Semaphore(STARTS_AT_ONCE)

        async def start() -> Box:
            async with turns:
                return await stack.enter_async_context(boxes.lease())

        started = await asyncio.gather(*(start() for _ in range(amount.boxes)), return_exceptions=True)
        took = time.perf_counter() - began
        held = [box for box in started if not isinstance(box, BaseException)]
        said = await asyncio.gather(*(cell(box)() for box in held), return_exceptions=True)
        failures = [error for error in (*started, *said) if isinstance(error, BaseException)]
        for error in failures:
            print(f"a box of {amount.boxes} failed: {error!r}", file=sys.stderr)
        return {
            "boxes_at_once": float(amount.boxes - len(failures)),
            "boxes_at_once_failures": float(len(failures)),
            "boxes_at_once_start_s": took,
            "boxes_at_once_all_in_mib": (before - available_mib()) / amount.boxes,
        }


# ---------------------------------------------------------------------------------------------------- other means


async def docker_exec(sandbox: Docker, amount: Amount) -> Figures:
    """The same cells by the engine, in a container of its own: latency and processor time; and a new container."""
    image = sandbox.image or default_image()
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
        "new_box_p50_ms": percentile(new, 50),
    }


async def new_containers(client: Any, image: str, times: int) -> list[float]:
    """How long each container that the engine starts takes, in rising order, ms."""
    made: list[str] = []

    async def start() -> None:
        made.append(await asyncio.to_thread(new_container, client, image))

    try:
        return await milliseconds(start, times)
    finally:
        for name in made:
            client.remove_container(name, force=True, v=True)


async def peer_alone(peer: Peer, amount: Amount) -> Figures:
    """What another kit's call takes in each of its ways, and a new container."""
    figures: Figures = {}
    for way in peer.hello["ways"]:
        found = await peer.ask("latency", way=way, times=amount.execs)
        figures |= {f"{way}_{name}": value for name, value in found.items()}
    new = await peer.ask("new_boxes", times=amount.repeats)
    return figures | {"new_box_p50_ms": percentile(new, 50)}


async def side_by_side(sandbox: Docker, peers: Mapping[str, Peer], amount: Amount) -> Figures:
    """Rates of calls and episodes of our containers, of the engine and of other kits, all by turns."""
    figures: Figures = {}
    image = sandbox.image or default_image()
    for count in AT_ONCE:
        async with sandbox.open(count) as boxes, sandbox.open(count) as new:
            with engine_clients(count) as (clients, run):
                async with leased(boxes, count) as held:
                    with waiting_containers(clients[0], image, count) as names:
                        pairs = zip(clients, names, strict=True)
                        by_engine: list[Action] = [partial(run, exec_once, *pair, AS_PROGRAM) for pair in pairs]
                        sides = {"ours_session": side([cell(box) for box in held])}
                        sides |= {"ours_program": side([program(box) for box in held])}
                        sides |= {"docker_exec_program": side(by_engine)}
                        for name, peer in peers.items():
                            sides |= {f"{name}_{way}": peer.side("calls", way, count) for way in peer.hello["ways"]}
                        figures |= per_s("calls", count, await by_turns(sides, amount.seconds, amount.turns))
                engine_new: list[Action] = [partial(run, container_episode, client, image) for client in clients]
                sides = {"ours_reset": side([partial(episode, boxes)] * count)}
                sides |= {"ours_new": side([partial(container_of_ours, new)] * count)}
                sides |= {"docker_exec_new": side(engine_new)}
                for name, peer in peers.items():
                    sides[f"{name}_new"] = peer.side("episodes", peer.hello["ways"][0], count)
                figures |= per_s("episodes", count, await by_turns(sides, amount.seconds, amount.turns))
    return figures


def per_s(work: str, count: int, rates: Mapping[str, float]) -> Figures:
    """Each side's rate under the name of its figure."""
    return {f"{name}_{work}_per_s_{count}": value for name, value in rates.items()}


@contextlib.contextmanager
def engine_clients(count: int) -> Iterator[tuple[list[Any], Callable[..., Awaitable[None]]]]:
    """Connections to the engine, and what runs a function in a thread of its own for each."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(count) as threads, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(contextlib.closing(connect())) for _ in range(count)]
        yield clients, partial(loop.run_in_executor, threads)


def exec_once(client: Any, container: str, command: Sequence[str]) -> None:
    """One command and its output, as a kit without a server in the box runs it."""
    made = client.exec_create(container, command)
    said = client.exec_start(made["Id"])
    assert said == (b"" if command is LEAST else b"2\n"), said


def new_container(client: Any, image: str) -> str:
    """The id of a container that waits for commands."""
    limits = client.create_host_config(network_mode="none", read_only=True, cap_drop=["ALL"], pids_limit=128)
    made = client.create_container(
        image, ["sleep", "600"], entrypoint=[], host_config=limits, labels={"agentgym.owner": owner()}
    )
    client.start(made["Id"])
    return str(made["Id"])


@contextlib.contextmanager
def waiting_containers(client: Any, image: str, count: int) -> Iterator[list[str]]:
    """That many containers of the engine, removed at the end."""
    names: list[str] = []
    try:
        names += (new_container(client, image) for _ in range(count))
        yield names
    finally:
        for name in names:
            client.remove_container(name, force=True, v=True)


def container_episode(client: Any, image: str) -> None:
    """A container, one command for each call, and its end."""
    with waiting_containers(client, image, 1) as [name]:
        for _ in range(CALLS_PER_EPISODE):
            exec_once(client, name, AS_PROGRAM)


# ---------------------------------------------------------------------------------------------------- the report


def goals(figures: Figures) -> dict[str, Goal]:
    """All that the sandbox is to reach; what was not measured, because something is missing here, is not met."""
    made: dict[str, Goal] = {}
    for kind, limits in LIMITS.items():
        for name, limit in limits.items():
            made[f"{kind}_{name}"] = at_most(figures.get(f"{kind}_{name}"), limit)
        made[f"{kind}_boxes_at_once"] = many_goal(figures, kind)
        for name in ("calls_per_s_8", "calls_per_s_32"):
            made[f"{kind}_{name}"] = at_least(figures.get(f"{kind}_{name}"), CALLS_PER_S)
        best = max(figures.get(f"{kind}_episodes_per_s_{count}", 0.0) for count in AT_ONCE)
        made[f"{kind}_episodes_per_s"] = at_least(best or None, EPISODES_PER_S)
    return made | {name: at_least(ratio, goal) for name, (ratio, goal) in ratios(figures).items()}


def many_goal(figures: Figures, kind: str) -> Goal:
    """As many boxes at once as is the goal, without a failure; a run that asked for fewer has not measured it."""
    goal = at_least(figures.get(f"{kind}_boxes_at_once"), BOXES_AT_ONCE)
    if not goal["met"] and not figures.get(f"{kind}_boxes_at_once_failures"):
        goal["met"] = None
    return goal


def ratios(figures: Figures) -> dict[str, tuple[float | None, float]]:
    """Our containers over other means, with as many at once on both sides, and the goal; None where one was not run."""
    made: dict[str, tuple[float | None, float]] = {}
    for means, wanted in TIMES.items():
        for work, goal in wanted.items():
            ours, theirs = COMPARED[work]
            for count in AT_ONCE:
                end = f"_per_s_{count}"
                ways = [figures[name] for way in theirs if (name := f"{means}_{way}{end}") in figures]
                ratio = figures[ours + end] / max(ways) if ways and ours + end in figures else None
                made[f"{work} over {NAMES[means]}, {count} at once"] = (ratio, goal)
    return made


async def measure(kind: str, sandbox: Sandbox, peers: Mapping[str, Peer], amount: Amount) -> Figures:
    """Every figure of one kind of box, its name before each, and beside Docker's those of other means."""
    made = await calls(sandbox, kind, amount)
    for part in (episodes, leases, forks, many):
        made |= await part(sandbox, amount)
    figures = named(kind, made)
    if isinstance(sandbox, Docker):
        figures |= named("docker_exec", await docker_exec(sandbox, amount))
        for name, peer in peers.items():
            figures |= named(name, await peer_alone(peer, amount))
        figures |= await side_by_side(sandbox, peers, amount)
    return figures


def named(prefix: str, figures: Figures) -> Figures:
    """The figures with a name before theirs."""
    return {f"{prefix}_{name}": value for name, value in figures.items()}


@contextlib.contextmanager
def other_kits(venvs: Mapping[str, Path | None], image: str) -> Iterator[tuple[dict[str, Peer], dict[str, str]]]:
    """The kits that run here, and about each of them what the report says of it; what is left out says why."""
    with contextlib.ExitStack() as stack:
        peers: dict[str, Peer] = {}
        notes: dict[str, str] = {}
        for name, venv in venvs.items():
            if venv is None:
                notes[NAMES[name]] = "left out: no environment is named"
                continue
            peer = Peer(NAMES[name], venv / "bin/python", PROGRAMS[name], image)
            stack.callback(peer.close)
            hello = peer.hello
            if hello["why_not"] is None:
                peers[name] = peer
                notes[NAMES[name]] = " ".join(("measured,", hello["version"], hello["note"])).strip()
            else:
                notes[NAMES[name]] = f"left out, {hello['version']}: {hello['why_not']}"
            print(f"{NAMES[name]}: {notes[NAMES[name]]}", file=sys.stderr)
        yield peers, notes


def runnable(kinds: Sequence[str], image: str | None) -> tuple[dict[str, Sandbox], dict[str, str]]:
    """The kinds that run here, and about each of the others why it is left out."""
    known: dict[str, tuple[Sandbox, Callable[[], str | None]]] = {
        "docker": (Docker(image=image), lambda: why_no_docker(image)),
        "bubblewrap": (Bubblewrap(), why_no_bubblewrap),
    }
    why_not = {kind: "it was not asked for" for kind in known if kind not in kinds}
    why_not |= {kind: reason for kind in kinds if (reason := known[kind][1]()) is not None}
    for kind, reason in why_not.items():
        print(f"{kind} is left out: {reason}", file=sys.stderr)
    ran = {kind: known[kind][0] for kind in kinds if kind not in why_not}
    return ran, {kind: f"left out: {reason}" for kind, reason in why_not.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="the last line on stdout is the report as JSON")
    parser.add_argument("--quick", action="store_true", help="a smaller run, of about a minute for each kind")
    parser.add_argument("--kinds", nargs="+", choices=["docker", "bubblewrap"], default=["docker", "bubblewrap"])
    parser.add_argument("--image", default=None, help="of the containers of all sides; by default our own")
    parser.add_argument("--boxes", type=int, default=None, metavar="N", help="how many are open at once")
    for flag, kit in (("--swe-rex", "swe-rex and aiohttp"), ("--inspect-ai", "inspect_ai")):
        parser.add_argument(flag, type=Path, default=None, metavar="VENV", help=f"an environment that has {kit}")
    args = parser.parse_args()
    amount = QUICK if args.quick else FULL
    amount = replace(amount, boxes=args.boxes or amount.boxes)
    figures: Figures = {"cpus": float(os.cpu_count() or 0), "load": os.getloadavg()[0]}
    ran, left_out = runnable(args.kinds, args.image)
    venvs = {"swerex": args.swe_rex, "inspect": args.inspect_ai} if "docker" in ran else {}
    with other_kits(venvs, args.image or default_image()) as (peers, notes):
        for kind, sandbox in ran.items():
            figures |= asyncio.run(measure(kind, sandbox, peers, amount))
    report(
        "sandbox",
        figures=figures,
        reference=REFERENCE | left_out | notes,
        goals=goals(figures),
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
