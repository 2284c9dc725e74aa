"""`ag.Endpoint` against a real HTTP server: requests, parsing of responses, and recovery from failures."""

import asyncio
import json
import random
import re
import socket
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.messages import NO_POLICY
from agentgym.environments.limits import KeepLast
from agentgym.errors import EngineError
from agentgym.evals.evaluation import Evaluation
from agentgym.evals.kept import SUMMARY
from agentgym.evals.report import score_lines
from agentgym.machine import time_limits
from agentgym.samples import build_samples, demonstrations
from agentgym.scheduling.accounting import Groups
from agentgym.types.rollout import Group
from tests.engines.endpoint.chat_server import (
    HANG,
    HANG_UP,
    SOON,
    Answers,
    ChatServer,
    Request,
    Sent,
    called,
    chat_server,
    said,
)

pytest.importorskip("openai", reason="needs the extra agentgym-kit[endpoint]")


class Shop(ag.ToolEnv[ag.Task]):
    """An env with reward 1 for the price that the tool returns."""

    limits = ag.Limits(turns=4, turn_tokens=64, context_tokens=4096)

    @classmethod
    def tasks(cls, split: str) -> list[ag.Task]:
        return [ag.Task(id=str(i), prompt="What does tea cost?") for i in range(8)]

    @ag.tool
    def price(self, of: str) -> str:
        """Look a price up."""
        return f"{of} costs 3"

    @ag.reward
    def right(self) -> float:
        return float(self.answer == "3")


TASK = Shop.tasks("test")[0]


def buys(request: Request, number: int) -> Sent:
    """Look the price up and answer with it."""
    return said("3") if request["messages"][-1]["role"] == "tool" else called("price", '{"of": "tea"}')


def endpoint(server: ChatServer, **settings: Any) -> ag.Endpoint:
    given: dict[str, Any] = {"model": "m", "first_wait_s": 0.001, **settings}
    return ag.Endpoint(server.url, **given)


async def play(answers: Answers, **settings: Any) -> tuple[ag.Rollout, ChatServer]:
    async with chat_server(answers) as server, endpoint(server, **settings) as engine:
        return await ag.rollout(Shop, TASK, engine, seed=1), server


async def test_a_tool_is_called_through_the_tools_api_and_its_result_returns_under_the_call() -> None:
    rollout, server = await play(buys)
    assert (rollout.reward, rollout.stop_reason) == (1.0, "answer")
    first, second = server.requests
    assert first["model"] == "m"
    assert [tool["function"]["name"] for tool in first["tools"]] == ["price"]
    assert first["max_tokens"] == 64
    assert first["messages"] == [{"role": "user", "content": "What does tea cost?"}]
    call = {"id": "call_1", "type": "function", "function": {"name": "price", "arguments": '{"of": "tea"}'}}
    assert second["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "tea costs 3", "tool_call_id": "call_1"},
    ]


async def test_tools_in_the_prompt_are_called_and_answered_as_text() -> None:
    def answers(request: Request, number: int) -> Sent:
        if "<tool_response>" in request["messages"][-1]["content"]:
            return said("3")
        return said('I look.\n<tool_call>\n{"name": "price", "arguments": {"of": "tea"}}\n</tool_call>')

    rollout, server = await play(answers, tools="prompt")
    assert rollout.reward == 1.0
    assert all("tools" not in request for request in server.requests)
    system, user, assistant, told = server.requests[1]["messages"]
    assert system["role"] == "system"
    assert '"name": "price"' in system["content"]
    assert user == {"role": "user", "content": "What does tea cost?"}
    assert assistant["content"].startswith("I look.\n<tool_call>\n{")
    assert told == {"role": "user", "content": "<tool_response>\ntea costs 3\n</tool_response>"}


