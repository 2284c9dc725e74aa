"""What a run is about to do: the lines that it prints before its first step, and the warnings if it may not fit."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from agentgym.engines.base import Engine
from agentgym.engines.transformers.engine import TransformersEngine
from agentgym.environments.env import Env
from agentgym.run.config import RunConfig
from agentgym.types.completion import Sampling

if TYPE_CHECKING:  # torch is loaded when a run starts
    from agentgym.train.memory import TrainerFacts
    from agentgym.train.trainer import Trainer

GIB = 2**30
PROBE_S = 2.5
"""About the maximum number of seconds that each of the two probes of a large model's speed may take."""
PROBED_TURNS = 64
"""Maximum number of turns that are sampled at once to measure the speed."""
PROBED_PROMPT, PROBED_TOKENS = 8, 16
"""Maximum number of tokens in the prompt of each of these turns, and of sampled ones."""
PER = 100
"""Number of tokens in each rollout for which the seconds of a step are printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Tokens per second; None if not measured."""

    sampled: float | None = None
    trained: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """The lines to print before the first step, the warnings, and the same facts as plain values."""

    lines: list[str]
    warnings: list[str]
    facts: dict[str, Any] = field(default_factory=dict)


async def measure_speed(trainer: "Trainer", engine: Engine) -> Speed:
    """Measure the speed of a large model's sampling and training in a few seconds.

    Nothing is measured for a model of at most 50 million weights, whose steps are short. Sampling is measured only in
    the embedded engine.
    """
    if not trainer.describe().is_large:
        return Speed()
    trained = await asyncio.to_thread(trainer.probe, PROBE_S)
    sampled = await _sampling_speed(engine) if isinstance(engine, TransformersEngine) else None
    return Speed(sampled=sampled, trained=trained)


async def _sampling_speed(engine: TransformersEngine) -> float | None:
    """Return the sampled tokens per second of short turns at once, cut off after `PROBE_S`; None if there are none."""
    sessions = [f"speed {number}" for number in range(min(PROBED_TURNS, engine.config.slots))]
    prompt = [0] * min(PROBED_PROMPT, engine.context_tokens - 1)
    new = min(PROBED_TOKENS, engine.context_tokens - len(prompt))
    before, began = engine.stats.sampled_tokens, time.perf_counter()
    with suppress(TimeoutError):
        async with asyncio.timeout(PROBE_S), asyncio.TaskGroup() as group:
            for session in sessions:
                turn = engine.generate(prompt, session=session, max_tokens=new, sampling=Sampling(), seed=0)
                group.create_task(turn)
    sampled, took = engine.stats.sampled_tokens - before, time.perf_counter() - began
    for session in sessions:
        await engine.release(session)
    return sampled / took if sampled else None


def start_report(
    run: RunConfig,
    trainer: "Trainer",
    engine: Engine,
    envs: Sequence[type[Env[Any]]],
    speed: Speed,
    others: Sequence[Engine] = (),
) -> StartReport:
    """Describe what the run is about to do.

    Args:
        run: The run.
        trainer: Its open trainer.
        engine: Its open engine.
        envs: The envs that it trains on.
        speed: The measured speed.
        others: The open engines of the teacher and of model roles.
    """
    facts = trainer.describe()
    rollouts = run.prompts_per_step * run.group_size
    turn = max(min(run.max_turn_tokens or env.limits.turn_tokens, env.limits.turn_tokens) for env in envs)
    lines = [
        f"model     {_model(run, facts)}",
        f"training  {_training(trainer, facts)}",
        f"engine    {_engine(engine)}",
        f"chat      {_chat(engine)}",
        f"a step    {rollouts:,} rollouts of {run.prompts_per_step:,} tasks, at most {turn:,} tokens a turn"
        + _seconds(rollouts, speed),
    ]
    parts = _memory(facts, engine, others)
    needed, usable = sum(parts.values()), facts.memory.usable
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    lines.append(f"memory    about {needed / GIB:.1f} of {usable / GIB:.1f} GiB at most: {named}")
    kept = asdict(facts) | {"memory": parts, "usable_memory": usable, "tokens_per_s": asdict(speed)}
    return StartReport(lines=lines, warnings=_warnings(run, trainer, needed, usable), facts=kept)


