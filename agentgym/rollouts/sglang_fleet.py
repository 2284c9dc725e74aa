"""The servers of an engine: attached to, or launched together."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from agentgym.errors import EngineError
from agentgym.rollouts.sglang_config import SGLangConfig
from agentgym.rollouts.sglang_process import Progress, ServerProcess, free_port
from agentgym.rollouts.sglang_server import Server


async def open_servers(
    stack: AsyncExitStack, config: SGLangConfig, model: str | Path | None, folder: Path, progress: Progress | None
) -> list[Server]:
    """Servers that take requests; closing the stack closes their connections and ends those that were launched.

    Raises EngineError, with a launched server's last words, where one does not come up.
    """
    if config.urls:
        servers = [Server(url) for url in config.urls]
    else:
        assert model is not None
        servers = [await _launch(stack, config, str(model), folder / f"server-{i}.log") for i in range(config.servers)]
    for server in servers:
        stack.callback(server.client.close)
    try:
        async with asyncio.TaskGroup() as waiting:
            for server in servers:
                waiting.create_task(_ready(server, config, progress))
    except* EngineError as failed:
        raise failed.exceptions[0] from None
    return servers


async def _launch(stack: AsyncExitStack, config: SGLangConfig, model: str, log: Path) -> Server:
    port = free_port()
    command = config.launch_command(model, port=port, context_limit=await asyncio.to_thread(_context_limit, model))
    process = ServerProcess(command, log)
    stack.push_async_callback(process.close)
    await process.start()
    return Server(f"http://127.0.0.1:{port}", process)


def _context_limit(model: str) -> int:
    from transformers import AutoConfig

    return int(getattr(AutoConfig.from_pretrained(model).get_text_config(), "max_position_embeddings", 1 << 30))


async def _ready(server: Server, config: SGLangConfig, progress: Progress | None) -> None:
    if server.process is not None:
        await server.process.ready(server.client, startup_s=config.startup_s, progress=progress)
    elif not await server.answers(config.health_s):
        raise EngineError(f"{server}: nobody answers")
