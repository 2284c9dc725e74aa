"""The code sandbox: calls, episodes, resets, forks, memory and many sandboxes, compared with other ways.

`python -m benchmarks.sandbox [--json] [--quick] [--kinds docker bubblewrap] [--image NAME] [--sandboxes N]
[--swe-rex VENV] [--inspect-ai VENV]`

A call is one Python cell (`1 + 1`) in a waiting interpreter, and its result. An episode is a lease, eight calls,
and the verified reset that follows. Other ways get the same results in the same run, in turns with ours, with as many
at once and with the same image:

- `docker_exec`: Docker's API, not its command line, with a new Python for each call. `true` is the least work that
  a `docker exec` can do.
- `swerex`, if its environment is named: SWE-ReX's server in the container. A call is a new Python by its `execute`
  (`program`), or a line for a Python that waits in its shell session (`session`). Its episodes use `program`, which
  has no session to start.
- `inspect`, if its environment is named: inspect_ai's docker sandbox. A call is a new Python by its `exec`.

These ways have no reset: their episode is a new container, eight calls and the container's end. So there are two
comparisons. The first is of equal work: a new Python by our `exec` and by theirs (`programs`), a cell and a line of
SWE-ReX's session (`sessions`), and on both sides a new container, eight new Pythons and the container's end (`new
containers`). The second is a user's gain: our cells (`calls`) and our episodes with a reset (`episodes`) divided by the
fastest of the other ways.

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
    """Return the results of one kind of sandbox, prefixed with its name, and for Docker also those of other ways."""
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
    """Return the results with a prefix before their names."""
    return {f"{prefix}_{name}": value for name, value in figures.items()}


@contextlib.contextmanager
def other_kits(venvs: Mapping[str, Path | None], image: str) -> Iterator[tuple[dict[str, Peer], dict[str, str]]]:
    """Start the other kits that can run here.

    Yields:
        The kits that run, and a note for the report about each kit, which says why one is left out.
    """
    with contextlib.ExitStack() as stack:
        peers: dict[str, Peer] = {}
        notes: dict[str, str] = {}
        for name, venv in venvs.items():
            if venv is None:
                notes[NAMES[name]] = "left out: no environment was given"
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
    """Return the kinds of sandbox that can run here, and for each of the others why it is left out."""
    known: dict[str, tuple[SandboxSpec, Callable[[], str | None]]] = {
        "docker": (Docker(image=image), lambda: why_no_docker(image)),
        "bubblewrap": (Bubblewrap(), why_no_bubblewrap),
    }
    why_not = {kind: "not requested" for kind in known if kind not in kinds}
    why_not |= {kind: reason for kind in kinds if (reason := known[kind][1]()) is not None}
    for kind, reason in why_not.items():
        print(f"{kind} is left out: {reason}", file=sys.stderr)
    ran = {kind: known[kind][0] for kind in kinds if kind not in why_not}
    return ran, {kind: f"left out: {reason}" for kind, reason in why_not.items()}


def main() -> None:
    parser = report_parser(__doc__ or "")
    parser.add_argument("--quick", action="store_true", help="do a smaller run, of about a minute per kind")
    parser.add_argument("--kinds", nargs="+", choices=["docker", "bubblewrap"], default=["docker", "bubblewrap"])
    parser.add_argument("--image", default=None, help="image of all sides' containers (default: agentgym's)")
    parser.add_argument("--sandboxes", type=int, default=None, metavar="N", help="sandboxes that are open at once")
    for flag, kit in (("--swe-rex", "swe-rex and aiohttp"), ("--inspect-ai", "inspect_ai")):
        parser.add_argument(flag, type=Path, default=None, metavar="VENV", help=f"virtual environment with {kit}")
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
