"""The embedded engine's log-probabilities equal a plain forward's, whether KV was kept, copied, chunked or refilled."""

import asyncio
import copy
import itertools
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from agentgym.engines.base import Engine
from agentgym.engines.transformers import shared_prefix, slot_attention
from agentgym.engines.transformers.batcher import Batcher, Request
from agentgym.engines.transformers.engine import TransformersConfig, TransformersEngine
from agentgym.engines.transformers.lora import _adding, _Delta, _merged
from agentgym.engines.transformers.model import InferenceModel, SlotCache
from agentgym.errors import EngineError
from agentgym.types.arrays import Floats
from agentgym.types.completion import Completion, Sampling, Version
from agentgym.types.weights import Adapter

# PEFT still uses the old name of the attribute in transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

VOCABULARY = 61
CONTEXT = 128
WARM = Sampling(temperature=0.7)

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(kind: str = "Qwen3", **changes: Any) -> Any:
    """Return a random causal language model whose forward takes about a millisecond."""
    config = getattr(transformers, f"{kind}Config")(**SHAPE | changes)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.fixture(scope="module")
def origin() -> Any:
    torch.set_num_threads(1)
    return build(head_dim=8, tie_word_embeddings=True)


@pytest.fixture
def model(origin: Any) -> Any:
    """Return a separate copy for every test, since engines change the weights."""
    return copy.deepcopy(origin)


class NoChat:
    """Placeholder for a tokenizer: these tests use ids."""

    def render(self, messages: Any, tools: Any, *, generation: bool) -> str:
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        raise NotImplementedError

    def parse(self, text: str, tools: Any) -> Any:
        raise NotImplementedError


def engine_over(model: Any, **changes: Any) -> TransformersEngine:
    given: dict[str, Any] = {"slots": 4, "context_tokens": CONTEXT, "prefill_tokens": 32}
    config = TransformersConfig(**given | changes)
    return TransformersEngine(model, config, tokenizer=NoChat())


def batcher_over(model: Any, *, slots: int = 4, prefill_tokens: int = 32, stops: Sequence[int] = ()) -> Batcher:
    policy = InferenceModel(model, slots=slots, context=CONTEXT, threads=1)
    return Batcher(policy, slots=slots, prefill_tokens=prefill_tokens, stop_ids=frozenset(stops))


class Client:
    """Submits requests to a batcher and stores the answers, so that a test controls what happens between steps."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.answers: dict[str, Any] = {}

    def ask(self, session: str, ids: Sequence[int], max_tokens: int = 4, seed: int = 0) -> Request:
        def settle(answer: object) -> None:
            assert session not in self.answers
            self.answers[session] = answer

        request = Request(np.array(ids), session, max_tokens, WARM, seed, settle)
        self.batcher.submit(request)
        return request

    def run(self) -> dict[str, Any]:
        """Step until all requests are answered and return the answers since the last call."""
        for _ in range(2000):
            if not self.batcher.busy:
                break
            self.batcher.step()
        assert not self.batcher.busy
        answers, self.answers = self.answers, {}
        return answers


def ids_of(n: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(n)]


@torch.inference_mode()
def plain(model: Any, ids: Sequence[int], temperature: float = 0.7) -> Floats:
    """Return the log-probability of each id but the first, from the model's own forward without a cache."""
    logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, :-1]
    logprobs: torch.Tensor = torch.log_softmax(logits.float() / temperature, -1)
    return logprobs.gather(-1, torch.tensor(list(ids[1:]))[:, None])[:, 0].numpy()


