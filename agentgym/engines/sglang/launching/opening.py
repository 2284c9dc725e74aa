"""Opens an engine's servers: connects to running ones, or launches new ones."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from agentgym.engines.sglang.answers import ServerFacts
from agentgym.engines.sglang.config import SGLangConfig
from agentgym.engines.sglang.launching.placement import place_servers, visible_gpus
from agentgym.engines.sglang.launching.process import NOT_SGLANG, Progress, ServerProcess, free_port
from agentgym.engines.sglang.model_info import context_limit
from agentgym.engines.sglang.server import Server
from agentgym.errors import EngineError


async def open_servers(
    stack: AsyncExitStack,
    config: SGLangConfig,
    model: str | Path | None,
    folder: Path,
    progress: Progress | None,
    *,
    trainers: Sequence[int] = (),
) -> list[Server]:
    """Connect to the configured servers or launch them, and return them once they accept requests.

    Closing the stack closes their connections and terminates the launched servers.

    Args:
        stack: The exit stack that owns the servers.
        config: The servers to attach to or to launch.
        model: The model of launched servers.
        folder: Folder of the launched servers' logs.
        progress: Called with startup messages of launched servers.
        trainers: Indices of the GPUs that training uses; see `place_servers`.

    Raises:
        EngineError: If a server doesn't become ready. For a launched server, the message quotes the end of its log.
    """
    if config.urls:
        servers = [Server(url, api_key=config.api_key) for url in config.urls]
    else:
        places = place_servers(config, visible_gpus(), trainers=trainers)
        servers = [
            await _launch(stack, config, str(model), folder / f"server-{i}.log", gpus) for i, gpus in enumerate(places)
        ]
    for server in servers:
        stack.push_async_callback(server.close)
    try:
        async with asyncio.TaskGroup() as waiting:
            for server in servers:
                waiting.create_task(_ready(server, config, progress))
    except ExceptionGroup as failed:  # Not `except*`, which would wrap exceptions raised inside it.
        first = failed.exceptions[0]
        raise (first if isinstance(first, EngineError) else failed) from None
    return servers


async def facts_of(server: Server, *, merged: bool) -> ServerFacts:
    """Return the settings that a server reports.

    Raises:
        EngineError: If the server can't be reached.
        ValueError: If the server was started with LoRA support, but adapters are to be `merged` into its weights.
    """
    try:
        facts = await server.facts()
    except ConnectionError as error:
        raise EngineError(f"{server}: {error}") from error
    if merged and facts.lora:
        raise ValueError(
            f"adapters: {server} was started with --enable-lora; start it without that flag, or set adapters=tensors"
        )
    return facts


async def _launch(stack: AsyncExitStack, config: SGLangConfig, model: str, log: Path, gpus: tuple[str, ...]) -> Server:
    port = free_port()
    limit = await asyncio.to_thread(context_limit, model)
    command = config.launch_command(model, port=port, context_limit=limit)
    process = ServerProcess(command, log, gpus=gpus, restarts=config.restarts)
    stack.push_async_callback(process.close)
    await process.start()
    return Server(f"http://{config.host}:{port}", process, api_key=config.api_key)


async def _ready(server: Server, config: SGLangConfig, progress: Progress | None) -> None:
    if server.process is not None:
        await server.process.ready(server.client, startup_s=config.startup_s, progress=progress)
        return
    status = await server.ready(config.health_s)
    if status is None:
        raise EngineError(f"{server}: no response; check the URL, or start the server")
    if status == 404:
        raise EngineError(f"{server}: {NOT_SGLANG}")
