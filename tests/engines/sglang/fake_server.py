"""A program that replaces a launched SGLang server: `python fake_server.py --port N ...`, with the same flags.

It writes its environment to the file named by AGENTGYM_FAKE_ENVIRONMENT, one line per server, and exits when /die is
requested.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.engines.sglang.peer import Peer, giving, sample, sglang

loaded: set[str] = set()


async def load(payload: Any) -> None:
    loaded.add(payload["lora_name"])


async def models(_: Any) -> Any:
    return {"data": [{"id": name} for name in sorted(loaded)]}


async def die(_: Any) -> Any:
    os._exit(9)


async def score_or_sample(payload: Any) -> Any:
    """Refuse an adapter that isn't loaded, as a real server does."""
    if payload["lora_path"] is not None and payload["lora_path"] not in loaded:
        return 400, {"error": {"message": f"{payload['lora_path']} is not loaded"}}
    return await sample(payload)


async def main(port: int, model: str) -> None:
    paths = sglang(
        load_lora_adapter_from_tensors=load,
        generate=score_or_sample,
        server_info=giving({"max_req_input_len": 401, "model_path": model}),
        die=die,
    )
    peer = Peer(paths | {"/v1/models": models})
    server = await asyncio.start_server(peer._serve, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    if record := os.environ.get("AGENTGYM_FAKE_ENVIRONMENT"):
        with Path(record).open("a") as file:
            file.write(json.dumps(dict(os.environ)) + "\n")
    flags = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    asyncio.run(main(int(flags["--port"]), flags["--model-path"]))