def assert_plain(model: Any, prompt: Sequence[int], completion: Completion, temperature: float = 0.7) -> None:
    """Assert that the completion's log-probabilities equal those of a plain forward over prompt and completion."""
    expected = plain(model, [*prompt, *completion.token_ids.tolist()], temperature)[len(prompt) - 1 :]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def lora_over(model: Any, seed: int = 0, **changes: Any) -> tuple[Any, Adapter]:
    """Return a PEFT model on a copy, with nonzero B matrices, and its adapter."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | changes)
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    for name, weight in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
        if "lora_magnitude_vector" in name:
            weight.data *= torch.empty_like(weight).uniform_(0.5, 1.5)
    return wrapped, Adapter(config=config.to_dict(), tensors=peft.get_peft_model_state_dict(wrapped))


@pytest.mark.parametrize(("prefill_tokens", "worth"), [(16, 1), (96, 2048), (1024, 1)])
async def test_engine_logprobs_equal_a_plain_forward(
    model: Any, origin: Any, prefill_tokens: int, worth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three turns of 18 rollouts in 6 groups over 5 slots: kept, copied, shared, chunked, padded, evicted, refilled."""
    monkeypatch.setattr(shared_prefix, "_WORTH", worth)
    system = ids_of(24, seed=1)

    async def rollout(engine: TransformersEngine, i: int) -> None:
        draw = random.Random(i)
        ids = system + ids_of(9, seed=i // 3)
        for turn in range(3):
            seed = 100 * i + turn
            done = await engine.generate(ids, session=f"{i}", max_tokens=draw.randint(1, 9), sampling=WARM, seed=seed)
            assert_plain(origin, ids, done)
            ids = ids + done.token_ids.tolist() + ids_of(draw.choice([1, 3, 25]), seed=seed)
        await engine.release(f"{i}")

    async with asyncio.timeout(120), engine_over(model, slots=5, prefill_tokens=prefill_tokens) as engine:
        await asyncio.gather(*(rollout(engine, i) for i in range(18)))
        stats = engine.stats
    assert stats.kept_tokens
    assert stats.copied_tokens


def test_a_turn_computes_only_new_tokens(model: Any, origin: Any) -> None:
    client = Client(batcher_over(model))
    prompt = ids_of(30)
    first = client.ask("s", prompt) and client.run()["s"]
    longer = [*prompt, *first.token_ids.tolist(), *ids_of(10, seed=1)]
    client.ask("s", longer)
    assert_plain(origin, longer, client.run()["s"])
    # The first turn's last sampled id was never computed, so the second computes it with the ten new ones.
    assert client.batcher.stats.prefill_tokens == 30 + 1 + 10
    assert client.batcher.stats.kept_tokens == 30 + 3


def test_a_session_may_change_its_earlier_ids(model: Any, origin: Any) -> None:
    client = Client(batcher_over(model))
    client.ask("s", ids_of(40))
    client.run()
    for changed in (ids_of(12) + ids_of(20, seed=1), ids_of(12), ids_of(7, seed=2)):
        client.ask("s", changed)
        assert_plain(origin, changed, client.run()["s"])


def test_the_common_prefix_of_a_wave_is_computed_once(model: Any, origin: Any) -> None:
    """Two groups of three share 20 ids of system prompt, and each group shares 20 more."""
    client = Client(batcher_over(model, slots=6))
    prompts = [ids_of(20) + ids_of(20, seed=1 + i // 3) for i in range(6)]
    for i, prompt in enumerate(prompts):
        client.ask(f"{i}", prompt, seed=i)
    answers = client.run()
    for i, prompt in enumerate(prompts):
        assert_plain(origin, prompt, answers[f"{i}"])
    # Every row computes the last id of its prompt, from which the first sample is drawn.
    assert client.batcher.stats.prefill_tokens == 20 + 2 * 20 + 4 * 1
    assert client.batcher.stats.copied_tokens == 20 + 4 * 39


def test_a_prompt_of_several_rollouts_is_read_once_per_step(
    model: Any, origin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds across a weight swap, too: the prompts' KV is that of the earlier weights."""
    monkeypatch.setattr(shared_prefix, "_WORTH", 1)
    client = Client(batcher_over(model))
    forward, shared = client.batcher.policy.forward, list[int]()

    def watched(rows: Any, ids: Any, start: Any, width: Any, groups: Any) -> Any:
        shared.append(groups.length if groups else 0)
        return forward(rows, ids, start, width, groups)

    monkeypatch.setattr(client.batcher.policy, "forward", watched)
    prompt = ids_of(30)
    for i in range(4):
        client.ask(f"{i}", prompt, max_tokens=6, seed=i)
    while shared[-3:] != [29, 29, 29]:
        client.batcher.step()
    client.batcher.load_adapter(None, 1)
    for answer in client.run().values():
        assert_plain(origin, prompt, answer)
    assert set(shared[-2:]) == {29}


def test_new_sessions_reuse_the_kv_of_a_released_one(model: Any, origin: Any) -> None:
    """The first one reuses the same slot, the second one gets a copy."""
    client = Client(batcher_over(model))
    client.ask("old", ids_of(30))
    client.run()
    client.batcher.release("old")
    prompts = {"first": [*ids_of(30), 7], "second": [*ids_of(30), 8]}
    for session, prompt in prompts.items():
        client.ask(session, prompt)
    for session, completion in client.run().items():
        assert_plain(origin, prompts[session], completion)
    stats = client.batcher.stats
    assert (stats.prefill_tokens, stats.kept_tokens, stats.copied_tokens) == (30 + 1 + 1, 30, 30)


def test_the_longest_idle_session_is_evicted(model: Any) -> None:
    client = Client(batcher_over(model, slots=2))
    for session, seed in (("a", 1), ("b", 2), ("a", 1), ("c", 3)):
        client.ask(session, ids_of(12, seed=seed))
        client.run()
    kept = client.batcher.stats.kept_tokens
    client.ask("a", ids_of(12, seed=1))
    client.run()
    assert client.batcher.stats.kept_tokens == kept + 11


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_requests_that_wait_for_a_cancelled_one_continue(model: Any, origin: Any, steps: int) -> None:
    client = Client(batcher_over(model, prefill_tokens=8))
    leader = client.ask("leader", ids_of(50))
    client.ask("a", ids_of(50))
    client.ask("b", [*ids_of(50), 1])
    for _ in range(steps):
        client.batcher.step()
    client.batcher.cancel(leader)
    answers = client.run()
    assert answers.keys() == {"a", "b"}
    assert_plain(origin, ids_of(50), answers["a"])
    assert_plain(origin, [*ids_of(50), 1], answers["b"])


def test_a_cancelled_request_stops_waiting(model: Any, origin: Any) -> None:
    """The slot of a request that waited for another's prefix is given away before that prefix is ready."""
    client = Client(batcher_over(model, slots=2, prefill_tokens=8))
    client.ask("leader", ids_of(50))
    waits = client.ask("waits", ids_of(50))
    client.batcher.step()
    client.batcher.cancel(waits)
    prompts = {"leader": ids_of(50), "other": ids_of(50, seed=1)}
    client.ask("other", prompts["other"])
    answers = client.run()
    for session, prompt in prompts.items():
        assert_plain(origin, prompt, answers[session])


@pytest.mark.parametrize("prefill_tokens", [1, 24, 200])
def test_a_prefill_forward_stays_within_its_budget(model: Any, origin: Any, prefill_tokens: int) -> None:
    client = Client(batcher_over(model, slots=8, prefill_tokens=prefill_tokens))
    prompts = [ids_of(n, seed=n) for n in (2, 3, 9, 40, 41, 100, 5, 64)]
    for prompt in prompts:
        client.ask(f"{len(prompt)}", prompt)
    shapes: list[int] = []
    policy: Any = client.batcher.policy
    hidden = policy._hidden

    def watched(where: Any, index: Any, ids: Any, *rest: Any) -> Any:
        shapes.append(ids.size)
        return hidden(where, index, ids, *rest)

    policy._hidden = watched
    answers = client.run()
    for prompt in prompts:
        assert_plain(origin, prompt, answers[f"{len(prompt)}"])
    # A decode forward holds one id per slot, and spans an idle slot.
    assert max(shapes) <= max(prefill_tokens, 8)


def test_a_long_prefill_never_delays_decoding_by_two_steps_in_a_row(model: Any) -> None:
    client = Client(batcher_over(model, prefill_tokens=8))
    client.ask("decodes", ids_of(4), max_tokens=60)
    client.batcher.step()
    client.ask("prefills", ids_of(60, seed=1))
    stats = client.batcher.stats
    for _ in range(10):
        before = stats.decode_steps
        client.batcher.step()
        client.batcher.step()
        assert stats.decode_steps > before
    assert stats.prefill_steps > 7


async def test_sampled_ids_do_not_depend_on_the_batch(model: Any) -> None:
    prompts = [ids_of(5 + 3 * i, seed=i) for i in range(8)]

    async def answer(engine: TransformersEngine, i: int) -> tuple[int, ...]:
        done = await engine.generate(prompts[i], session=f"{i}", max_tokens=12, sampling=WARM, seed=i)
        await engine.release(f"{i}")
        return (*done.token_ids.tolist(),)

    async with engine_over(model) as engine:
        together = await asyncio.gather(*(answer(engine, i) for i in range(8)))
        alone = [await answer(engine, i) for i in reversed(range(8))]
    assert together == alone[::-1]


async def test_samples_follow_the_distribution(model: Any, origin: Any) -> None:
    """The frequencies of 4000 first ids are within five standard deviations of their probabilities."""
    prompt = torch.tensor([ids_of(6)])
    with torch.inference_mode():
        expected = torch.softmax(origin(prompt).logits[0, -1] / 0.7, -1).numpy()
    policy = InferenceModel(model, slots=1, context=CONTEXT, threads=1)
    hidden = policy.forward(np.zeros(1, np.int64), prompt.numpy(), np.zeros(1, np.int64), np.full(1, 6))
    uniform = np.array([random.Random(seed).random() for seed in range(4000)], np.float32)
    ids, _ = policy.draw(hidden.expand(4000, -1), np.full(4000, 0.7, np.float32), uniform)
    off = np.abs(np.bincount(ids, minlength=VOCABULARY) / 4000 - expected)
    assert (off <= 5 * np.sqrt(expected * (1 - expected) / 4000) + 1e-3).all()


async def test_greedy_sampling_takes_the_best_id_and_reports_temperature_one(model: Any, origin: Any) -> None:
    prompt = ids_of(10)
    async with engine_over(model) as engine:
        done, _ = await asyncio.gather(
            engine.generate(prompt, session="greedy", max_tokens=8, sampling=Sampling(temperature=0), seed=0),
            engine.generate(prompt, session="warm", max_tokens=8, sampling=WARM, seed=0),
        )
    assert_plain(origin, prompt, done, temperature=1.0)
    with torch.inference_mode():
        best = origin(torch.tensor([prompt + done.token_ids.tolist()])).logits[0].argmax(-1)
    assert done.token_ids.tolist() == best[len(prompt) - 1 : -1].tolist()


def test_the_stop_id_is_the_last_and_is_kept(model: Any, origin: Any) -> None:
    client = Client(batcher_over(model, stops=range(0, VOCABULARY, 3)))
    for seed in range(4):
        client.ask(f"{seed}", ids_of(10), max_tokens=40, seed=seed)
    for done in client.run().values():
        assert done.finish_reason == "stop"
        assert [id_ % 3 == 0 for id_ in done.token_ids.tolist()] == [False] * (len(done.token_ids) - 1) + [True]
        assert_plain(origin, ids_of(10), done)


def test_a_turn_without_a_stop_ends_at_its_length(model: Any) -> None:
    client = Client(batcher_over(model))
    client.ask("s", ids_of(CONTEXT - 5), max_tokens=5)
    done = client.run()["s"]
    assert (len(done.token_ids), done.finish_reason) == (5, "length")


async def test_more_sessions_than_slots_all_finish(model: Any, origin: Any) -> None:
    prompts = [ids_of(3 + i, seed=i) for i in range(20)]
    async with engine_over(model, slots=3) as engine:
        for _ in range(2):  # by the second time, every session has been evicted at least once
            done = await asyncio.gather(
                *(
                    engine.generate(prompt, session=f"{i}", max_tokens=1 + i % 5, sampling=WARM, seed=i)
                    for i, prompt in enumerate(prompts)
                )
            )
            for prompt, completion in zip(prompts, done, strict=True):
                assert_plain(origin, prompt, completion)


async def test_a_cancelled_request_frees_its_slot(model: Any, origin: Any) -> None:
    """The engine stops in its second forward while the running request and a waiting one are cancelled."""
    loop, standing, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    async with asyncio.timeout(60), engine_over(model, slots=1) as engine:
        forwards = itertools.count()

        def stand_still(*_: object) -> None:
            if next(forwards) == 1:
                loop.call_soon_threadsafe(standing.set)
                go_on.wait()

        def ask(session: str, n: int) -> asyncio.Task[Completion]:
            return asyncio.create_task(
                engine.generate(ids_of(8), session=session, max_tokens=n, sampling=WARM, seed=0), name=session
            )

        model.lm_head.register_forward_pre_hook(stand_still)
        runs, waits, follows = ask("runs", CONTEXT - 8), ask("waits", 5), ask("follows", 5)
        await standing.wait()
        for task in (runs, waits):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        go_on.set()
        assert_plain(origin, ids_of(8), await follows)
        again = await ask("runs", 5)
        assert again.token_ids.tolist() == follows.result().token_ids.tolist()
        # One id from the prefill and one from the forward that was running.
        assert engine.stats.sampled_tokens == 2 + 5 + 5


def test_a_cancelled_request_gets_no_answer_and_samples_no_more(model: Any) -> None:
    client = Client(batcher_over(model, slots=1))
    request = client.ask("s", ids_of(8), max_tokens=50)
    for _ in range(5):
        client.batcher.step()
    sampled = client.batcher.stats.sampled_tokens
    client.batcher.cancel(request)
    assert not client.batcher.busy
    assert client.run() == {}
    assert client.batcher.stats.sampled_tokens == sampled < 50


async def test_an_adapter_swap_changes_new_tokens_and_none_restores_the_model(model: Any, origin: Any) -> None:
    wrapped, adapter = lora_over(origin)
    other, more = lora_over(origin, seed=1, use_rslora=True, target_modules=["q_proj", "down_proj"])
    third, most = lora_over(origin, seed=2, use_rslora=True, use_dora=True)
    prompt = ids_of(20)

    async with engine_over(model) as engine:

        async def answer(session: str) -> Completion:
            return await engine.generate(prompt, session=session, max_tokens=6, sampling=WARM, seed=0)

        base = await answer("s")
        for version, (weights, change) in enumerate(
            [(wrapped, adapter), (other, more), (third, most), (wrapped, adapter)], 1
        ):
            await engine.load_adapter(change, version=version)
            assert engine.version == version
            # One session kept its slot and one is new: neither may use KV of other weights.
            for done in (await answer("s"), await answer(f"new {version}")):
                assert done.versions == (Version(0, version),)
                assert_plain(weights, prompt, done)
                assert not np.array_equal(done.logprobs, base.logprobs)
        await engine.load_adapter(None, version=5)
        assert np.array_equal((await answer("s")).logprobs, base.logprobs)
    for name, weight in origin.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


def test_a_request_in_flight_spans_two_versions(model: Any, origin: Any) -> None:
    _, adapter = lora_over(origin)
    client = Client(batcher_over(model))
    prompt = ids_of(10)
    client.ask("s", prompt, max_tokens=9)
    for _ in range(4):
        client.batcher.step()
    client.batcher.load_adapter(adapter, 7)
    done = client.run()["s"]
    assert done.versions == (Version(0, 0), Version(4, 7))
    expected = plain(origin, prompt + done.token_ids.tolist())[len(prompt) - 1 :]
    off = np.abs(done.logprobs - expected)
    assert off[:4].max() < 1e-4 < off[4:].min()


def test_weights_that_are_replaced_before_they_sample_have_no_span(model: Any, origin: Any) -> None:
    _, adapter = lora_over(origin)
    client = Client(batcher_over(model))
    client.ask("s", ids_of(10), max_tokens=9)
    for _ in range(4):
        client.batcher.step()
    for version, weights in enumerate([adapter, None, adapter], 7):
        client.batcher.load_adapter(weights, version)
    assert client.run()["s"].versions == (Version(0, 0), Version(4, 9))


def test_after_a_swap_no_old_kv_is_kept_or_copied(model: Any, origin: Any) -> None:
    """At the swap, one turn is over, one has sampled, one prefills, two wait for its prefix and one for a slot."""
    wrapped, adapter = lora_over(origin)
    client = Client(batcher_over(model, slots=5, prefill_tokens=8))
    prompts = {name: ids_of(30, seed=i) for i, name in enumerate(["over", "sampled", "prefills"])}
    client.ask("over", prompts["over"])
    over = client.run()["over"]
    client.ask("sampled", prompts["sampled"], max_tokens=40)
    for _ in range(8):
        client.batcher.step()
    for name in ("prefills", "waits", "waits too", "queues"):
        prompts[name] = prompts["prefills"]
        client.ask(name, prompts[name])
    for _ in range(3):
        client.batcher.step()
    client.batcher.load_adapter(adapter, 1)
    prompts["over"] = [*prompts["over"], *over.token_ids.tolist(), 5]
    client.ask("over", prompts["over"])
    client.ask("copies", prompts["sampled"])
    prompts["copies"] = prompts["sampled"]
    answers = client.run()
    assert [version.version for version in answers["sampled"].versions] == [0, 1]
    for name in ("over", "prefills", "waits", "waits too", "queues", "copies"):
        assert answers[name].versions == (Version(0, 1),), name
        assert_plain(wrapped, prompts[name], answers[name])
    # The turn that spans both weights is over: the next one is computed from scratch.
    longer = prompts["sampled"] + answers["sampled"].token_ids.tolist()
    client.ask("sampled", longer)
    assert_plain(wrapped, longer, client.run()["sampled"])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda config, tensors: tensors.clear(), "no tensors"),
        (lambda config, tensors: tensors.pop(next(k for k in tensors if "lora_A" in k)), "only lora_B"),
        (lambda config, tensors: config.update(r=3), "r is 3"),
        (lambda config, tensors: config.update(use_dora=True), "missing: lora_magnitude_vector"),
        (lambda config, tensors: config.update(rank_pattern={"q_proj": 2}), "rank_pattern"),
        (lambda config, tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": 0}), "lm_head"),
        (lambda config, tensors: next(iter(tensors.values())).fill_(torch.nan), "not finite"),
    ],
)
async def test_an_adapter_that_does_not_fit_changes_nothing(
    model: Any, origin: Any, spoil: Callable[[Any, Any], object], says: str
) -> None:
    _, adapter = lora_over(origin)
    config, tensors = dict(adapter.config), dict(adapter.tensors)
    spoil(config, tensors)
    async with engine_over(model) as engine:
        with pytest.raises(ValueError, match=says):
            await engine.load_adapter(Adapter(config=config, tensors=tensors), version=1)
        assert engine.version == 0
        scores = await engine.score(ids_of(9), sampling=WARM)
    np.testing.assert_allclose(scores, plain(origin, ids_of(9)), atol=1e-5)


async def test_score_equals_the_logprobs_that_generate_reports(model: Any) -> None:
    async with engine_over(model) as engine:
        done = await engine.generate(ids_of(12), session="s", max_tokens=8, sampling=WARM, seed=0)
        scores = await engine.score([*ids_of(12), *done.token_ids.tolist()], sampling=WARM)
        assert len(await engine.score([3], sampling=WARM)) == 0
    assert len(scores) == 19
    np.testing.assert_allclose(scores[-8:], done.logprobs, atol=1e-4)


async def test_ids_outside_the_vocabulary_are_refused(model: Any) -> None:
    async with engine_over(model) as engine:
        cases: list[tuple[Any, str]] = [
            ([1, 2, VOCABULARY, -1], f"id {VOCABULARY} at position 2"),
            ([-1, 2], "id -1 at position 0"),
            ([], "at least one"),
            ([1.5], "integer"),
        ]
        for ids, says in cases:
            with pytest.raises(ValueError, match=says):
                await engine.generate(ids, session="s", max_tokens=1, sampling=WARM, seed=0)
            with pytest.raises(ValueError, match=says):
                await engine.score(ids, sampling=WARM)


async def test_a_request_over_the_context_is_refused(model: Any) -> None:
    async with engine_over(model) as engine:
        with pytest.raises(ValueError, match="exceed context_tokens, which is 128"):
            await engine.generate(ids_of(100), session="s", max_tokens=29, sampling=WARM, seed=0)
        with pytest.raises(ValueError, match="at least 1"):
            await engine.generate(ids_of(100), session="s", max_tokens=0, sampling=WARM, seed=0)
        with pytest.raises(ValueError, match="exceed context_tokens, which is 128"):
            await engine.score(ids_of(129), sampling=WARM)


def test_a_session_has_one_request_at_a_time(model: Any) -> None:
    client = Client(batcher_over(model))
    client.ask("s", ids_of(5))
    with pytest.raises(ValueError, match="'s' is still generating"):
        client.ask("s", ids_of(5))


async def test_a_crash_in_the_thread_fails_requests(model: Any) -> None:
    async with engine_over(model, slots=1) as engine:
        # This is a module of the engine's own model, so the thread itself hits the error.
        model.lm_head.register_forward_pre_hook(crash)
        asked = [engine.generate(ids_of(5), session=f"{i}", max_tokens=3, sampling=WARM, seed=0) for i in range(3)]
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, EngineError)
            assert "no more memory" in str(outcome)
            assert isinstance(outcome.__cause__, MemoryError)
        with pytest.raises(EngineError, match="no more memory"):
            async with asyncio.timeout(60):
                await engine.release("0")


async def test_a_crash_in_a_command_fails_it_and_the_others(model: Any) -> None:
    async with engine_over(model) as engine:
        model.lm_head.register_forward_pre_hook(crash)
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(
                engine.score(ids_of(5), sampling=WARM),
                engine.generate(ids_of(5), session="s", max_tokens=3, sampling=WARM, seed=0),
                return_exceptions=True,
            )
    assert [type(outcome) for outcome in outcomes] == [EngineError, EngineError]


def crash(*_: object) -> None:
    raise MemoryError("no more memory")


async def test_closing_fails_unanswered_requests(model: Any) -> None:
    engine = engine_over(model, slots=1)
    with pytest.raises(EngineError, match="not open"):
        await engine.release("s")
    loop, standing, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def stand_still(*_: object) -> None:
        loop.call_soon_threadsafe(standing.set)
        go_on.wait()

    async with engine:
        model.lm_head.register_forward_pre_hook(stand_still)
        asked = [
            asyncio.create_task(engine.generate(ids_of(5), session=f"{i}", max_tokens=120, sampling=WARM, seed=0))
            for i in range(3)
        ]
        await standing.wait()
        loop.call_soon(go_on.set)  # It runs while the engine closes.
    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(outcome, EngineError | Completion) for outcome in outcomes)
    assert isinstance(asked[-1].exception(), EngineError)
    with pytest.raises(EngineError, match="not open"):
        await engine.release("s")
    await engine.close()


