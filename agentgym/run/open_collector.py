"""Opens a run's engine (once for all processes), sandboxes and model roles."""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agentgym.chat.tokenizer import ChatTokenizer, chat_tokenizer
from agentgym.engines.base import Engine, check_engine
from agentgym.engines.custom import CustomEngineConfig
from agentgym.engines.messages import refuse_in_training
from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
from agentgym.engines.transformers.engine import TransformersConfig, TransformersEngine
from agentgym.environments.env import Env
from agentgym.environments.resources import open_resources
from agentgym.environments.task_sandboxes import open_sandboxes
from agentgym.errors import EngineError
from agentgym.hub import find_model, of_field
from agentgym.run.collector import Collector
from agentgym.run.config import RunConfig
from agentgym.run.peers import Peers
from agentgym.sandboxes.choose import as_kind


@asynccontextmanager
async def open_collector(
    run: RunConfig,
    env: type[Env[Any]],
    peers: Peers,
    progress: Callable[[str], None],
    *,
    tokenizer: ChatTokenizer | None = None,
    engine: Engine | None = None,
) -> AsyncIterator[Collector]:
    """Open everything that this process needs to run rollouts of `env`. A given `engine` is used instead of the run's.

    `run`, `peers`, `progress` and `tokenizer` are described in `open_engine`.
    """
    async with AsyncExitStack() as stack:
        opening = nullcontext(engine) if engine else open_engine(run, peers, progress, tokenizer)
        engine = await stack.enter_async_context(opening)
        named = as_kind(env.sandbox_spec, run.sandbox) if env.sandbox_spec and run.sandbox != "auto" else None
        sandboxes = await stack.enter_async_context(open_sandboxes(env, run.engine.slots, named))
        await stack.enter_async_context(open_resources(env))
        models = await stack.enter_async_context(open_models(run, peers, progress))
        yield Collector(env, engine, peers, sandboxes, run.sampling, concurrency=run.engine.slots, models=models)


@asynccontextmanager
async def open_engine(
    run: RunConfig,
    peers: Peers,
    progress: Callable[[str], None],
    tokenizer: ChatTokenizer | None = None,
) -> AsyncIterator[Engine]:
    """Open the engine that the run's settings name.

    If there are several training processes, the first one launches the servers and the others attach to them.

    Args:
        run: The run's settings.
        peers: The training processes.
        progress: Called with each line of progress that a starting server reports.
        tokenizer: Replaces the model's chat tokenizer. A custom engine always uses its own.

    Yields:
        The open engine.

    Raises:
        EngineError: On every process, if the servers don't start.
    """
    opening = open_model(run, run.model, run.engine, peers, progress, tokenizer)
    async with opening as engine:
        refuse_in_training(engine)
        yield engine


@asynccontextmanager
async def open_model(
    run: RunConfig,
    model: Path | str,
    config: TransformersConfig | SGLangConfig | CustomEngineConfig,
    peers: Peers,
    progress: Callable[[str], None],
    tokenizer: ChatTokenizer | None = None,
) -> AsyncIterator[Engine]:
    """Open an engine for one of the run's models, such as the policy or the teacher; see `open_engine`."""
    if isinstance(config, TransformersConfig):
        async with TransformersEngine(model, config, tokenizer=tokenizer) as local:
            yield local
    elif isinstance(config, CustomEngineConfig):
        async with _entered(config.load()(model)) as other:
            check_engine(other)
            yield other
    else:
        settings = server_settings(run, config)
        async with _shared(model, settings, peers, progress, tokenizer) as engine:
            yield engine


@asynccontextmanager
async def open_models(
    run: RunConfig, peers: Peers, progress: Callable[[str], None]
) -> AsyncIterator[dict[str, Engine]]:
    """Open the engines of the run's model roles, whose weights never change.

    They may include engines that take messages instead of tokens, because nothing from a model role is trained on.
    """
    async with AsyncExitStack() as stack:
        opened: dict[str, Engine] = {}
        for name, named in run.models.items():
            with of_field(model=f"models.{name}.model", engine=f"models.{name}.engine"):
                engine = without_adapters(named.engine)
                opening = open_model(run, named.model, engine, peers, progress)
                opened[name] = await stack.enter_async_context(opening)
        yield opened


def own_template(run: RunConfig) -> ChatTokenizer | None:
    """Load the model's chat tokenizer if the run has settings for it; None if the engine should load it."""
    if run.chat_template is None and not run.chat_template_kwargs and run.tools == "auto":
        return None
    return chat_tokenizer(
        run.model, template=run.chat_template, template_kwargs=run.chat_template_kwargs, tools=run.tools
    )


def without_adapters(
    config: TransformersConfig | SGLangConfig | CustomEngineConfig,
) -> TransformersConfig | SGLangConfig | CustomEngineConfig:
    """Return the engine's settings without adapters, so that launched servers reserve no memory for them."""
    return replace(config, adapters="merged") if isinstance(config, SGLangConfig) and not config.urls else config


def server_settings(run: RunConfig, config: SGLangConfig) -> SGLangConfig:
    """Return the settings of servers that accept the adapters that the run trains."""
    return replace(config, max_lora_rank=max(config.max_lora_rank, run.train.lora_rank))


def server_line(said: str) -> str:
    """Return a progress message of a server as one line of at most 88 characters."""
    line = " ".join(said.split())
    return f"server: {line if len(line) <= 80 else f'{line[:77]}...'}"


@asynccontextmanager
async def _shared(
    named: Path | str,
    config: SGLangConfig,
    peers: Peers,
    progress: Callable[[str], None],
    tokenizer: ChatTokenizer | None,
) -> AsyncIterator[Engine]:
    model = find_model(named)
    launching = SGLangEngine(
        model,
        config,
        tokenizer=tokenizer,
        progress=lambda said: progress(server_line(said)),
        trainers=peers.gpus,
    )
    if config.urls or peers.world == 1:
        async with launching as engine:
            yield engine
    elif peers.rank == 0:
        async with _told_to_the_others(launching, peers) as engine:
            yield engine
    else:
        urls, said = (await peers.gather([((), "")]))[0]
        if said:
            raise EngineError(f"engine: the first process could not launch the servers: {said}")
        attached = replace(config, urls=urls, gpus=(), colocate="off")
        async with SGLangEngine(model, attached, tokenizer=tokenizer) as engine:
            yield engine


@asynccontextmanager
async def _told_to_the_others(launching: SGLangEngine, peers: Peers) -> AsyncIterator[SGLangEngine]:
    """Launch the servers and send the other processes their URLs, or the reason why the launch failed."""
    told = False
    try:
        async with launching as engine:
            told = True
            await peers.gather([(engine.urls, "")])
            yield engine
    except Exception as error:
        if not told:
            await peers.gather([((), f"{type(error).__name__}: {error}")])
        raise


@asynccontextmanager
async def _entered(made: Any) -> AsyncIterator[Any]:
    """Open an engine if it is an async context manager; yield any other engine unchanged."""
    if isinstance(made, AbstractAsyncContextManager):
        async with made as opened:
            yield opened
        return
    if inspect.iscoroutine(made):
        made.close()
        raise ValueError("engine: must be a class or a plain function, not async; open what it needs in `__aenter__`")
    yield made


def engine_counts(engine: Engine) -> dict[str, float]:
    """Return a server engine's counters since it opened, named `engine/NAME`; empty for other engines."""
    counts = getattr(engine, "counts", None)
    return {f"engine/{name}": float(value) for name, value in asdict(counts).items()} if counts is not None else {}
