"""Costs of `agentgym view`: storing its data, pages of 100,000 rollouts, and a rollout of 200,000 tokens.

A server runs as a separate process and is queried as by a browser; the least of several runs of each request counts.
The reference is the same page of the table as one plain SQLite query, without a server and without JSON.

`python -m benchmarks.view [--json] [--rollouts N] [--seed N]`
"""

import importlib.util
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentgym.errors import Failure
from agentgym.store.schema import FILE
from agentgym.store.vocabulary import TokenBytes
from agentgym.store.writer import RolloutWriter
from agentgym.types.completion import Version
from agentgym.types.messages import Message
from agentgym.types.rollout import Group, Rollout, Segment, Turn
from benchmarks.harness import at_most, report, report_parser
from benchmarks.store import kept_rollouts, step_of

RUNS = 5
"""Number of times that each request is made; the least time counts."""
ROLLOUTS = 100_000
TOKENS = 200_000
"""Tokens of the longest rollout."""
STEPS, FIGURES = 5_000, 95
"""Steps of the run and metrics of each step, for its curves."""
A_STEP, GROUP = 256, 8
"""Rollouts per step and per group."""
VOCABULARY = 151_936
SERVE = """import os; os.environ["XDG_CACHE_HOME"] = "{folder}/.cache"
from agentgym.cli.main import main; main(["view", "{folder}", "--no-browser", "--no-token"])"""
PAGES = {
    "first_page": "rollouts?limit=200",
    "last_page": "rollouts?limit=200&offset={last}",
    "filtered_page": "rollouts?limit=200&phase=train&step_from=3&reward_from=0.5&tool_errors=1",
    "sorted_page": "rollouts?limit=200&sort=tokens&order=desc",
    "sorted_by_reward_page": "rollouts?limit=200&sort=reward&order=desc",
    "suspicious_page": "rollouts?limit=200&suspicious=1",
    "searched_page": "rollouts?limit=200&q=needle",
    "tasks_page": "tasks?limit=200&sort=gain&order=desc",
    "failures_page": "failures",
    "histogram": "reward-histogram",
    "run": "",
    "state": "state",
    "metrics": "metrics",
    "long_rollout": "rollouts/{long}",
    "long_rollout_first_tokens": "rollouts/{long}/tokens?count=4000",
    "long_rollout_last_tokens": "rollouts/{long}/tokens?from=196000&count=4000",
}
"""Requests about a run, by the name of their result."""
SEEN = {
    "curves": ("", "[data-metric=reward] path"),
    "table": ("rollouts", "[role=row]:not(.waiting) [role=gridcell] a"),
    "rollout": ("rollout/{long}", ".message"),
    "tokens": ("rollout/{long}?view=tokens", ".tokens [data-i]"),
}
"""Pages that a browser opens, and the selector of an element that shows that the page is drawn."""


def words_of(rng: np.random.Generator) -> list[str]:
    """Return a vocabulary of words, which texts repeat."""
    return [rng.integers(97, 123, n, np.uint8).tobytes().decode() for n in rng.integers(2, 9, 5000)]


