"""What a run samples with: the engine that its config names, opened once for all processes, its sandboxes and
models."""

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
    """Open all that this process plays the run's rollouts with; `engine`, which is open, takes the place of its own."""
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
    """Open the engine that the run asks for; a server that starts tells `progress` what it does.

    `tokenizer` takes the place of the model's own; an engine of the user's has its own.

    Of several training processes the first one launches the servers, and the others attach to them. EngineError on
    all of them where they do not come up.
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
    """Open an engine of the run for a model, which the run samples from or learns from, as `open_engine` does."""
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
    """Open the engines of the run's model roles; they stay as they are, whatever is trained.

    One that is asked with messages may be among them, for nothing that a model role says is trained on.
    """
    async with AsyncExitStack() as stack:
        opened: dict[str, Engine] = {}
        for name, named in run.models.items():
            with of_field(f"models.{name}"):
                engine = without_adapters(named.engine)
                opening = open_model(run, named.model, engine, peers, progress)
                opened[name] = await stack.enter_async_context(opening)
        yield opened


def own_template(run: RunConfig) -> ChatTokenizer | None:
    """Load the chat tokenizer where the run sets its template or variables; None leaves it to the engine."""
    if run.chat_template is None and not run.chat_template_kwargs:
        return None
    return chat_tokenizer(run.model, template=run.chat_template, template_kwargs=run.chat_template_kwargs)


def without_adapters(
    config: TransformersConfig | SGLangConfig | CustomEngineConfig,
) -> TransformersConfig | SGLangConfig | CustomEngineConfig:
    """Return the settings of an engine that gets no adapter: a server that is launched needs no room for one."""
    return replace(config, adapters="merged") if isinstance(config, SGLangConfig) and not config.urls else config


def server_settings(run: RunConfig, config: SGLangConfig) -> SGLangConfig:
    """Return the settings of servers that take the adapters which the run trains."""
    return replace(config, max_lora_rank=max(config.max_lora_rank, run.train.lora_rank))


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
        progress=lambda said: progress(f"server: {said[:80]}"),
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
    """Launch the servers and tell the other processes where they are, or why there are none."""
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
    """Open an engine that opens with `async with`, and give any other one as it is."""
    if isinstance(made, AbstractAsyncContextManager):
        async with made as opened:
            yield opened
        return
    if inspect.iscoroutine(made):
        made.close()
        raise ValueError("engine: its class must be called and not awaited; open what it needs in `__aenter__`")
    yield made


def engine_counts(engine: Engine) -> dict[str, float]:
    """Return the counters of an engine on servers since it opened, under `engine/`; none of another engine."""
    counts = getattr(engine, "counts", None)
    return {f"engine/{name}": float(value) for name, value in asdict(counts).items()} if counts is not None else {}
