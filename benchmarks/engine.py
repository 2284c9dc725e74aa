"""Sampled tokens per CPU second on 64 rollouts: the embedded engine and transformers' static and continuous batching.

`python -m benchmarks.engine [--json] [--workloads FILE.py] [--seed N]`

One tiny model, one thread, temperature 0.7, no stop ids, so that every side samples the same number of tokens:

    single   one turn of 64 tokens each
    turns    4 turns of 16 tokens, 16 ids of the environment between them
    ragged   4 turns with the workload's lengths, few long and many short
    alone    as single, but every rollout has a different prompt; in the others eight share one

A static batch and `generate_batch` get the whole context with every turn, while the engine keeps its KV cache. A static
batch runs until its longest row is done, but only requested tokens count.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from agentgym.engines.transformers.engine import TransformersConfig, TransformersEngine
from agentgym.types.completion import Sampling
from benchmarks.harness import ROOT, arguments, at_least, fresh, load_workloads, report

MODEL = ROOT / "recipes" / "checkpoints" / "chase"
ROLLOUTS, TURNS, CONTEXT = 64, 4, 512
SINGLE_TOKENS, TURN_TOKENS = 64, 16
TEMPERATURE, RUNS = 0.7, 3
REFERENCE: dict[str, float | str] = {
    "static batch, by hand, single": 8_000.0,
    "generate_batch, by hand": 840.0,
    "where": "tokens per CPU second, one thread of a shared core",
}


class Script(NamedTuple):
    """The script of one rollout: its prompt, then for each turn the number of ids to sample and the ids after them."""

    prompt: list[int]
    turns: list[tuple[int, list[int]]]


class Played(NamedTuple):
    """The result of a case: the number of sampled ids, and CPU seconds from the first request to the last response."""

    sampled: int
    cpu_s: float


Case: TypeAlias = list[Script]
Way: TypeAlias = Callable[[Case], Played]


def cases(workloads: Path | None, seed: int, vocabulary: int) -> dict[str, Case]:
    """Return the cases, made from the workload's step samples; in all but `alone`, eight rollouts share a prompt."""
    ragged, alone = (_scripts(workloads, seed, vocabulary, group) for group in (8, 1))
    even = [Script(script.prompt, [(TURN_TOKENS, seen) for _, seen in script.turns]) for script in ragged]
    single, apart = ([Script(script.prompt, [(SINGLE_TOKENS, [])]) for script in of] for of in (ragged, alone))
    return {"single": single, "turns": even, "ragged": ragged, "alone": apart}


def _scripts(workloads: Path | None, seed: int, vocabulary: int, group: int) -> Case:
    batch = load_workloads(workloads).stepwise(
        seed=seed, n_traj=ROLLOUTS, turns=TURNS, group=group, max_len=CONTEXT, prompt_median=96, early_heavy=0.2
    )
    made: Case = []
    for i, (prompt, response, mask) in enumerate(zip(batch.prompts, batch.responses, batch.loss_masks, strict=True)):
        ids = [token % vocabulary for token in response]
        if not i or batch.traj[i] != batch.traj[i - 1]:
            made.append(Script([token % vocabulary for token in prompt], []))
        made[-1].turns.append((sum(mask), ids[sum(mask) :]))
    return made