async def test_tokens_and_cost_of_each_rollout_are_the_endpoints_own_counts() -> None:
    usage = {
        "prompt_tokens": 1000,
        "completion_tokens": 200,
        "prompt_tokens_details": {"cached_tokens": 400},
        "completion_tokens_details": {"reasoning_tokens": 150},
    }
    prices = {"prompt_price": 2.0, "cached_price": 0.5, "completion_price": 10.0}
    rollout, _ = await play(lambda request, number: said("3", usage=usage), **prices)
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "requests")
    assert [rollout.metrics[f"usage/{name}"] for name in names] == [1000, 400, 200, 150, 1]
    assert rollout.metrics["usage/cost"] == pytest.approx((600 * 2 + 400 * 0.5 + 200 * 10) / 1e6)
    (segment,) = rollout.segments
    assert len(segment.token_ids) == 1000 + 50  # the prompt as counted, and the text that later prompts would contain
    assert rollout.sampled_tokens == 50


async def test_an_answer_without_usage_is_estimated_and_reported_as_such() -> None:
    bare = Sent({"choices": [{"message": {"content": "3"}}]})
    rollout, _ = await play(lambda request, number: bare, completion_price=1.0)
    assert rollout.metrics["usage/uncounted_requests"] == 1
    assert "usage/cost" not in rollout.metrics
    assert rollout.sampled_tokens > 0
    group = Group(group_id=rollout.group_id, rollouts=(rollout,))
    lines = score_lines(Evaluation(groups=Groups([group]), k=1))
    assert "          1 requests had no usage counts: estimated, without a cost" in lines


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 3, "completion_tokens": 10**13},
        {"prompt_tokens": 10**30},
        {"completion_tokens": -1},
        {"prompt_tokens": None, "completion_tokens": 4},
        {"completion_tokens": 4, "completion_tokens_details": {"reasoning_tokens": "many"}},
        "four",
    ],
)
async def test_an_invalid_token_count_is_ignored(usage: Any) -> None:
    answer = Sent({"choices": [{"message": {"content": "3"}}], "usage": usage})
    rollout, server = await play(lambda request, number: answer)
    assert (rollout.error, len(server.requests)) == (None, 1)
    assert rollout.metrics["usage/uncounted_requests"] == 1
    assert 0 < rollout.sampled_tokens < 100


@pytest.mark.parametrize("url", ["http://[::bad", "http://127.0.0.1:99999/v1", "http://:80/v1", "http://h:port/v1"])
def test_an_invalid_url_is_refused_by_its_field(url: str) -> None:
    with pytest.raises(ValueError, match=r"^url: .*, got "):
        ag.Endpoint(url)


async def test_the_error_says_that_nobody_listens_at_the_url() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(EngineError, match=r"cannot connect \(.*\); is it running\?"):
        async with ag.Endpoint(f"http://127.0.0.1:{port}/v1"):
            pass


async def test_transient_failures_are_retried_and_nothing_is_lost() -> None:
    rng = random.Random(0)
    troubles: list[Sent | str] = [
        Sent({"error": {"message": "slow down"}}, 429, SOON),
        Sent("<html>oops</html>", 500, SOON),
        Sent("<html>a proxy's page</html>"),
        Sent({"choices": []}),
        Sent({"error": {"message": "upstream"}}),
        Sent('{"choices": [{"mess'),
        HANG_UP,
    ]
    left = [*troubles * 2, HANG]
    rng.shuffle(left)

    def answers(request: Request, number: int) -> Sent | str:
        return left.pop() if left and number % 2 else buys(request, number)

    async with chat_server(answers) as server, endpoint(server, retries=100, timeout_s=3) as engine:
        evaluation = await ag.evaluate(Shop, engine, n=8, k=2)
        assert not left
        assert evaluation.rewards == {str(i): (1.0, 1.0) for i in range(8)}
        assert engine.sent_again >= 15
        assert engine.usage.requests == 32
    assert evaluation.account()["sent_again"] == engine.usage.sent_again >= 15
    assert f"{'':<10}{engine.usage.sent_again} requests were sent again after a failure" in score_lines(evaluation)


