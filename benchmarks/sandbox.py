"""The code sandbox: calls, episodes, resets, forks and memory, beside the same work by `docker exec` in the same run.

`python -m benchmarks.sandbox [--json] [--quick] [--kinds docker bubblewrap] [--image NAME]`

A call is one Python cell (`1 + 1`) and its answer. An episode is a lease, eight calls, and the verified reset that
follows; a fresh one has a new box instead of the reset. The same work without a server in the box is an interpreter
started by `docker exec` for each call, and a container of its own for each episode, by the engine's API and not by its
command line. `true` is the least that a `docker exec` can be.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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

CELL = "1 + 1"
AS_PROGRAM = ["python3", "-I", "-S", "-c", "print(1 + 1)"]
LEAST = ["true"]
CALLS_PER_EPISODE = 8
BOXES = (1, 8, 32)
AT_ONCE = (1, 8)
TURNS = 4
HEAPS_MB = (0, 100)
TICKS = os.sysconf("SC_CLK_TCK")
REFERENCE: dict[str, float | str] = {
    "other kits, a call, ms": "50-200",
    "gVisor (ptrace), a call, ms": 1.6,
    "gVisor (ptrace), a new box, ms": "340-450",
}
Figures = dict[str, float]
Action = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much of everything is done."""

    calls: int
    """For latencies."""
    seconds: float
    """For each rate."""
    repeats: int
    """Of what takes long: new boxes, forks."""
    execs: int
    """By `docker exec`, on one container."""


FULL = Amount(calls=3000, seconds=5.0, repeats=15, execs=60)
QUICK = Amount(calls=300, seconds=1.0, repeats=4, execs=12)


# ---------------------------------------------------------------------------------------------------- measures


async def milliseconds(action: Action, times: int) -> list[float]:
    """How long each of them took, in rising order."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        await action()
        taken.append((time.perf_counter() - began) * 1e3)
    return sorted(taken)


def percentile(rising: list[float], percent: float) -> float:
    """The nearest rank."""
    return rising[min(int(len(rising) * percent / 100), len(rising) - 1)]


async def rate(actions: Sequence[Action], seconds: float) -> tuple[float, int]:
    """How often a second, and how often in all, when each is repeated side by side with the others."""
    began = time.perf_counter()
    done = 0

    async def repeat(action: Action) -> None:
        nonlocal done
        while time.perf_counter() < began + seconds:
            await action()
            done += 1

    async with asyncio.TaskGroup() as group:
        for action in actions:
            group.create_task(repeat(action))
    return done / (time.perf_counter() - began), done


async def by_turns(ours: Sequence[Action], theirs: Sequence[Action], seconds: float) -> tuple[float, float]:
    """The rates of both, taken in turns: on a busy machine what holds up one holds up the other."""
    done, took = [0, 0], [0.0, 0.0]
    for _ in range(TURNS):
        for side, actions in enumerate((ours, theirs)):
            a_second, count = await rate(actions, seconds / TURNS)
            done[side] += count
            took[side] += count / a_second
    return done[0] / took[0], done[1] / took[1]


def cell(box: Box) -> Action:
    """One call of the box, checked."""

    async def call() -> None:
        assert (await box.python(CELL)).stdout == "2\n"

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


@contextlib.asynccontextmanager
async def leased(boxes: Boxes, count: int) -> AsyncIterator[list[Box]]:
    """That many boxes at once, each of which has answered a call."""
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(boxes.lease()) for _ in range(count)]
        for box in held:
            await box.python(CELL)
        yield held


# ---------------------------------------------------------------------------------------------------- processes


def tree(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    with contextlib.suppress(OSError):
        for children in Path("/proc", str(pid), "task").glob("*/children"):
            for child in children.read_text().split():
                yield from tree(int(child))


def cpu_s(pids: list[int]) -> float:
    """Processor seconds of these processes, and of their children that have ended."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += sum(map(int, Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[11:15]))
    return total / TICKS


def pss_mib(pids: list[int]) -> float:
    """Memory of these processes; what several share is split between them."""
    kib = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path("/proc", str(pid), "smaps_rollup").read_text()
            kib += int(text.partition("\nPss:")[2].split()[0])
    return kib / 1024


