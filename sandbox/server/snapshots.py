"""The calls that transfer a whole working folder to the host and back, in parts."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress

from .background import BACKGROUND
from .call import Capture
from .children import Child, start
from .files import empty_folder, open_below, words_of_error
from .frames import check_time, milliseconds_until, wait, write_fully, zero
from .limits import CHANNEL, REMOVE_S, Refused
from .packing import pack, unpack
from .process_tree import go_on, kill_all_but, stop_all
from .sessions import Session, Sessions
from .stillness import WOKEN, Stillness

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PART = 1 << 20


class Cancelled(Exception):
    """The host canceled the call."""


class Snapshots(Sessions):
    """Packs or unpacks a session's folder in a process under limits, while the rest of the sandbox is stopped."""

    def snapshot(self, session: Session, envelope: dict[str, Any], _body: bytearray) -> Any:
        """Send the folder as a tar file in parts; the host acknowledges each."""

        def run() -> None:
            with os.fdopen(1, "wb", closefd=False) as stream:
                pack(open_below(session.work, []), stream)

        def carry(child: Child, deadline: float) -> None:
            part = bytearray(PART)
            for number in range(1 << 40):
                size = self.read_part(child.out, part, envelope["id"], deadline)
                if not size:
                    return
                self.exchange(envelope["id"], number, memoryview(part)[:size])
                zero(part)

        return self.aside(session, run, carry, envelope)

    def restore(self, session: Session, envelope: dict[str, Any], _body: bytearray) -> Any:
        """Empty the folder, request a tar file in parts, and unpack it; after any error, the folder is left empty."""

        def run() -> None:
            with os.fdopen(CHANNEL, "rb", closefd=False) as stream:
                unpack(session.work, [], stream)
                while stream.read(PART):
                    pass

        def carry(child: Child, deadline: float) -> None:
            assert child.channel is not None
            for number in range(1 << 40):
                check_time(deadline)
                part = self.exchange(envelope["id"], number)
                if not part:
                    break
                write_fully(child.channel.fd, [part], deadline)
                zero(part)
            child.channel.end.shutdown(1)

        return self.aside(session, run, carry, envelope, anew=True)

    def exchange(self, call: int, number: int, part: memoryview | bytes = b"") -> bytearray:
        """Send one part and return the host's answer.

        Raises:
            Cancelled: If the host cancels the call.
        """
        self.host.write({"id": call, "part": number}, [part])
        while True:
            envelope, body = self.hear_host(call)
            if envelope.get("id") == call and envelope.get("answer") == number:
                return body

    def hear_host(self, call: int) -> tuple[dict[str, Any], bytearray]:
        """Return the host's next frame; frames for background programs have already been handled.

        Raises:
            Cancelled: If the host cancels the call.
        """
        envelope, body = self.host.read(None)
        if "process" in envelope:
            BACKGROUND.hear(self.host, envelope, body)
            zero(body)
        elif envelope.get("id") == call and envelope.get("op") == "cancel":
            raise Cancelled
        return envelope, body

    def read_part(self, fd: int, part: bytearray, call: int, deadline: float) -> int:
        """Fill the part from a pipe; return 0 at its end.

        Raises:
            TimeoutError: At the deadline.
            Cancelled: If the host cancels the call.
        """
        size = 0
        poll = select.poll()
        for each in (fd, self.host.fd):
            poll.register(each, select.POLLIN)
        while size < len(part):
            check_time(deadline)
            ready = {self.host.fd} if self.host.pending else {fd for fd, _ in poll.poll(milliseconds_until(deadline))}
            if self.host.fd in ready:
                self.hear_host(call)
            if fd not in ready:
                continue
            count = os.readv(fd, [memoryview(part)[size:]])
            if not count:
                break
            size += count
        return size

    def aside(
        self,
        session: Session,
        run: Callable[[], None],
        carry: Callable[[Child, float], None],
        envelope: dict[str, Any],
        *,
        anew: bool = False,
    ) -> Any:
        """Call `run` in a new process and, at the same time, `carry` here.

        `run` packs or unpacks the folder, and `carry` moves the data between that process and the host. Everything else
        in the sandbox is stopped meanwhile. If `anew`, the working folder is emptied first, and again on failure.

        Raises:
            Refused: If the process fails, in which case the message is the process's own; if the host cancels the call;
                if the time limit is exceeded; or if a stopped process was woken meanwhile.
        """

        def guarded() -> None:
            try:
                run()
            except (OSError, Refused, MemoryError, RecursionError) as error:
                os.write(2, words_of_error(error).encode("utf-8", "replace")[:1000])
                os._exit(1)
            os._exit(0)

        deadline: float = envelope["deadline"]
        bystanders = stop_all()
        stillness = Stillness()
        child = None
        why: str | None = None
        try:
            try:
                if anew:
                    empty_folder(session.work, deadline)
                child = start(guarded, session.work, self.limits, 0.0, self.host.fd, channel=True, sealed=True)
                carry(child, deadline)
            except Cancelled:
                why = "the host canceled the call"
            except TimeoutError:
                why = f"it took over {envelope['timeout_s']:g} s"
            except BrokenPipeError:
                pass  # The process ended early and reports why.
            if child is not None:
                why = why or words_of(child, deadline)
                if stillness.broken(by_others_than=child.pid):
                    why = why or WOKEN
        finally:
            if child is not None:
                child.close()
            kill_all_but(self.bystanders(bystanders))
            if anew and why != "":
                with suppress(TimeoutError):
                    empty_folder(session.work, time.monotonic() + REMOVE_S)
            go_on(bystanders)
        if why:
            raise Refused(why)
        return {}, []


def words_of(child: Child, deadline: float) -> str:
    """Return why the process failed, or "" if it did not."""
    try:
        wait(child.exit, select.POLLIN, deadline)
    except TimeoutError:
        return "it took too long"
    code = child.exited()
    said = Capture()
    try:
        said.read(child.err)
    except BlockingIOError:
        pass
    words = b"".join(map(bytes, said.parts())).decode("utf-8", "replace")
    if code < 0:
        return (
            f"its process was ended by {signal.Signals(-code).name}, by code in the sandbox or because memory ran out"
        )
    return "" if code == 0 else words or f"its process ended with exit code {code}"
