"""Heartbeats of a Docker engine's clients, and the search for clients that ended without removing their sandboxes.

Each client has one empty volume in the engine, whose name contains the client's token and a time. Every few seconds,
the client replaces the volume with a new one. The engine is the only thing that all of its clients share: a host name
or a process id means something else in another container, or after a pod has moved.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from agentgym.machine.process_identity import owner, state_of
from agentgym.sandboxes.docker.images.names import INSIDE

if TYPE_CHECKING:
    import docker

BEAT_S = 20.0
DEAD_S = 300.0
"""Age of a heartbeat, in seconds of the engine's clock, after which its client counts as silent."""
LATE_S = 3 * BEAT_S
"""Seconds between two heartbeats after which a delay is reported."""
LOOKS_S = 50.0
"""Minimum seconds between two checks that must both find a client silent before it counts as ended.

A single check isn't enough, because the client's machine may have been suspended.
"""
END_S = 10
OWNER_LABEL, RUN_LABEL = "agentgym.owner", "agentgym.run"
FIRST_WORD = "agentgym-alive-"
BEAT_LABEL = "agentgym.alive"
"""Label of the heartbeat volumes; their RUN_LABEL is the client's token."""


@dataclass(slots=True)
class Traces:
    """The containers, volumes and heartbeat of one client in an engine."""

    who: str
    beat: int = 0
    """Time of the client's last heartbeat, in seconds of the engine's clock.

    Without a heartbeat, it is the time of the client's newest container.
    """
    containers: list[dict[str, Any]] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)

    @property
    def holds_a_wire(self) -> bool:
        """Whether the client has a running sandbox that is connected by a socket.

        Such a sandbox ends with its client, so it proves that the client is alive.
        """
        return any(
            container["State"] == "running" and INSIDE in [mount["Destination"] for mount in container["Mounts"]]
            for container in self.containers
        )


def engine_time(client: "docker.APIClient") -> int:
    """Return the engine's time in seconds since 1970."""
    answer = client.get(f"{client.base_url}/_ping", timeout=client.timeout)
    return int(parsedate_to_datetime(answer.headers["Date"]).timestamp())


def traces(client: "docker.APIClient") -> dict[str, Traces]:
    """Return the traces of each client in the engine, keyed by the client's token."""
    found: dict[str, Traces] = {}
    for container in client.containers(all=True, filters={"label": [OWNER_LABEL, RUN_LABEL]}):
        labels = container["Labels"]
        if not labels[RUN_LABEL]:
            continue  # A container that somebody else made from one of our images.
        of = found.setdefault(labels[RUN_LABEL], Traces(labels[OWNER_LABEL]))
        of.containers.append(container)
    beats: dict[str, int] = {}
    for volume in client.volumes(filters={"label": BEAT_LABEL})["Volumes"] or ():
        labels = volume["Labels"]
        of = found.setdefault(labels[RUN_LABEL], Traces(labels[OWNER_LABEL]))
        of.volumes.append(volume["Name"])
        beats[labels[RUN_LABEL]] = max(beats.get(labels[RUN_LABEL], 0), _time_in(volume["Name"]))
    for token, of in found.items():
        of.beat = beats.get(token) or max(int(container["Created"]) for container in of.containers)
    return found