async def test_requests_sent_again_are_counted_if_the_response_is_then_refused() -> None:
    def answers(request: Request, number: int) -> Sent:
        return said("no", reason="content_filter") if number else Sent("no", 503, SOON)

    async with chat_server(answers) as server, endpoint(server, retries=2) as engine:
        rollout = await ag.rollout(Shop, Shop.tasks("test")[0], engine)
        assert rollout.reward is None
        assert rollout.metrics["usage/sent_again"] == engine.sent_again == 1


async def test_a_rollout_that_is_never_answered_fails_alone_with_the_reason(tmp_path: Path) -> None:
    def answers(request: Request, number: int) -> Sent:
        return Sent("no", 503, SOON) if request["messages"][0]["content"] == "down" else buys(request, number)

    tasks = [*Shop.tasks("test")[:3], ag.Task(id="down", prompt="down")]
    async with chat_server(answers) as server, endpoint(server, retries=2) as engine:
        evaluation = await ag.evaluate(Shop, engine, tasks=tasks, output_dir=tmp_path)
    assert evaluation.rewards == {"0": (1.0,), "1": (1.0,), "2": (1.0,), "down": (None,)}
    assert evaluation.rollouts[3].metrics["usage/sent_again"] == 2
    assert json.loads((tmp_path / SUMMARY).read_text())["sent_again"] == 2
    assert f"{'':<10}2 requests were sent again after a failure" in score_lines(evaluation)
    ((why, times),) = evaluation.failures
    assert times == 1
    assert why.startswith("EngineError: endpoint http://127.0.0.1")
    assert "status 503: no, after 3 requests" in why


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Sent({"error": {"message": "bad key"}}, 401), "status 401: .*bad key"),
        (Sent({"error": {"message": "what?"}}, 404), "such as /v1"),
        (Sent({"error": {"message": "pay", "code": "insufficient_quota"}}, 429), "status 429"),
        (
            Sent("later", 429, {"retry-after": "3600"}),
            "status 429: later; not sent again: it asks for 3600 s, but longest_wait_s is 60",
        ),
        (said("no", reason="content_filter"), "finish_reason 'content_filter'"),
    ],
)
async def test_permanent_failures_are_not_retried(answer: Sent, told: str) -> None:
    rollout, server = await play(lambda request, number: answer)
    assert rollout.reward is None
    assert rollout.error is not None
    assert re.search(told, rollout.error)
    assert len(server.requests) == 1


async def test_at_most_concurrency_requests_run_at_once() -> None:
    async with chat_server(buys) as server, endpoint(server, concurrency=3) as engine:
        full = asyncio.Event()

        async def wait_for_three() -> None:
            if server.running == 3:
                full.set()
            await full.wait()

        server.before = wait_for_three
        evaluation = await ag.evaluate(Shop, engine, n=8)
    assert evaluation.reward == 1.0
    assert server.most_at_once == 3


async def test_an_answer_that_was_cut_by_a_limit_ends_the_rollout_with_length() -> None:
    rollout, _ = await play(lambda request, number: said("3", reason="length"))
    assert rollout.stop_reason == "length"


async def test_reasoning_is_kept_and_sent_back_only_if_requested() -> None:
    def answers(request: Request, number: int) -> Sent:
        if number:
            return said("3", reasoning="so it is 3")
        call = called("price", '{"of": "tea"}')
        call.body["choices"][0]["message"]["reasoning_content"] = "I must look"
        return call

    rollout, server = await play(answers)
    assert [m.get("reasoning_content") for m in rollout.messages] == ["I must look", "so it is 3"]
    assert "reasoning_content" not in server.requests[1]["messages"][1]
    _, server = await play(answers, send_reasoning=True)
    assert server.requests[1]["messages"][1]["reasoning_content"] == "I must look"