def load() -> Any:
    """Load the model without stop ids, so that every turn is as long as requested."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_k=0, eos_token_id=None, pad_token_id=0
    )
    model.config.eos_token_id = None
    return model


def by_engine(model: Any) -> Way:
    """Return a function that runs each rollout as a separate coroutine, as a run does."""

    async def one(engine: TransformersEngine, name: str, script: Script) -> int:
        ids, sampled = list(script.prompt), 0
        for turn, (count, seen) in enumerate(script.turns):
            done = await engine.generate(
                ids, session=name, max_tokens=count, sampling=Sampling(temperature=TEMPERATURE), seed=turn
            )
            ids += [*done.token_ids.tolist(), *seen]
            sampled += len(done.token_ids)
        await engine.release(name)
        return sampled

    async def play(case: Case) -> Played:
        config = TransformersConfig(slots=ROLLOUTS, context_tokens=CONTEXT)
        async with TransformersEngine(model, config, tokenizer=_no_chat()) as engine, asyncio.TaskGroup() as playing:
            began = time.process_time()
            jobs = [playing.create_task(one(engine, str(i), script)) for i, script in enumerate(case)]
            sampled = sum([await job for job in jobs])
            return Played(sampled, time.process_time() - began)

    return lambda case: asyncio.run(play(case))


def _no_chat() -> Any:
    """Return a placeholder for the tokenizer, which a loaded model needs; the benchmark uses ids only."""
    return object()


def by_turns(answer: Callable[[list[list[int]], list[int]], list[list[int]]]) -> Way:
    """Return a function that runs turn after turn.

    `answer` gets the contexts of all open rollouts and how many ids to sample for each, and returns the sampled ids.
    """

    def play(case: Case) -> Played:
        began = time.process_time()
        contexts, sampled = [list(script.prompt) for script in case], 0
        for turn in range(max(len(script.turns) for script in case)):
            rows = [i for i, script in enumerate(case) if turn < len(script.turns)]
            counts = [case[i].turns[turn][0] for i in rows]
            for i, count, ids in zip(rows, counts, answer([contexts[i] for i in rows], counts), strict=True):
                sampled += min(len(ids), count)
                contexts[i] += ids[:count] + case[i].turns[turn][1]
        return Played(sampled, time.process_time() - began)

    return play


def by_static_batch(model: Any) -> Way:
    """Run `generate` on a left-padded batch, for as many tokens as its longest row needs."""

    @torch.inference_mode()
    def answer(contexts: list[list[int]], counts: list[int]) -> list[list[int]]:
        width = max(map(len, contexts))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in contexts])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in contexts])
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max(counts))
        rows: list[list[int]] = out[:, width:].tolist()
        return rows

    return by_turns(answer)


def by_generate_batch(model: Any) -> Way:
    """Run `generate_batch` with a cache size set by hand.

    With a size derived from the machine's memory it doesn't finish.
    """
    from transformers import ContinuousBatchingConfig

    sizes = ContinuousBatchingConfig(num_blocks=4 * ROLLOUTS, max_batch_tokens=1024)

    def answer(contexts: list[list[int]], counts: list[int]) -> list[list[int]]:
        with torch.inference_mode():
            done = model.generate_batch(
                contexts, continuous_batching_config=sizes, max_new_tokens=max(counts), warmup=False
            )
        outputs = sorted(done.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
        return [list(output.generated_tokens) for output in outputs]

    return by_turns(answer)


WAYS: dict[str, Callable[[Any], Way]] = {
    "engine": by_engine,
    "static": by_static_batch,
    "generate_batch": by_generate_batch,
}


def measure(workloads: Path | None, seed: int, names: tuple[str, ...], runs: int) -> dict[str, float]:
    """Return the sampled tokens per CPU second of these ways in each case.

    Each is the best of the runs, in which the ways take turns.
    """
    figures: dict[str, float] = {}
    ways = {name: WAYS[name](load()) for name in names}
    for case_name, case in cases(workloads, seed, load().config.vocab_size).items():
        wanted = sum(count for script in case for count, _ in script.turns)
        for _ in range(runs):
            for name, play in ways.items():
                played = play(case)
                if played.sampled != wanted:
                    raise RuntimeError(f"{name}, {case_name}: expected {wanted} sampled ids, got {played.sampled}")
                best = figures.get(f"{case_name}_{name}", 0.0)
                figures[f"{case_name}_{name}"] = max(wanted / played.cpu_s, best)
        figures[f"{case_name}_sampled_tokens"] = float(wanted)
    return figures


def main() -> None:
    args = arguments(__doc__ or "")
    figures = fresh(measure, args.workloads, args.seed, ("engine", "static"), RUNS)
    figures |= fresh(measure, args.workloads, args.seed, ("generate_batch",), RUNS)
    ratio = {
        case: figures[f"{case}_engine"] / figures[f"{case}_static"] for case in ("single", "turns", "ragged", "alone")
    }
    report(
        "engine",
        figures=figures | {f"{case}_engine_over_static": value for case, value in ratio.items()},
        reference=REFERENCE,
        goals={
            "single turns, engine / static batch": at_least(ratio["single"], 2.5),
            "4 turns, engine / static batch": at_least(ratio["turns"], 4.0),
        },
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
