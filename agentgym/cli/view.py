"""The command `agentgym view`: serves a local page on runs for the browser."""

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
    """Show runs and evaluations in the browser, finished or not: curves, tables, and rollouts token by token.

    It prints the address of a page on this machine and serves it until Ctrl-C. The folders, which may come from a
    stranger, are only read: the search index is stored in the user's cache. The address contains a token, without
    which requests are refused.

    For example:
    $ agentgym view runs
    $ agentgym view runs/chase_grpo/20260801-101500 runs/eval-chase
    $ agentgym view runs --port 8765 --no-browser

    Args:
        runs: Folders of runs or evaluations, or folders that have some below them; runs that start later are found,
            too.
        host: The address to listen on; any address other than this machine's lets others on the network send requests.
        port: The port to listen on; 0 picks a free one.
        token: Require the token in the address.
        browser: Open the page in a browser if there is one.
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
        sys.stderr.write(f"agentgym: no run in {named} yet; the page shows runs that start there\n")
    secret = secrets.token_urlsafe(24) if token else None
    listening, local = listening_socket(host, port), host in ("127.0.0.1", "localhost", "::1")
    if not token and not local:
        sys.stderr.write(
            "agentgym: anybody who can reach this machine can read these runs; omit --no-token to prevent it\n"
        )
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
    """Return whether a browser can open a window; a text-mode browser would take over the terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