def _model(run: RunConfig, facts: "TrainerFacts") -> str:
    what = f"{facts.trained:,} trained ({facts.trained / facts.weights:.1%})"
    if run.train.method == "lora":
        names = ", ".join(name.rpartition(".")[2] for name in facts.targets)
        what = f"adapter of rank {run.train.lora_rank} with {what}, on {facts.coverage:.0%} of the layers: {names}"
    return f"{run.model}, {facts.weights:,} weights; {what}"


def _training(trainer: "Trainer", facts: "TrainerFacts") -> str:
    config = trainer.config
    threads = f", {config.threads} threads" if facts.device == "cpu" and (config.threads or 1) > 1 else ""
    return (
        f"{facts.dtype} on {facts.device}{threads}, learning rate {config.lr:g} after {config.warmup_steps} steps of "
        f"warm-up, temperature {config.temperature:g}, {config.layout} micro-batches of at most "
        f"{config.max_tokens_per_microbatch:,} tokens"
    )


def _engine(engine: Engine) -> str:
    said = f"{type(engine).__name__}, contexts of at most {engine.context_tokens:,} tokens"
    return f"{said}, {engine.dtype}" if hasattr(engine, "dtype") else said


_TOOLS_SHOWN = {
    "template": ["tools, if any, are shown by the template"],
    "prompt": ["tools, if any, are listed in the system prompt"],
    None: ["tools, if any, are not shown"],
}
"""What a run says of each value of a tokenizer's `tools_shown_by`; nothing if the tokenizer doesn't have it."""


def _chat(engine: Engine) -> str:
    """Return the format of calls, what shows the tools, and the texts that end a turn, as far as they are known."""
    tokenizer: Any = engine.tokenizer
    known = getattr(tokenizer, "response_format", None)
    own = "the tokenizer's own" if getattr(tokenizer, "response_template", None) is not None else "none"
    name = known.name if known is not None else own
    shown_by = getattr(tokenizer, "tools_shown_by", "unknown")
    if shown_by == "prompt" and tokenizer.template_input.calls_as_text:
        name = "hermes"
    said = [f"format of calls: {name}", *_TOOLS_SHOWN.get(shown_by, ())]
    stops = engine.stop_ids if isinstance(engine, TransformersEngine) else getattr(tokenizer, "stop_ids", ())
    if stops:
        said.append(f"a turn ends at {' or '.join(tokenizer.decode([stop]) for stop in sorted(stops))}")
    return "; ".join(said)


def _seconds(rollouts: int, speed: Speed) -> str:
    """Return the expected seconds of a step for a number of tokens in each rollout, as far as speeds are known."""
    known = {"to sample": speed.sampled, "to train": speed.trained}
    parts = [f"{rollouts * PER / rate:,.0f} s {what} ({rate:,.0f} tokens/s)" for what, rate in known.items() if rate]
    return f"; each {PER} tokens in every rollout take about {' and '.join(parts)}" if parts else ""


def _memory(facts: "TrainerFacts", engine: Engine, others: Sequence[Engine]) -> dict[str, int]:
    """Return the bytes of each part of the run in this process, at most."""
    memory = facts.memory
    parts = {"weights": memory.weights, "optimizer": memory.optimizer, "activations": memory.activations}
    if isinstance(engine, TransformersEngine):
        parts |= {"engine's weights": engine.memory.weights, "KV cache": engine.memory.kv}
    embedded = [other for other in others if isinstance(other, TransformersEngine) and other is not engine]
    if embedded:
        parts["other models"] = sum(sum(other.memory) for other in embedded)
    return parts


def _warnings(run: RunConfig, trainer: "Trainer", needed: int, usable: int) -> list[str]:
    """Return a warning with what to set if the run may need more memory than there is."""
    if needed <= usable:
        return []
    tokens = trainer.config.max_tokens_per_microbatch or 0
    ways = [f"train.max_tokens_per_microbatch {tokens // 2}"] if tokens > 1 else []
    ways += [] if run.train.gradient_checkpointing else ["train.gradient_checkpointing"]
    ways.append("a smaller engine.slots or engine.context_tokens")
    return [
        f"The run may need {needed / GIB:.1f} GiB of memory, but there are {usable / GIB:.1f}; set {', '.join(ways)}."
    ]