def available_mib() -> float:
    """Memory that the machine could still give."""
    return int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) / 1024


def engine_pids() -> list[int]:
    """The engine's daemons and shims."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text().startswith(("dockerd", "containerd")):
                found.append(int(path.parent.name))
    return found


def our_containers(client: Any) -> list[str]:
    """The running containers of this process."""
    found = client.containers(filters={"label": f"agentgym.owner={owner()}"})
    return [container["Id"] for container in found]


def box_pids(kind: str) -> list[int]:
    """Every process inside our boxes, with the one that holds each up: bwrap itself, or a container's shim."""
    if kind == "bubblewrap":
        return [pid for pid in tree(os.getpid()) if pid != os.getpid()]
    client = connect()
    try:
        first = [client.inspect_container(name)["State"]["Pid"] for name in our_containers(client)]
    finally:
        client.close()
    shims = [int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1]) for pid in first]
    return [inner for shim in shims for inner in tree(shim)]


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
                figures["idle_box_pss_mib"] = pss_mib(pids) / count
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
            figures[f"episodes_per_s_{count}"], figures[f"fresh_episodes_per_s_{count}"] = await by_turns(
                ours, fresh, amount.seconds
            )
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


# ---------------------------------------------------------------------------------------------------- docker exec


async def docker_exec(sandbox: Sandbox, amount: Amount) -> Figures:
    """The same cells by the engine, in our own containers: latency, its processor time, and the rate on 1 and on 8.

    `beside` is the rate of our own calls into the same containers, in turns with it.
    """
    figures: Figures = {}
    async with sandbox.open(8) as boxes, leased(boxes, 8) as held:
        with engine_clients(8) as (clients, run):
            names = our_containers(clients[0])
            pairs: list[Action] = [
                partial(run, exec_once, client, name, AS_PROGRAM) for client, name in zip(clients, names, strict=True)
            ]
            spent = time.process_time() + cpu_s(engine_pids())
            taken = await milliseconds(pairs[0], amount.execs)
            spent = time.process_time() + cpu_s(engine_pids()) - spent
            figures |= {"call_p50_ms": percentile(taken, 50), "call_p99_ms": percentile(taken, 99)}
            figures["cpu_ms_per_call_1"] = spent / amount.execs * 1e3
            taken = await milliseconds(partial(run, exec_once, clients[0], names[0], LEAST), amount.execs)
            figures["least_p50_ms"] = percentile(taken, 50)
            for count in AT_ONCE:
                ours = [cell(box) for box in held[:count]]
                figures[f"beside_calls_per_s_{count}"], figures[f"calls_per_s_{count}"] = await by_turns(
                    ours, pairs[:count], amount.seconds
                )
    return figures


async def docker_episodes(sandbox: Docker, amount: Amount) -> Figures:
    """Episodes in a container of their own, all by the engine, in turns with ours; on 1 and on 8."""
    figures: Figures = {}
    for count in AT_ONCE:
        async with sandbox.open(count) as warm:
            async with leased(warm, count):
                pass
            with engine_clients(count) as (clients, run):
                theirs = [
                    partial(run, container_episode, client, sandbox.image or default_image()) for client in clients
                ]
                ours: list[Action] = [partial(episode, warm)] * count
                figures[f"beside_episodes_per_s_{count}"], figures[f"episodes_per_s_{count}"] = await by_turns(
                    ours, theirs, amount.seconds
                )
    return figures


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


def container_episode(client: Any, image: str) -> None:
    """A container, one command for each call, and its end."""
    limits = client.create_host_config(network_mode="none", read_only=True, cap_drop=["ALL"], pids_limit=128)
    made = client.create_container(
        image, ["sleep", "60"], entrypoint=[], host_config=limits, labels={"agentgym.owner": owner()}
    )
    try:
        client.start(made["Id"])
        for _ in range(CALLS_PER_EPISODE):
            exec_once(client, made["Id"], AS_PROGRAM)
    finally:
        client.remove_container(made["Id"], force=True, v=True)


# ---------------------------------------------------------------------------------------------------- the report


