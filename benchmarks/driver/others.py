"""Other kits' drivers for `benchmarks.driver`: a process with its own interpreter, which runs them on request."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from agentgym.chat.tokenizer import HuggingFaceTokenizer
from benchmarks.peers.turns import Worker, peers_python, worker

HERMES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "content_args": {"allow_non_json": True},
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
"""The Hermes format for transformers' `parse_response`, with which other kits read replies."""


class Others:
    """The ways that the other kits' process can run the dialogs; empty if there is no process."""

    def __init__(self, peers: Worker | None = None) -> None:
        self._peers = peers
        self.ways: list[str] = [] if peers is None else peers.start()

    def play(self, name: str) -> float:
        """Run every dialog in one way, and return the CPU microseconds per turn."""
        assert self._peers is not None
        done = self._peers.ask(name)
        return float(done["cpu_s"] / done["turns"] * 1e6)


@contextmanager
def playing(
    venv: Path | None, tokenizer: HuggingFaceTokenizer, dialogs: Mapping[str, Sequence[str]], *, group: int, calls: int
) -> Iterator[Others]:
    """Start the other kits' process with these dialogs, which have `calls` calls in total.

    Yields:
        The process's ways to run them; none if the environment doesn't exist.
    """
    python = peers_python(venv)
    if python is None:
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
        file = Path(folder) / "work.json"
        file.write_text(json.dumps(work))
        with worker(python, "benchmarks.driver.theirs", {"file": str(file)}) as started:
            yield Others(started)
