"""The other kits' side of `benchmarks.driver`, run by the interpreter of an environment that has them and no agentgym.

`python -m benchmarks.driver.theirs '{"file": "WORK.json"}'` first prints the names of its `ways`. Then, each time a
line on stdin names one of them, it runs the dialogs of WORK and prints the turns and the CPU seconds as JSON.

skyrl: `SkyRLGymGenerator.generate`, as its trainer calls it, with a skyrl_gym environment that reads the call from
the text and makes it. Its client returns ids, text and log-probabilities that are ready. Tools run in the event
loop's thread (`max_env_workers=0`: with its 32 threads a turn takes longer).

trl: `GRPOTrainer`'s own rendering of the prompts, parsing of completions and loop of tool calls, turn by turn over
the whole batch, with completions that are ready.
"""

import asyncio
import gc
import importlib.util
import json
import sys
import time
import typing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.driver.dialogs import QUESTION, Tool, call_in, tracebacks
from benchmarks.peers.serve import work

TOOL = Tool()


class Skyrl:
    """SkyRL's generator, with a client whose responses are ready."""

    def __init__(self, work: dict[str, Any], tokenizer: Any) -> None:
        if sys.version_info < (3, 12):  # pydantic reads its types and needs the TypedDict of Python 3.12
            import typing_extensions

            typing.TypedDict = typing_extensions.TypedDict
        from loguru import logger
        from skyrl.train.config import GeneratorConfig, SkyRLGymConfig
        from skyrl.train.generators.base import TrajectoryID
        from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
        from skyrl_gym.envs import register

        logger.remove()
        register("bench_add", entry_point=_adder_class())
        self.client = _Client(work)
        config = GeneratorConfig(max_turns=64, max_input_length=1 << 20)
        self.generator = SkyRLGymGenerator(config, SkyRLGymConfig(max_env_workers=0), self.client, tokenizer)
        names = [(name, n) for name in work["dialogs"] for n in range(work["group"])]
        self.ids = [TrajectoryID(name, n) for name, n in names]
        self.prompts = [[{"role": "user", "content": f"{name}: {QUESTION}"}] for name, _ in names]
        self.turns = work["group"] * sum(len(texts) for texts in work["dialogs"].values())

    def play(self, *, yields: bool) -> int:
        """Run every dialog, and return the number of turns."""
        self.client.yields = yields
        given = {
            "prompts": self.prompts,
            "env_classes": ["bench_add"] * len(self.prompts),
            "env_extras": [{} for _ in self.prompts],
            "trajectory_ids": self.ids,
        }
        made = asyncio.run(self.generator.generate(given, disable_tqdm=True))
        assert all(sum(rewards) == 1.0 for rewards in made["rewards"])
        assert all(len(a) == len(b) for a, b in zip(made["response_ids"], made["rollout_logprobs"], strict=True))
        return int(self.turns)


def _adder_class() -> Any:
    """Return the environment as SkyRL's users write one: text in, messages out."""
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

    class Adder(BaseTextEnv):  # type: ignore[misc]
        def __init__(self, env_config: Any, extras: Any) -> None:
            super().__init__()

        def step(self, action: str) -> Any:
            call = call_in(action)
            if call is None:
                scored = float(action.endswith("answer 42"))
                return BaseTextEnvStepOutput(observations=[], reward=scored, done=True, metadata={})
            told = {"role": "user", "content": TOOL.answer(**call)}
            return BaseTextEnvStepOutput(observations=[told], reward=0.0, done=False, metadata={})

    return Adder


class _Client:
    """An inference client that has every response ready: text, ids and log-probabilities of dialog `t<n>`."""

    def __init__(self, work: dict[str, Any]) -> None:
        self.yields, self.played = False, dict[str, int]()
        mark = work["end"]
        self.answers = {
            name: [
                {
                    "responses": [text.removesuffix(mark)],
                    "response_ids": [ids],
                    "stop_reasons": ["stop"],
                    "response_logprobs": [[-0.5] * len(ids)],
                }
                for text, ids in zip(texts, work["ids"][name], strict=True)
            ]
            for name, texts in work["dialogs"].items()
        }

    async def generate(self, given: Any, model: str | None = None) -> Any:
        if self.yields:
            await asyncio.sleep(0)
        (session,) = given["session_ids"]
        turn = self.played.get(session, 0)
        self.played[session] = turn + 1
        return self.answers[session.partition("_")[0]][turn]

    async def finish_session(self, session: str) -> None:
        self.played.pop(session, None)