async def test_releasing_a_session_that_generates_fails_its_request(model: Any) -> None:
    client = Client(batcher_over(model))
    client.ask("s", ids_of(5))
    client.batcher.release("s")
    client.batcher.release("unknown")
    assert isinstance(client.run()["s"], EngineError)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral"])
def test_other_full_attention_models_work(kind: str) -> None:
    model = build(kind, **({"sliding_window": None} if kind == "Mistral" else {}))
    client = Client(batcher_over(model))
    client.ask("s", ids_of(9))
    assert_plain(model, ids_of(9), client.run()["s"])


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "has layers of conv; the embedded engine only"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic rope"),
        ("Qwen3", {"max_position_embeddings": 64}, "expected at most 64 for"),
    ],
)
def test_a_model_that_would_get_wrong_logprobs_is_refused(kind: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        batcher_over(build(kind, **changes))


def rounded(model: Any) -> None:
    """Change the model's hidden states by half a unit in their last place, in another way in each forward pass."""
    noise = torch.Generator().manual_seed(0)
    model.get_decoder().norm.register_forward_hook(
        lambda _, given, out: out * (1 + 2.0**-8 * torch.randn(out.shape, generator=noise)).to(out.dtype)
    )


def test_a_bfloat16_model_with_large_logits_is_accepted() -> None:
    """Pretrained models have logits of standard deviation 2 to 5, of which rounding changes some by more than 1."""
    model = build(vocab_size=20_000, hidden_size=128)
    with torch.no_grad():
        model.lm_head.weight *= 4 / model(input_ids=torch.arange(8)[None]).logits[0, -1].std()
    model.to(torch.bfloat16)
    rounded(model)
    with torch.inference_mode():
        one, other = (model(input_ids=torch.arange(8)[None]).logits[0, -1].float() for _ in range(2))
    assert float(one.std()) == pytest.approx(4, abs=0.2)
    assert float((one - other).abs().max()) > 0.1
    batcher_over(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [lambda x: 1.1 * x, lambda x: 30 * torch.tanh(x / 30)], ids=["scale", "cap"])
def test_a_change_of_the_logits_that_the_config_does_not_have_is_detected(change: Any, dtype: torch.dtype) -> None:
    model = build().to(dtype)
    forward = model.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = change(out.logits)
        return out

    model.forward = changed
    with pytest.raises(ValueError, match="changes its logits after the output layer"):
        batcher_over(model)


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        (torch.float32, r"logits in float32 are .* standard deviations from the model's own, .*; use another engine$"),
        (
            torch.bfloat16,
            r"logits in bfloat16 are .* use dtype=\"float32\" \(--engine.dtype float32\) or another engine$",
        ),
    ],
)
def test_a_wrong_mask_is_detected(dtype: torch.dtype, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_seen(mask_function: Any, q_offset: Any, **rest: Any) -> Any:
        over_slots = isinstance(q_offset, torch.Tensor)
        return mask(mask_function=sees_all if over_slots else mask_function, q_offset=q_offset, **rest)

    def sees_all(_row: Any, _head: Any, query: Any, key: Any) -> Any:
        return (key >= 0) & (query >= 0)

    mask = slot_attention._mask
    monkeypatch.setattr(slot_attention, "_mask", all_seen)
    with pytest.raises(ValueError, match=says):
        batcher_over(build("Olmo2").to(dtype))


async def test_a_folder_is_loaded_with_its_tokenizer_and_stop_ids(tmp_path: Path) -> None:
    model = build(eos_token_id=3)
    words = {"<eos>": 0} | {f"w{i}": i for i in range(1, VOCABULARY)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<eos>")), eos_token="<eos>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ ' w1' if add_generation_prompt }}"
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    async with TransformersEngine(tmp_path, TransformersConfig(slots=1, context_tokens=CONTEXT)) as engine:
        ids = engine.tokenizer.encode(engine.tokenizer.render([{"role": "user", "content": "w5"}], [], generation=True))
        for seed in range(8):
            done = await engine.generate(ids, session="s", max_tokens=100, sampling=WARM, seed=seed)
            assert_plain(model, ids, done)
            stops = [id_ in (0, 3) for id_ in done.token_ids.tolist()]
            assert not any(stops[:-1])
            assert stops[-1] == (done.finish_reason == "stop")