@pytest.mark.parametrize("written", ['{"of": tea', '{"of": "gin", "of": "tea"}', '{"of": 1e999}', "{} {}"])
async def test_a_call_with_invalid_json_is_reported_to_the_model_and_sent_back_as_json(written: str) -> None:
    def answers(request: Request, number: int) -> Sent:
        return said("3") if number else called("price", written)

    rollout, server = await play(answers)
    assert rollout.metrics["malformed_calls"] == 1
    _, call, told = server.requests[1]["messages"]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"raw": written}
    assert told["tool_call_id"] == "call_1"


async def test_sampling_is_sent_with_the_request_and_fields_can_be_left_out_or_added() -> None:
    sampling = ag.Sampling(temperature=0.3, top_p=0.9, top_k=5, min_p=0.1, stop=("END",), max_tokens=7)
    more = {"leave_out": ("seed", "max_tokens"), "extra_body": {"max_completion_tokens": 9}}
    async with chat_server(buys) as server, endpoint(server) as engine, endpoint(server, **more) as other:
        await ag.rollout(Shop, TASK, engine, sampling=sampling)
        await ag.rollout(Shop, TASK, other, sampling=sampling)
    first, *_, last = server.requests
    fields = {"temperature": 0.3, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop": ["END"], "max_tokens": 7}
    assert {name: first[name] for name in fields} == fields
    assert last["max_completion_tokens"] == 9
    assert not {"seed", "max_tokens"} & last.keys()


async def test_the_key_comes_from_the_environment_and_is_named_if_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    _, server = await play(buys, api_key_env="MY_KEY")
    assert "authorization: bearer secret" in server.headers[0]
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ValueError, match=r"^api_key_env: the environment variable MY_KEY is not set"):
        await play(buys, api_key_env="MY_KEY")


@pytest.mark.parametrize("names", [["only"], ["one", "two"]])
async def test_the_model_may_be_omitted_if_the_endpoint_serves_only_one(names: list[str]) -> None:
    def answers(request: Request, number: int) -> Sent:
        listed = {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}
        return buys(request, number) if request else Sent(listed)

    async with chat_server(answers) as server:
        if len(names) > 1:
            with pytest.raises(ValueError, match=r"^model: http.* serves one, two; set `model` to the one to use"):
                await ag.evaluate(Shop, server.url, n=1)
        else:
            assert (await ag.evaluate(Shop, server.url, n=1)).reward == 1.0
            assert server.requests[-1]["model"] == "only"


class Compacting(Shop):
    """An env that summarizes after each turn."""

    context = ag.Compact(turns=1, keep=KeepLast(1))


async def test_a_summarized_conversation_continues_from_its_summary() -> None:
    def answers(request: Request, number: int) -> Sent:
        return [called("price", '{"of": "tea"}'), said("tea is 3"), said("3")][number]

    async with chat_server(answers) as server, endpoint(server) as engine:
        rollout = await ag.rollout(Compacting, TASK, engine)
    assert rollout.reward == 1.0
    assert [segment.kind for segment in rollout.segments] == ["root", "compaction"]
    assert "tea is 3" in server.requests[2]["messages"][0]["content"]


class Asking(Shop):
    """An env whose tool answers through a fork."""

    @ag.tool
    async def think(self) -> str:
        """Think in a fork."""
        async with self.fork("fork", [ag.Message(role="user", content="think")]) as agent:
            return await agent.run()


async def test_a_fork_continues_from_the_whole_conversation() -> None:
    def answers(request: Request, number: int) -> Sent:
        return [called("think", "{}"), said("deep"), said("3")][number]

    async with chat_server(answers) as server, endpoint(server) as engine:
        rollout = await ag.rollout(Asking, TASK, engine)
    assert rollout.reward == 1.0
    assert [segment.kind for segment in rollout.segments] == ["root", "fork"]
    asked, call, told, think = server.requests[1]["messages"]
    assert asked["content"] == "What does tea cost?"
    assert think == {"role": "user", "content": "think"}
    # The tools API accepts no call without a result.
    assert told == {"role": "tool", "content": "[no result]", "tool_call_id": call["tool_calls"][0]["id"]}
    assert server.requests[2]["messages"][-1]["content"] == "deep"