def rollout(rng: np.random.Generator, words: Sequence[str], number: int, *, tokens: int, turns: int) -> Rollout:
    """Return a rollout of one segment, with half of each turn sampled and a word of text per three tokens.

    Some rollouts failed, some have tool errors.
    """
    size = tokens // turns
    sampled, made = np.zeros(tokens, np.bool_), list[Turn]()
    chosen = iter(rng.zipf(1.3, tokens) % len(words))

    def text(count: int) -> str:
        return " ".join(words[next(chosen)] for _ in range(count))

    for turn in range(turns):
        start, stop = turn * size + size // 2, (turn + 1) * size
        sampled[start:stop] = True
        call = {"type": "function", "function": {"name": "bash", "arguments": {"cmd": text(3)}}, "id": f"call{turn}"}
        said = Message(role="assistant", content=text(size // 6), tool_calls=[call])  # type: ignore[list-item]
        answer = Message(role="tool", content=text(size // 6), name="bash", tool_call_id=f"call{turn}")
        made.append(
            Turn(
                start=start,
                stop=stop,
                finish_reason="stop",
                versions=(Version(0, number // A_STEP),),
                message=said,
                env_messages=(answer,),
                seconds=0.5,
                env_seconds=0.25,
                asked_at=0.75 * turn,
                number=turn,
            )
        )
    needle = " needle" if number % 1000 == 0 else ""
    segment = Segment(
        index=0,
        parent=None,
        kind="root",
        token_ids=(rng.zipf(1.2, tokens) * 7919) % VOCABULARY,
        sampled=sampled,
        logprobs=np.where(sampled, -rng.random(tokens, np.float32), 0),
        turns=tuple(made),
        prompt_messages=(Message(role="user", content=text(20) + needle),),
    )
    failed = number % 50 == 49
    group = f"task-{number // GROUP % 2000}"
    where = f"File \"env.py\", line {number % 7 + 1}, in step\n    boom()\nKeyError: 'x'"
    return Rollout(
        rollout_id=f"{group}/{number % GROUP}",
        group_id=group,
        segments=(segment,),
        reward=None if failed else round(float(rng.random()), 3),
        stop_reason="error" if failed else "answer",
        failure=Failure(type="EnvError", message="KeyError: 'x'", where="Env.step", traceback=where)
        if failed
        else None,
        metrics={"seconds": 3.0 + number % 13, "tool_errors": float(number % 3 == 0), "tool_calls": float(turns)},
    )


def fill(folder: Path, count: int, seed: int) -> int:
    """Write a run of `count` rollouts with the real writer, then a long one; return the number of the long one."""
    rng = np.random.default_rng(seed)
    words = words_of(rng)
    (folder / "settings.json").write_text(
        '{"settings": {"steps": 1000, "recipe": "bench"}, "versions": {}, "envs": {}}'
    )
    names = ["reward", *(f"group/figure_{number}" for number in range(1, FIGURES))]
    values = rng.random((STEPS, FIGURES)).tolist()
    lines = [json.dumps({"step": step, **dict(zip(names, values[step], strict=True))}) for step in range(STEPS)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    with RolloutWriter(folder, token_bytes=token_bytes) as writer:
        for step, first in enumerate(range(0, count, A_STEP)):
            numbers = range(first, min(first + A_STEP, count))
            played = [rollout(rng, words, number, tokens=240, turns=3) for number in numbers]
            writer.add([Group(group_id=of[0].group_id, rollouts=of) for of in parts(played, GROUP)], step=step)
            writer.add_step([made for of in played for made in step_of(of)], step=step)
            if step % 8 == 0:
                writer.flush()  # else everything that waits to be written stays in memory
        long = rollout(rng, words, count, tokens=TOKENS, turns=100)
        writer.add([Group(group_id=long.group_id, rollouts=(long,))], step=step + 1)
    return count + 1


def parts(rollouts: Sequence[Rollout], size: int) -> list[tuple[Rollout, ...]]:
    """Split the rollouts into tuples of `size`."""
    return [tuple(rollouts[first : first + size]) for first in range(0, len(rollouts), size)]


def token_bytes(model: str, ids: Sequence[int]) -> Mapping[int, bytes]:
    """Return the bytes of tokens, like a tokenizer's table."""
    return {token: b"tok%d" % token for token in ids}


def write_cpu_ms(rollouts: Sequence[Rollout], names: TokenBytes | None, before: Sequence[Rollout] = ()) -> float:
    """Return the CPU ms, all threads, of storing one of the rollouts and its step, the least of several runs."""
    found = []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as folder, RolloutWriter(Path(folder), token_bytes=names) as writer:
            _keep(writer, before)
            began = time.process_time()
            _keep(writer, rollouts)
            found.append((time.process_time() - began) * 1e3 / len(rollouts))
    return min(found)


def _keep(writer: RolloutWriter, rollouts: Sequence[Rollout]) -> None:
    for step, part in enumerate(parts(rollouts, 16)):
        writer.add([Group(group_id=one.group_id, rollouts=(one,)) for one in part], step=step)
        writer.add_step([made for one in part for made in step_of(one)], step=step)
    writer.flush()


def in_text(rollouts: Sequence[Rollout], seed: int) -> list[Rollout]:
    """Return the rollouts with ids as frequent as words of a text.

    A few ids are most of it, and new ones keep appearing.
    """
    rng = np.random.default_rng(seed)
    return [
        replace(
            one,
            segments=tuple(
                replace(s, token_ids=(rng.zipf(1.2, len(s.token_ids)) * 7919) % VOCABULARY) for s in one.segments
            ),
        )
        for one in rollouts
    ]


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int]]:
    """Start a server on the folder, and yield its address and its process id."""
    code = SERVE.format(folder=folder)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.terminate()
        process.wait()


def asked(address: str) -> tuple[float, float, int]:
    """Return the seconds of the first request and of the fastest, and the bytes of the response."""
    found, size = [], 0
    for _ in range(RUNS):
        began = time.perf_counter()
        with urllib.request.urlopen(address) as answer:
            size = len(answer.read())
        found.append(time.perf_counter() - began)
    return found[0], min(found), size


def peak_mib(process: int) -> float:
    """Return the most memory that a process has had so far, in MiB (Linux)."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def index_all(folder: Path) -> float:
    """Return the CPU seconds of indexing all texts."""
    from agentgym.view.runs import run_of
    from agentgym.view.search.index import SearchIndex

    (cache := folder / ".cache/agentgym/search").mkdir(parents=True, mode=0o700)
    index = SearchIndex(run_of(folder.resolve()), cache)
    began = time.process_time()
    while index.advance():
        pass
    return time.process_time() - began


def plain_query_s(folder: Path) -> float:
    """Return the seconds of the first page as one query, without counting the rows."""
    sql = "SELECT number, phase, step, group_id, reward, turns, tokens FROM rollouts ORDER BY number LIMIT 200"
    found = []
    for _ in range(RUNS):
        began = time.perf_counter()
        connection = sqlite3.connect(f"file:{folder / FILE}?mode=ro", uri=True)
        connection.execute(sql).fetchall()
        connection.close()
        found.append(time.perf_counter() - began)
    return min(found)


def page_figures(folder: Path, count: int, long: int) -> dict[str, float]:
    """Return the seconds of each request, and the server's memory before and after all of them."""
    from agentgym.view.runs import run_of

    figures: dict[str, float] = {}
    with served(folder) as (address, process):
        figures["server_mib_before"] = peak_mib(process)
        key = run_of(folder.resolve()).key
        for name, path in PAGES.items():
            path = path.format(last=count - 200, long=long)
            first, least, size = asked(f"{address}api/runs/{key}{'/' if path else ''}{path}")
            figures |= {f"{name}_s": least, f"{name}_first_s": first, f"{name}_kib": size / 1024}
        figures["server_mib"] = peak_mib(process)
    return figures


def seen_in_browser(folder: Path, long: int) -> dict[str, float]:
    """Return the seconds until a page in Chromium is drawn and responsive, of the first and of the fastest run.

    Each run has a new browser profile. The browser's own start is not counted. Returns {} if playwright or Chromium
    is missing.
    """
    from agentgym.view.runs import run_of

    program = shutil.which("chromium")
    if program is None or importlib.util.find_spec("playwright") is None:
        return {}
    from playwright.sync_api import sync_playwright

    figures: dict[str, float] = {}
    key = run_of(folder.resolve()).key
    with served(folder) as (address, _), sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, (path, drawn) in SEEN.items():
            found = []
            for _ in range(RUNS):
                page = chromium.new_context().new_page()
                began = time.perf_counter()
                page.goto(f"{address}#/{key}/{path.format(long=long)}")
                page.wait_for_selector(drawn)
                page.evaluate("() => new Promise(requestAnimationFrame)")  # the page is free to respond to the user
                found.append(time.perf_counter() - began)
                page.context.close()
            figures |= {f"{name}_seen_s": min(found), f"{name}_seen_first_s": found[0]}
        chromium.close()
    return figures


def main() -> None:
    parser = report_parser(__doc__ or "")
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    kept = kept_rollouts(args.seed)
    texts = in_text(kept, args.seed)
    figures = {
        "write_cpu_ms": write_cpu_ms(texts, token_bytes),
        "write_known_cpu_ms": write_cpu_ms(texts, token_bytes, before=texts),
        "write_without_tokens_cpu_ms": write_cpu_ms(texts, None),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        long = fill(folder, args.rollouts, args.seed)
        figures["index_cpu_ms"] = index_all(folder) * 1e3 / long
        figures["index_share_of_store"] = _size(folder, ".cache/agentgym/search/") / _size(folder, "rollouts")
        figures |= page_figures(folder, args.rollouts, long)
        seen = seen_in_browser(folder, long)
        reference: dict[str, float | str] = {"plain_query_s": plain_query_s(folder)}
    if not seen:
        reference["browser"] = "not measured: no playwright, or no chromium"
    figures |= seen
    pages = [name for name in PAGES if not name.startswith("long")]
    goals = {
        "CPU ms of keeping a rollout": at_most(figures["write_cpu_ms"], 1.0),
        "first page, s": at_most(figures["first_page_first_s"], 1.0),
        "slowest page, s": at_most(max(figures[f"{page}_s"] for page in pages), 1.0),
        "200,000 tokens to the first of them, s": at_most(
            figures["long_rollout_first_s"] + figures["long_rollout_first_tokens_first_s"], 1.0
        ),
        "100,000 rollouts to interactive, s": at_most(seen.get("table_seen_s"), 2.0),
        "200,000 tokens to interactive, s": at_most(seen.get("tokens_seen_s"), 2.0),
        f"{STEPS} steps to the first chart, s": at_most(seen.get("curves_seen_s"), 2.0),
        "memory of the server, MiB": at_most(figures["server_mib"], 512),
    }
    report("view", figures=figures, reference=reference, goals=goals, as_json=args.json)


def _size(folder: Path, name: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"{name}*"))


if __name__ == "__main__":
    main()