async def test_without_a_context_in_the_config_the_engine_chooses_one_when_it_opens(model: Any) -> None:
    engine = engine_over(model, context_tokens=None)
    with pytest.raises(EngineError, match="unknown until the engine is open"):
        _ = engine.context_tokens
    async with engine:
        assert engine.context_tokens == CONTEXT


def test_transformers_engine_fulfills_the_engine_protocol(model: Any) -> None:
    engine: Engine = engine_over(model)
    assert (engine.version, engine.context_tokens) == (0, CONTEXT)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_an_adapter_on_bfloat16_weights_gives_the_same_result_as_the_trainer(dora: bool, bias: bool) -> None:
    """PEFT leaves the weights unchanged, too; the sum of weights and adapter would be rounded differently."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 16, bias=bias).to(torch.bfloat16)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"], use_dora=dora)
    theirs = peft.get_peft_model(torch.nn.Sequential(copy.deepcopy(layer)), config)
    sides = {name.split(".")[-3]: weight.detach() for name, weight in theirs.named_parameters() if "lora_" in name}
    sides["lora_B"].normal_(0, 3e-3)
    lengths = next((weight.detach() for name, weight in theirs.named_parameters() if "magnitude" in name), None)
    delta = _Delta(sides["lora_A"], sides["lora_B"], lengths)
    merged = copy.deepcopy(layer)
    inputs = torch.randn(2000, 64).to(torch.bfloat16)
    with torch.inference_mode():
        merged.weight.copy_(_merged(layer.weight, delta, 2.0))
        layer.register_forward_hook(_adding(delta, 2.0, layer.weight))
        wanted = theirs(inputs).float()
        gaps = [(ours(inputs).float() - wanted).abs().mean() for ours in (layer, merged)]
    assert gaps[0] < gaps[1] / 2


def test_a_cpus_kv_takes_memory_only_when_it_is_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    config = build(head_dim=8).config
    before = resident()
    cache = SlotCache(config, 64, 40_000, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.nbytes == 2 * 2 * 64 * 2 * 40_001 * 8 * 4
    assert resident() - before < cache.nbytes // 8
    for slot in range(64):
        cache.copy(slot, (slot + 1) % 64, slice(0, 100))
    assert resident() - before < cache.nbytes // 8
    assert not cache._all[:, :, ::9, :, ::999].any()