async def test_a_prompt_that_the_endpoint_counts_as_full_ends_the_rollout_with_context() -> None:
    usage = {"prompt_tokens": 4090, "completion_tokens": 6}
    call = called("price", '{"of": "tea"}')
    call.body["usage"] = usage
    rollout, server = await play(lambda request, number: call)
    assert (rollout.stop_reason, len(server.requests)) == ("context", 1)


async def test_tokens_from_an_endpoint_are_never_trained_on() -> None:
    rollout, _ = await play(buys)
    assert {v.version for s in rollout.segments for t in s.turns for v in t.versions} == {NO_POLICY}
    group = Group(group_id=TASK.id, rollouts=(rollout,))
    with pytest.raises(ValueError, match=r"^rollout '0/0' was sampled from an endpoint.*ag\.TransformersEngine"):
        build_samples([group])
    with pytest.raises(ValueError, match="was sampled from an endpoint"):
        demonstrations([rollout])


async def test_a_run_refuses_an_endpoint_before_it_starts() -> None:
    run = ag.RunConfig(recipe="r", env="no_such:Env", model="tiny")
    with pytest.raises(ValueError, match=r"^engine: Endpoint returns neither token ids nor log-probabilities"):
        await ag.train_policy(run, engine=ag.Endpoint("http://localhost:1/v1", model="m"))


async def test_operations_that_need_token_ids_are_refused_by_name() -> None:
    engine = ag.Endpoint("http://localhost:1/v1", model="m")
    with pytest.raises(EngineError, match=r"^Endpoint\.load_adapter: .*for evaluation"):
        await engine.load_adapter(None, version=1)
    with pytest.raises(EngineError, match=r"^Endpoint\.score: "):
        await engine.score([1], sampling=ag.Sampling())
    with pytest.raises(EngineError, match=r"^Endpoint\.generate: "):
        await engine.generate([1], session="", max_tokens=1, sampling=ag.Sampling(), seed=0)
    with pytest.raises(EngineError, match=r"^Endpoint\.tokenizer: "):
        engine.tokenizer  # noqa: B018


async def test_using_a_closed_endpoint_raises_an_error_that_says_how_to_open_it() -> None:
    rollout = await ag.rollout(Shop, TASK, ag.Endpoint("http://localhost:1/v1", model="m"))
    assert rollout.error == "EngineError: the endpoint is not open: use it inside `async with`"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"retries": -1}, "^retries: must be at least 0"),
        ({"tools": "xml"}, "^tools: "),
        ({"timeout": 3}, "there is no field 'timeout'; did you mean 'timeout_s'"),
    ],
)
def test_an_invalid_setting_is_refused_by_its_name(settings: dict[str, Any], told: str) -> None:
    with pytest.raises((ValueError, TypeError), match=told):
        ag.Endpoint("http://localhost/v1", model="m", **settings)


def test_a_url_without_its_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^url: must begin with http"):
        ag.Endpoint("localhost:8000", model="m")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "0.5", "retry-after-ms": "20"}, 0.02),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry-after": "-1"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({}, None),
    ],
)
def test_the_retry_after_header_is_parsed(headers: dict[str, str], seconds: float | None) -> None:
    from agentgym.engines.endpoint.client import retry_after_s

    assert retry_after_s(headers) == seconds


async def test_waiting_does_not_count_toward_the_rollouts_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[bool] = []

    slept = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds:  # A blocked loop also calls sleep(0), which only lets others run.
            assert seconds == 7.0
            paused.append(all(limit._pauses > 0 for limit in time_limits._limits.get()))
        await slept(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    later = Sent("later", 429, {"retry-after": "7"})
    rollout, _ = await play(lambda request, number: buys(request, number) if number else later)
    assert rollout.reward == 1.0
    assert paused == [True]