def goals(figures: Figures, kinds: list[str]) -> dict[str, Goal]:
    """What the sandbox is to reach, for the kinds and figures that there are."""
    made: dict[str, Goal] = {}
    limits = {
        "call_p50_ms": 0.3,
        "call_p99_ms": 5.0,
        "cpu_ms_per_call_8": 0.6,
        "reset_p50_ms": 3.0,
        "new_box_p50_ms": 200.0,
        "pool_lease_p50_ms": 1.0,
        "fork_100mb_p50_ms": 7.0,
        "idle_box_all_in_mib": 20.0,
    }
    for kind in kinds:
        for name, limit in limits.items():
            if f"{kind}_{name}" in figures:
                made[f"{kind}_{name}"] = at_most(figures[f"{kind}_{name}"], limit)
        for name in ("calls_per_s_8", "calls_per_s_32"):
            made[f"{kind}_{name}"] = at_least(figures[f"{kind}_{name}"], 3500)
        best = max(figures[f"{kind}_episodes_per_s_{count}"] for count in AT_ONCE)
        made[f"{kind}_episodes_per_s"] = at_least(best, 200)
    for name, ratio in ratios(figures).items():
        made[name] = at_least(ratio, 250 if "calls" in name else 50)
    return made


def ratios(figures: Figures) -> Figures:
    """Our containers over the engine's own way: with as many at once on both sides, and our best over one by one."""
    if "docker_exec_calls_per_s_1" not in figures:
        return {}
    made: Figures = {}
    for work, over in (("calls", "docker exec"), ("episodes", "docker exec in fresh containers")):
        ours, theirs = f"docker_exec_beside_{work}_per_s", f"docker_exec_{work}_per_s"
        for count in AT_ONCE:
            made[f"{work} over {over}, {count} at once"] = figures[f"{ours}_{count}"] / figures[f"{theirs}_{count}"]
        best = max(figures[f"{ours}_{count}"] for count in AT_ONCE)
        made[f"{work}, our best over {over} one by one"] = best / figures[f"{theirs}_1"]
    return made


async def measure(kind: str, sandbox: Sandbox, amount: Amount) -> Figures:
    """Every figure of one kind of box, its name before each."""
    made = await calls(sandbox, kind, amount)
    for part in (episodes, leases, forks):
        made |= await part(sandbox, amount)
    figures = {f"{kind}_{name}": value for name, value in made.items()}
    if isinstance(sandbox, Docker):
        engine = await docker_exec(sandbox, amount) | await docker_episodes(sandbox, amount)
        figures |= {f"docker_exec_{name}": value for name, value in engine.items()}
    return figures


def runnable(kinds: list[str], image: str | None) -> Iterator[tuple[str, Sandbox]]:
    """The kinds that run here; the others are named on stderr with the reason."""
    known: dict[str, tuple[Sandbox, Callable[[], str | None]]] = {
        "docker": (Docker(image=image), lambda: why_no_docker(image)),
        "bubblewrap": (Bubblewrap(), why_no_bubblewrap),
    }
    for kind in kinds:
        sandbox, why_not = known[kind]
        reason = why_not()
        if reason is None:
            yield kind, sandbox
        else:
            print(f"{kind} is left out: {reason}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="the last line on stdout is the report as JSON")
    parser.add_argument("--quick", action="store_true", help="a smaller run, of about a minute")
    parser.add_argument("--kinds", nargs="+", choices=["docker", "bubblewrap"], default=["docker", "bubblewrap"])
    parser.add_argument("--image", default=None, help="of the Docker boxes; by default our own")
    args = parser.parse_args()
    figures: Figures = {"cpus": float(os.cpu_count() or 0), "load": os.getloadavg()[0]}
    ran = dict(runnable(args.kinds, args.image))
    for kind, sandbox in ran.items():
        figures |= asyncio.run(measure(kind, sandbox, QUICK if args.quick else FULL))
    if "docker_exec_cpu_ms_per_call_1" in figures:
        theirs, ours = (figures[f"{name}_cpu_ms_per_call_1"] for name in ("docker_exec", "docker"))
        figures["cpu_of_docker_exec_over_ours"] = theirs / ours
    report(
        "sandbox",
        figures=figures,
        reference=REFERENCE,
        goals=goals(figures, list(ran)),
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
