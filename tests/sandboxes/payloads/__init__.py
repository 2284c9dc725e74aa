"""What hostile code does to a sandbox: five groups, each payload with the statuses that it may report.

An attack prints ESCAPED, and what it reached, where it succeeds; `test_hostile` holds that none of them does.
Each is a file of its own in the folder of its group, Python or shell by its ending. Its first lines say what is right
for it, in TOML: the fields of `Payload`, and `uses`, the files of shared/ that come before it. Those that no text file
holds stand here; `file_calls` has those whose point is a call of the host.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from tests.sandboxes.payloads.file_calls import FILES
from tests.sandboxes.payloads.payload import ANYWHERE, ENDED, FileCall, Group, Payload

__all__ = ["ANYWHERE", "PAYLOADS", "FileCall", "Payload"]

HERE = Path(__file__).parent
GENERATED = [
    Payload(name="a lone surrogate in the code", group="exhaustion", code="print('\ud800')", right=ENDED, lost=False),
    Payload(name="NUL in the code", group="exhaustion", code="print('a\0b')", right=("error",), lost=False),
    Payload(name="deep parentheses", group="exhaustion", code="(" * 200_000, right=("error",), lost=False),
    Payload(name="a deep expression", group="exhaustion", code="-" * 300_000 + "1", right=("error", "killed")),
]


def load(path: Path) -> Payload:
    """Return the payload of a file."""
    lines = path.read_text().splitlines()
    head = [line for line in lines if line.startswith("#:")]
    given: dict[str, Any] = tomllib.loads("\n".join(line.removeprefix("#:") for line in head))
    shared = [(HERE / f"shared/{name}.py").read_text() for name in given.pop("uses", ())]
    for name, kind in (("right", tuple), ("following", tuple), ("kinds", frozenset)):
        if name in given:
            given[name] = kind(given[name])
    code = "".join([*shared, "\n".join(lines[len(head) :]).lstrip("\n")])
    return Payload(group=path.parent.name, code=code, shell=path.suffix == ".sh", **given)  # type: ignore[arg-type]


def in_files() -> Iterator[Payload]:
    """Group by group, each by the names of its files."""
    for group in get_args(Group):
        for path in sorted((HERE / group).glob("*.*")):
            yield load(path)


PAYLOADS = [*in_files(), *GENERATED, *FILES]
