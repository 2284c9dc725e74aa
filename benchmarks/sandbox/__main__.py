"""The code sandbox: calls, episodes, resets, forks, memory, many sandboxes, beside the same work by other means.

`python -m benchmarks.sandbox [--json] [--quick] [--kinds docker bubblewrap] [--image NAME] [--sandboxes N]
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

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agentgym.sandboxes.docker.docker import Docker, why_no_docker
from agentgym.sandboxes.docker.images.names import default_image
from agentgym.sandboxes.local.local import Bubblewrap, why_no_bubblewrap
from agentgym.sandboxes.protocol import SandboxSpec
from benchmarks.harness import report, report_parser
from benchmarks.sandbox.goals import NAMES, goals
from benchmarks.sandbox.measure import (
    Figures,
)
from benchmarks.sandbox.other_means import docker_exec, peer_alone, side_by_side
from benchmarks.sandbox.peer import Peer
from benchmarks.sandbox.sandboxes import FULL, QUICK, Amount, calls, episodes, forks, leases, many

REFERENCE: dict[str, float | str] = {
    "gVisor (ptrace), a call, ms": 1.6,
    "gVisor (ptrace), a new sandbox, ms": "340-450",
}
PROGRAMS = {"swerex": "benchmarks.sandbox.theirs_swerex", "inspect": "benchmarks.sandbox.theirs_inspect"}


async def measure(kind: str, spec: SandboxSpec, peers: Mapping[str, Peer], amount: Amount) -> Figures:
    """Every figure of one kind of sandbox, its name before each, and beside Docker's those of other means."""
    made = await calls(spec, kind, amount)
    for part in (episodes, leases, forks, many):
        made |= await part(spec, amount)
    figures = named(kind, made)
    if isinstance(spec, Docker):
        figures |= named("docker_exec", await docker_exec(spec, amount))
        for name, peer in peers.items():
            figures |= named(name, await peer_alone(peer, amount))
        figures |= await side_by_side(spec, peers, amount)
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


def runnable(kinds: Sequence[str], image: str | None) -> tuple[dict[str, SandboxSpec], dict[str, str]]:
    """The kinds that run here, and about each of the others why it is left out."""
    known: dict[str, tuple[SandboxSpec, Callable[[], str | None]]] = {
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
    parser = report_parser(__doc__ or "")
    parser.add_argument("--quick", action="store_true", help="a smaller run, of about a minute for each kind")
    parser.add_argument("--kinds", nargs="+", choices=["docker", "bubblewrap"], default=["docker", "bubblewrap"])
    parser.add_argument("--image", default=None, help="of the containers of all sides; by default our own")
    parser.add_argument("--sandboxes", type=int, default=None, metavar="N", help="how many are open at once")
    for flag, kit in (("--swe-rex", "swe-rex and aiohttp"), ("--inspect-ai", "inspect_ai")):
        parser.add_argument(flag, type=Path, default=None, metavar="VENV", help=f"an environment that has {kit}")
    args = parser.parse_args()
    amount = QUICK if args.quick else FULL
    amount = replace(amount, sandboxes=args.sandboxes or amount.sandboxes)
    figures: Figures = {"cpus": float(os.cpu_count() or 0), "load": os.getloadavg()[0]}
    ran, left_out = runnable(args.kinds, args.image)
    venvs = {"swerex": args.swe_rex, "inspect": args.inspect_ai} if "docker" in ran else {}
    with other_kits(venvs, args.image or default_image()) as (peers, notes):
        for kind, spec in ran.items():
            figures |= asyncio.run(measure(kind, spec, peers, amount))
    report(
        "sandbox",
        figures=figures,
        reference=REFERENCE | left_out | notes,
        goals=goals(figures),
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
