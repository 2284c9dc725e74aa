"""CPU microseconds per turn of real envs, with and without the cache of words' ids, and the gain of the cache.

`python -m benchmarks.words [--json] [--seed N]`

The envs are `chase` and `code_repair` of the gallery, in their own sandboxes, run by `run_groups` with an engine whose
responses are ready. So the CPU time is that of the process that runs the rollouts, without the model's time, which is
spent on a GPU. In `code_repair` each rollout lists the repository, reads two of its files, runs a program that fails,
looks for definitions and runs tests. Both variants take turns in this process, each with its own tokenizer, on the same
tasks. The tokenizer is a byte-level BPE with about one token per word, as large models have. The bundled tiny model's
has a pattern that the cache doesn't know, so it makes no difference there.
"""

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

from agentgym.chat.word_cache import WordCache
from agentgym.environments.registry import find_env
from agentgym.scheduling import run_groups
from agentgym.types.completion import Completion, Sampling
from benchmarks.driver.instant import Instant, word_tokenizer
from benchmarks.driver.measured import Measured
from benchmarks.harness import ROOT, Goal, arguments, at_least, report

ROUNDS = 8
TASKS, GROUP = 4, 8


def _call(name: str, **given: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call><|im_end|>"


SCRIPTS = {
    "chase": [
        _call("python", code="get(31)"),
        _call("python", code="print([get(i) for i in range(40)])"),
        "Answer: 17<|im_end|>",
    ],
    "code_repair": [
        _call("bash", cmd="ls -la"),
        _call("bash", cmd="head -c 2500 $(ls *.py | head -1)"),
        _call("bash", cmd="head -c 2500 $(ls *.py | tail -1)"),
        _call("bash", cmd="python3 -c 'import json; json.loads(chr(123))'"),
        _call("bash", cmd="grep -n def *.py | head -30"),
        _call("bash", cmd="python3 -m unittest -v 2>&1 | tail -20"),
        _call("submit"),
    ],
}
"""The policy's text in each turn."""


class Script(Instant):
    """An engine that runs one script in every rollout."""

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        return await super().generate(
            token_ids, session=f"script/{session}", max_tokens=max_tokens, sampling=sampling, seed=seed
        )

    async def release(self, session: str) -> None:
        await super().release(f"script/{session}")


def engine_of(texts: list[str], script: list[str], *, cached: bool) -> Script:
    """Return an engine with a tokenizer that looks words up, or that encodes all texts whole."""
    with patch.object(WordCache, "of", WordCache.of if cached else lambda backend: None):
        return Script(word_tokenizer(texts), {"script": script})  # it encodes the script, which opens the cache


async def played(env: Any, tasks: Sequence[Any], engine: Script, sandboxes: Any, ids: list[float]) -> int:
    """Run all tasks and return the number of turns.

    Append to `ids` the number of ids per turn that were not sampled.
    """
    groups = await run_groups(env, tasks, engine, n=GROUP, sandboxes=sandboxes)
    segments = [segment for rollout in groups.rollouts for segment in rollout.segments]
    turns = sum(len(segment.turns) for segment in segments)
    ids.append(sum(int((~segment.sampled).sum()) for segment in segments) / turns)
    return turns


async def measured(seed: int) -> dict[str, float]:
    """Return the results of both envs."""
    texts = [path.read_text() for path in sorted((ROOT / "agentgym").rglob("*.py"))]
    figures: dict[str, float] = {}
    for name, script in SCRIPTS.items():
        found, ids = Measured(), list[float]()
        env: Any = find_env(name)
        engines = {way: engine_of(texts, script, cached=way == "cached") for way in ("cached", "whole")}
        async with env.sandbox_spec.open(TASKS * GROUP) as sandboxes:
            for number in range(ROUNDS):
                first = (seed * ROUNDS + number) * TASKS
                tasks = [env.tasks("train")[first + place] for place in range(TASKS)]
                for way, engine in engines.items():
                    await found.play(way, partial(played, env, tasks, engine, sandboxes, ids))
        figures |= {f"{name}_{way}_us": value for way, value in found.us.items()}
        figures[f"{name}_ids_a_turn"] = sum(ids) / len(ids)
        figures[f"{name}_gain"] = found.us["whole"] / found.us["cached"]
    return figures


def goals(figures: dict[str, float]) -> dict[str, Goal]:
    """Return the goals; if they aren't met, the cache isn't worth its code."""
    return {"code_repair without the cache over with it": at_least(figures["code_repair_gain"], 1.3)}


def main() -> None:
    args = arguments(__doc__ or "")
    figures = asyncio.run(measured(args.seed))
    report("words", figures=figures, reference={}, goals=goals(figures), as_json=args.json)


if __name__ == "__main__":
    main()
