"""The command `agentgym view`: a local page on runs, in the browser."""

import os
import secrets
import socket
import sys
import webbrowser
from pathlib import Path

import tyro

from agentgym.cli.output import flush, say
from agentgym.errors import AgentGymError
from agentgym.types.transcript import printable


def view(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    host: str = "127.0.0.1",
    port: int = 0,
    token: bool = True,
    browser: bool = True,
) -> int:
    """Show runs and evaluations in the browser, also while they run: curves, tables, rollouts token by token.

    It prints the address of a page on this machine and serves it until Ctrl-C. The folders, which may be a stranger's,
    are only read: what it searches by is kept in the user's cache. The address holds a token, without which nobody is
    answered.

    For example:
    $ agentgym view runs
    $ agentgym view runs/chase_grpo/20260801-101500 runs/eval-chase
    $ agentgym view runs --port 8765 --no-browser

    Args:
        runs: Folders of runs or evaluations, or folders that have some below them; runs that begin later are found.
        host: The address to listen on; another one than this machine's lets others in the network ask, too.
        port: The port to listen on; 0 takes a free one.
        token: Ask for the token that the address holds.
        browser: Open the page in a browser where there is one.
    """
    from agentgym.view.guard import LOCAL
    from agentgym.view.runs import Runs
    from agentgym.view.search.indexing import Indexing
    from agentgym.view.server import application
    from agentgym.view.serving import address_of, listening_socket, serve

    if not runs:
        raise AgentGymError(
            "runs: name the folder of a run, or one that has runs below it, such as `agentgym view runs`"
        )
    for folder in runs:
        if not folder.is_dir():
            raise AgentGymError(
                f"runs: there is no folder {folder}; name the folder of a run, such as runs/RECIPE/TIME"
            )
    found = Runs(runs)
    if not found.all():
        named = printable(", ".join(map(str, runs)))
        sys.stderr.write(f"agentgym: no run in {named} yet; the page shows those that begin there\n")
    secret = secrets.token_urlsafe(24) if token else None
    listening, local = listening_socket(host, port), host in ("127.0.0.1", "localhost", "::1")
    if not token and not local:
        sys.stderr.write("agentgym: anybody who reaches this machine can read these runs; leave --no-token out\n")
    hosts = frozenset(LOCAL if local else (*LOCAL, host.lower(), socket.gethostname().lower()))
    address = address_of(listening, host, secret)

    def ready() -> None:
        say(address)
        flush()
        if browser and _has_screen():
            webbrowser.open(address)

    with Indexing() as indexing:
        serve(application(found, indexing, token=secret, hosts=hosts, numbers=not local), listening, ready=ready)
    return 0


def _has_screen() -> bool:
    """Whether a browser has a window to open; one within the terminal would take that over."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