class Trl:
    """TRL's trainer without a model: its processing of prompts, completions and tool calls."""

    def __init__(self, work: dict[str, Any], tokenizer: Any) -> None:
        from trl import GRPOTrainer
        from trl.chat_template_utils import parse_response

        self.work, self.parse = work, parse_response
        self.trainer = trainer = object.__new__(GRPOTrainer)
        tokenizer.response_template = work["response_template"]
        trainer._tokenizer = trainer.processing_class = tokenizer
        trainer.tools, trainer.chat_template, trainer.chat_template_kwargs = [add], None, {}
        trainer.environment_factories = None
        trainer._is_vlm = trainer.use_vllm = False
        trainer.max_tool_calling_iterations = trainer.max_completion_length = 1 << 20
        trainer.model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=1 << 20))
        trainer._generate_single_turn = self._sampled
        self.names: list[str] = []
        self.turn = 0

    def _sampled(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        """Return the next turn of every dialog; all dialogs have the same number of turns."""
        ids = [list(self.work["ids"][name][self.turn]) for name in self.names]
        self.turn += 1
        return ids, [[-0.5] * len(each) for each in ids]

    def play(self) -> int:
        """Run every dialog, and return the number of turns."""
        trainer, self.turn = self.trainer, 0
        self.names = [name for name in self.work["dialogs"] for _ in range(self.work["group"])]
        trainer._sync_tool_dicts = [{"add": add} for _ in self.names]
        trainer._async_tool_dicts = [{} for _ in self.names]
        prompts = [[{"role": "user", "content": f"{name}: {QUESTION}"}] for name in self.names]
        prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
        ids, logprobs = self._sampled(prompt_ids)
        asked = zip(prompt_ids, ids, strict=True)
        read = [[self.parse(trainer._tokenizer, each, prefix=prompt, tools=[add])] for prompt, each in asked]
        made = trainer._tool_call_loop(prompts, prompt_ids, ids, read, logprobs, images, fields)
        assert all(said[-1]["content"].endswith("answer 42") for said in made[1])
        return len(self.names) * self.turn


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return TOOL.answer(a, b)


def ways(work: dict[str, Any], tokenizer: Any) -> dict[str, Callable[[], int]]:
    """Return the ways that this interpreter can run."""
    found: dict[str, Callable[[], int]] = {}
    if importlib.util.find_spec("skyrl"):
        skyrl = Skyrl(work, tokenizer)
        found["skyrl"] = found["skyrl_unseen"] = lambda: skyrl.play(yields=False)
        found["skyrl_alive"] = lambda: skyrl.play(yields=True)
    if importlib.util.find_spec("trl"):
        trl = Trl(work, tokenizer)
        found["trl"] = trl.play
    return found


def main() -> None:
    from transformers import AutoTokenizer

    given = json.loads(Path(work()["file"]).read_text())
    answers, sys.stdout = sys.stdout, sys.stderr
    plays = ways(given, AutoTokenizer.from_pretrained(given["tokenizer"]))
    print(json.dumps(sorted(plays)), file=answers, flush=True)
    gc.collect()
    gc.freeze()  # as in our own process
    for number, line in enumerate(sys.stdin):
        name = line.strip()
        if name.endswith("unseen"):
            TOOL.unseen.extend(tracebacks(given["calls"], number))
        gc.collect()
        began = time.process_time()
        turns = plays[name]()
        print(json.dumps({"turns": turns, "cpu_s": time.process_time() - began}), file=answers, flush=True)


if __name__ == "__main__":
    main()
