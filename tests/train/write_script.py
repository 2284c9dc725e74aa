"""Die by SIGKILL at the Nth moment of writing a step: `python write_script.py FOLDER STEP N [TEXT] [renames]`.

The moments are before each call that changes the disk, and once in the middle of each file. With `renames`, the file
system can't exchange two folders.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentgym.files import replace_folder
from agentgym.train import checkpoint

FOLDER, STEP, MOMENT = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
TEXT = sys.argv[4] if len(sys.argv) > 4 else f"step {STEP}"
passed = 0


def moment() -> None:
    global passed
    if passed == MOMENT:
        os.kill(os.getpid(), signal.SIGKILL)
    passed += 1


def before(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        moment()
        return function(*args, **options)

    return wrapped


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content[: len(content) // 2])
    moment()
    whole(path, content)


whole = checkpoint.write_file
vars(checkpoint)["write_file"] = write
for name in ("fsync", "mkdir", "rename", "replace", "rmdir"):
    vars(os)[name] = before(vars(os)[name])
vars(replace_folder)["_exchange"] = before((lambda *_: False) if "renames" in sys.argv else replace_folder._exchange)
checkpoint.write_step(FOLDER, STEP, {"state.pt": TEXT.encode() * 100})
