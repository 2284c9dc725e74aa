"""The floors of `benchmarks.driver`: loops that do only the work that no driver can leave out."""

import asyncio
from collections.abc import Sequence

from agentgym.types.completion import Sampling
from benchmarks.driver.dialogs import added, call_in
from benchmarks.driver.instant import Instant
from benchmarks.driver.ours import GROUP, TOOL


async def text_floor(dialogs: dict[str, list[str]]) -> int:
    """Request replies, read and make the calls, and store the messages; return the number of turns.

    Nothing is checked and nothing is encoded.
    """

    async def ask(text: str) -> str:
        return text

    async def play(texts: Sequence[str]) -> int:
        messages = []
        for text in texts:
            said = await ask(text)
            messages.append({"role": "assistant", "content": said})
            call = call_in(said)
            if call:
                messages.append({"role": "tool", "content": added(**call)})
        return len(texts)

    return sum(await asyncio.gather(*(play(texts) for texts in dialogs.values() for _ in range(GROUP))))


async def token_floor(engine: Instant, dialogs: dict[str, list[str]]) -> int:
    """Run the text floor with ids, and return the number of turns.

    The backend encodes tool answers, and each turn's ids and log-probabilities are stored.
    """
    encode = engine.tokenizer.backend.encode

    async def play(name: str, texts: Sequence[str]) -> int:
        ids: list[int] = []
        logprobs: list[float] = []
        session = f"{name}/{id(ids)}"
        for text in texts:
            answer = await engine.generate(ids, session=session, max_tokens=1024, sampling=Sampling(), seed=0)
            ids += answer.token_ids.tolist()
            logprobs += answer.logprobs.tolist()
            call = call_in(text)
            if call:
                shown = f"\n<|im_start|>tool\n{TOOL.answer(**call)}<|im_end|>\n<|im_start|>assistant\n"
                seen = encode(shown, add_special_tokens=False).ids
                ids += seen
                logprobs += [0.0] * len(seen)
        await engine.release(session)
        return len(texts)

    return sum(await asyncio.gather(*(play(name, texts) for name, texts in dialogs.items() for _ in range(GROUP))))