class Lookout:
    """Finds the clients that have ended.

    If this machine can see whether a client's process has ended, one check is enough. Any other client counts as ended
    if two checks, some time apart, find it silent with the same heartbeat. A client is silent if its heartbeat is too
    old and it has no running sandbox that is connected by a socket.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silent: dict[str, tuple[int, float]] = {}
        """The silent clients, keyed by token.

        Each value is the client's last heartbeat, and the time, on the local clock, of the first check that found the
        client silent with that heartbeat.
        """

    def ended(self, found: dict[str, Traces], now: int) -> list[str]:
        """Return the tokens of the clients that have ended.

        Args:
            found: The traces of each client, keyed by its token.
            now: The engine's time.
        """
        states = {token: state_of(of.who) for token, of in found.items()}
        silent = {
            token: found[token].beat
            for token, state in states.items()
            if state == "unknown" and len(found[token].who.split("/")) == 5 and now - found[token].beat > DEAD_S
            if not found[token].holds_a_wire
        }
        at = self._clock()
        self._silent = {
            token: (beat, seen[1] if (seen := self._silent.get(token)) and seen[0] == beat else at)
            for token, beat in silent.items()
        }
        gone = [token for token, (_, since) in self._silent.items() if at - since >= LOOKS_S]
        return [token for token, state in states.items() if state == "ended"] + gone

    @property
    def silent(self) -> Iterable[str]:
        """The tokens of the clients that the last check found silent."""
        return self._silent.keys()


class Heart:
    """The heartbeat of one client, sent from a separate thread so that a busy event loop doesn't stop it."""

    def __init__(
        self,
        token: str,
        client: Callable[[], "docker.APIClient"],
        failed: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up the heartbeat without starting it.

        Args:
            token: The client's token.
            client: Returns the engine's API client.
            failed: Called with the error of the first missed or late heartbeat, and not again until after the next
                good one.
            clock: The clock that measures delays, in seconds.
        """
        self._token, self._client, self._failed, self._clock = token, client, failed, clock
        self._volume: str | None = None
        self._missing = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._changing = threading.Lock()
        """Locked by `start` and `stop`, because a pool can be closed while an interrupted `start` is running."""

    def start(self) -> None:
        """Send a heartbeat now, and then one every few seconds.

        A second call, or a call after `stop`, does nothing.
        """
        with self._changing:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._go_on, name="agentgym-heartbeat", daemon=True)
                try:
                    self.beat()
                finally:
                    self._thread.start()

    def beat(self) -> None:
        """Create a volume with the engine's time in its name, and remove the previous one."""
        client = self._client()
        name = f"{FIRST_WORD}{self._token}-{engine_time(client)}"
        if name == self._volume:
            return
        labels = {BEAT_LABEL: "yes", RUN_LABEL: self._token, OWNER_LABEL: owner()}
        client.create_volume(name, labels=labels)
        last, self._volume = self._volume, name
        if last is not None:
            remove_volume(client, last)

    def stop(self) -> None:
        """Stop the heartbeat and remove its volume; the engine's errors propagate."""
        self._stop.set()
        with self._changing:
            if self._thread is not None:
                self._thread.join()
            if self._volume is not None:
                remove_volume(self._client(), self._volume)
                self._volume = None

    def _go_on(self) -> None:
        last = self._clock()
        while not self._stop.wait(BEAT_S):
            why: Exception | None = None
            try:
                self.beat()
            except Exception as error:  # Not fatal: if the engine is down, no other client can read its time.
                why = error
            now = self._clock()
            if why is None:
                if now - last > LATE_S:
                    why = TimeoutError(
                        f"{now - last:.0f} s without a heartbeat: this process or the engine was delayed"
                    )
                last = now
            if why is not None and not self._missing:
                self._failed(why)
            self._missing = why is not None


@contextmanager
def lent_labels(client: "docker.APIClient") -> Iterator[dict[str, str]]:
    """Yield labels for temporary containers, which no sweep removes before the `with` block ends.

    The labels belong to a client whose heartbeat is sent until then.
    """
    token = secrets.token_hex(6)
    heart = Heart(token, lambda: client, lambda error: None)
    try:
        heart.start()
        yield {OWNER_LABEL: owner(), RUN_LABEL: token}
    finally:
        heart.stop()


def remove_volume(client: "docker.APIClient", name: str) -> None:
    """Remove a volume if it exists."""
    from docker.errors import NotFound

    with suppress(NotFound):
        client.remove_volume(name)


def remove_container(client: "docker.APIClient", container: str) -> None:
    """Remove a container with its volumes, unless it is gone or already being removed."""
    from docker.errors import APIError

    try:
        client.remove_container(container, v=True, force=True)
    except APIError as error:
        if "state improper" in str(error):  # Podman's error if a container is just ending by itself.
            client.wait(container, timeout=END_S)
            client.remove_container(container, v=True, force=True)
        elif error.status_code not in (404, 409):  # Gone, or being removed.
            raise


def _time_in(name: str) -> int:
    last = name.rpartition("-")[2]
    return int(last) if last.isdigit() else 0
