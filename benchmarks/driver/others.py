"""Other kits' drivers for `benchmarks.driver`: a process of their own interpreter, which plays when it is told to."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from agentgym.chat.response_formats import HERMES
from agentgym.chat.tokenizer import HuggingFaceTokenizer

_ROOT = Path(__file__).parents[2]
_SLOW = frozenset({"trl"})


class Others:
    """The ways to play of the process; none where there is no process."""

    def __init__(self, process: "subprocess.Popen[str] | None" = None) -> None:
        self._process = process
        self.ways: list[str] = json.loads(self._line()) if process is not None else []
        self.slow = _SLOW

    def play(self, name: str) -> float:
        """Play every dialog in one way; CPU microseconds a turn."""
        assert self._process is not None
        assert self._process.stdin is not None
        print(name, file=self._process.stdin, flush=True)
        done = json.loads(self._line())
        return float(done["cpu_s"] / done["turns"] * 1e6)

    def _line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peers' process ended: {self._process.wait()}; what it said stands above")
        return line


@contextmanager
def playing(
    venv: Path | None, tokenizer: HuggingFaceTokenizer, dialogs: Mapping[str, Sequence[str]], *, group: int, calls: int
) -> Iterator[Others]:
    """Start the peers' process with these dialogs, `calls` calls in all; no ways where there is no environment."""
    if venv is None or not (venv / "bin" / "python").exists():
        yield Others()
        return
    with TemporaryDirectory() as folder:
        tokenizer.tokenizer.save_pretrained(folder)
        work = {
            "tokenizer": folder,
            "group": group,
            "calls": calls,
            "dialogs": {name: list(texts) for name, texts in dialogs.items()},
            "ids": {name: [list(tokenizer.encode(text)) for text in texts] for name, texts in dialogs.items()},
            "response_template": HERMES,
            "end": tokenizer.tokenizer.eos_token,
        }
        (Path(folder) / "work.json").write_text(json.dumps(work))
        command = [str(venv / "bin" / "python"), "-m", "benchmarks.driver.theirs", f"{folder}/work.json"]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=_ROOT, text=True, stdin=pipe, stdout=pipe) as process:
            try:
                yield Others(process)
            finally:
                process.kill()
