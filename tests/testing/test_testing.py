"""The building blocks of env tests: the byte tokenizer, the script, the fake sandbox, and the contract check."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import agentgym as ag
from agentgym.engines.scripted import ByteTokenizer, Scripted, call, calls, raw, say
from agentgym.errors import EngineError
from agentgym.sandboxes.fake.sandbox import FakeSandbox, FakeSandboxPool
from agentgym.scheduling import run_groups
from agentgym.testing import NOOP, check_env, sample

TASK = ag.Task(id="t", prompt=(ag.Message(role="user", content="Name the secret."),))
TOKENIZER = ByteTokenizer()
MARKS = st.sampled_from(["<|im_start|>", "<|im_end|>", "<tool_call>", "\n"])


@given(st.lists(st.text() | MARKS).map("".join))
def test_encoding_and_decoding_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.integers(0, 127) | st.just(ByteTokenizer.END)))
def test_ids_of_plain_characters_survive_a_round_trip(ids: list[int]) -> None:
    assert TOKENIZER.encode(TOKENIZER.decode(ids)) == ids or "<|im_" in TOKENIZER.decode([i for i in ids if i < 128])


@given(st.lists(st.integers(0, ByteTokenizer.vocabulary - 1)))
def test_any_ids_of_the_vocabulary_can_be_parsed(ids: list[int]) -> None:
    assert TOKENIZER.parse(TOKENIZER.decode(ids), [])["role"] == "assistant"


arguments = st.dictionaries(st.text(), st.none() | st.integers() | st.text())


@given(st.lists(st.tuples(st.text(min_size=1), arguments), min_size=1, max_size=3))
def test_written_calls_are_parsed_back(named: list[tuple[str, dict[str, Any]]]) -> None:
    made = calls(*named)
    if not any(mark in str(named) for mark in ("</tool_call>", "<|im_")):
        text = TOKENIZER.render([made], [], generation=False)
        body = text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
        assert TOKENIZER.parse(body, [])["tool_calls"] == made["tool_calls"]


def test_json_that_is_too_deep_to_parse_is_a_malformed_call() -> None:
    read = TOKENIZER.parse("<tool_call>\n" + "[" * 5000 + "\n</tool_call>", [])
    assert read["tool_calls"][0]["function"] == {"name": "", "arguments": "[" * 5000}


class Secret(ag.ToolEnv[ag.Task]):
    """The secret is in the sandbox; naming it earns 1."""

    sandbox_spec = ag.AnySandbox()

    async def setup(self) -> None:
        await self.sandbox.write({"secret": "swordfish"})

    @ag.tool
    async def look(self) -> str:
        """Read the secret."""
        return (await self.sandbox.read("secret")).decode()

    @ag.reward
    def named(self) -> float:
        return float(self.answer == "swordfish")


ORACLE = [call("look"), say("swordfish")]


async def test_each_rollout_starts_the_script_at_its_beginning(sandboxes: FakeSandboxPool) -> None:
    engine = Scripted(ORACLE)
    rollout = await run_groups(Secret, [TASK], engine, n=3, sandboxes=sandboxes)
    assert [r.reward for r in rollout.rollouts] == [1.0, 1.0, 1.0]
    again = await ag.rollout(Secret, TASK, engine, sandboxes=sandboxes)
    assert again.reward == 1.0


async def test_a_script_that_is_too_short_fails_the_rollout_with_the_reason(sandboxes: FakeSandboxPool) -> None:
    rollout = await ag.rollout(Secret, TASK, Scripted(ORACLE[:1]), sandboxes=sandboxes)
    assert rollout.error == "EngineError: the script has 1 replies, but the env requested one more"


async def test_a_script_may_be_a_function_of_the_text(sandboxes: FakeSandboxPool) -> None:
    def reads(text: str) -> ag.Message:
        return say("swordfish") if "tool\nswordfish" in text else call("look")

    assert (await ag.rollout(Secret, TASK, Scripted(reads), sandboxes=sandboxes)).reward == 1.0


async def test_a_script_is_truncated_at_the_token_limit() -> None:
    spoken = await Scripted([say("12345")]).generate([1], session="r/0", max_tokens=3, sampling=ag.Sampling(), seed=0)
    assert (spoken.token_ids.tolist(), spoken.finish_reason) == ([49, 50, 51], "length")


async def test_the_namespace_of_a_fake_sandbox_lasts_until_it_is_reset() -> None:
    sandbox = FakeSandbox()
    await sandbox.python("x = 6")
    assert (await sandbox.python("print('x is'); x * 7")).stdout == "x is\n42\n"
    assert "NameError" in (await sandbox.python("x", fresh=True)).stderr
    assert (await sandbox.python("x")).ok
    await sandbox.reset()
    failed = await sandbox.python("x")
    assert (failed.status, failed.exit_code, failed.ok) == ("error", 1, False)


async def test_code_in_a_fake_sandbox_can_call_plain_and_async_host_functions() -> None:
    opened = asyncio.Event()

    async def slow(value: int) -> int:
        opened.set()
        return value + 1

    ran = await FakeSandbox().python("slow(value=plain(1))", functions={"plain": lambda n: n * 10, "slow": slow})
    assert ran.stdout == "11\n"
    assert opened.is_set()


async def test_exceptions_of_host_functions_are_raised_in_the_code() -> None:
    def refuse() -> None:
        raise LookupError("no")

    code = "try:\n    refuse()\nexcept LookupError as e:\n    print('caught', e)"
    assert (await FakeSandbox().python(code, functions={"refuse": refuse})).stdout == "caught no\n"


async def test_files_of_a_fake_sandbox_are_bytes_in_folders() -> None:
    sandbox = FakeSandbox(files={"kept": b"\xff"})
    await sandbox.write({"a/b.txt": "é", "./a/c/d": "", "e": "1"})
    assert await sandbox.read("a/b.txt") == "é".encode()
    assert await sandbox.list() == ["a/", "e", "kept"]
    assert await sandbox.list("a") == ["b.txt", "c/"]
    with pytest.raises(FileNotFoundError, match="nothing"):
        await sandbox.read("nothing")
    with pytest.raises(ValueError, match="e has 1 bytes, but the limit is 0"):
        await sandbox.read("e", limit=0)
    await sandbox.reset()
    assert await sandbox.list() == ["kept"]


async def test_the_shell_of_a_fake_sandbox_only_knows_the_given_commands() -> None:
    sandbox = FakeSandbox({"ls": "a\n"})
    assert (await sandbox.exec("ls")).stdout == "a\n"
    assert (await FakeSandbox(str.upper).exec("ls")).stdout == "LS"
    with pytest.raises(AssertionError, match=r"no answer for 'rm'; add it to shell=, which has answers for \['ls'\]"):
        await sandbox.exec("rm")
    with pytest.raises(AssertionError, match=r"the env ran 'ls'; give FakeSandbox\(shell=...\) an answer"):
        await FakeSandbox().exec("ls")
    assert sandbox.log == ["ls", "rm"]


async def test_a_sandbox_is_returned_even_on_an_error() -> None:
    pool = FakeSandboxPool()

    async def fail() -> None:
        async with pool.lease():
            assert len(pool.leased) == 1
            raise EngineError

    with pytest.raises(EngineError):
        await fail()
    assert (pool.leased, len(pool.made)) == ([], 1)


class Generous(Secret):
    """Rewards the no-op, too."""

    @ag.reward
    def thanks(self) -> float:
        return 1.0


class Touchy(Secret):
    """Ends at the first malformed call."""

    async def step(self, action: ag.Message) -> ag.StepResult:
        result = await super().step(action)
        return result._replace(truncated=bool(self.metrics["malformed_calls"]))


class Stubborn(Secret):
    """Continues when it is cancelled."""

    async def step(self, action: ag.Message) -> ag.StepResult:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            return ag.StepResult([], 0.0, False, False, {})
        return await super().step(action)


class Moody(Secret):
    """Has a different prompt each time, whatever the seed."""

    asked = 0

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[ag.Message], dict[str, Any]]:
        type(self).asked += 1
        messages, info = await super().reset(seed=seed, options=options)
        return [*messages, ag.Message(role="user", content=f"This is attempt {type(self).asked}.")], info


@pytest.mark.parametrize(
    ("env", "why"),
    [(Generous, "no-op: reward 1.0 >= 1.0"), (Touchy, "malformed call"), (Stubborn, "cancel"), (Moody, "seed")],
)
async def test_check_env_rejects_an_env_that_breaks_the_contract(
    env: type[Secret], why: str, sandboxes: FakeSandboxPool
) -> None:
    with pytest.raises(AssertionError, match=f"\n{why}"):
        await check_env(env, TASK, oracle=ORACLE, sandboxes=sandboxes)


async def test_check_env_accepts_an_env_that_keeps_the_contract(sandboxes: FakeSandboxPool) -> None:
    await check_env(Secret, TASK, oracle=ORACLE, noop=NOOP, sandboxes=sandboxes)
    assert not sandboxes.leased


async def test_check_env_rejects_an_oracle_that_fails_or_scores_too_low(sandboxes: FakeSandboxPool) -> None:
    with pytest.raises(AssertionError, match=r"\noracle: the rollout failed: EngineError"):
        await check_env(Secret, TASK, oracle=[call("look")], sandboxes=sandboxes)
    with pytest.raises(AssertionError, match=r"\noracle: reward 0.0 < 1.0"):
        await check_env(Secret, TASK, oracle=[raw("herring")], sandboxes=sandboxes)


@pytest.mark.parametrize(
    ("replies", "why"),
    [
        (None, ": must be a list of replies, .* got None"),
        (say("42"), ": must be a list of replies, .* got one reply"),
        ("42", ": must be a list of replies, .* got one reply"),
        (iter([say("42")]), ": must be a list of replies"),
        ([say("42"), None], r"\[1\]: must be a reply, such as say\(\.\.\.\), .* got None"),
        ([{"role": "assistant"}], r"\[0\]: must be a reply"),
    ],
)
async def test_invalid_replies_are_refused_by_the_arguments_name(replies: Any, why: str) -> None:
    with pytest.raises(TypeError, match=f"^replies{why}"):
        Scripted(replies)
    with pytest.raises(TypeError, match=f"^oracle{why}"):
        await check_env(Secret, TASK, oracle=replies)
    with pytest.raises(TypeError, match=f"^noop{why}"):
        await check_env(Secret, TASK, oracle=ORACLE, noop=replies)


async def test_a_noop_needs_a_reply() -> None:
    with pytest.raises(TypeError, match=r"^noop: must have at least one reply"):
        await check_env(Secret, TASK, oracle=ORACLE, noop=[])


async def test_a_policy_that_returns_no_reply_fails_its_rollout_with_a_reason(sandboxes: FakeSandboxPool) -> None:
    nothing: Any = lambda text: None  # noqa: E731
    rollout = await ag.rollout(Secret, TASK, Scripted(nothing), sandboxes=sandboxes)
    assert "return value of the replies function: must be a reply" in str(rollout.error)


async def test_a_forked_fake_sandbox_has_separate_files_and_names() -> None:
    sandbox = FakeSandbox(files={"f": "x"})
    await sandbox.python("import math\nx = [1]")
    async with await sandbox.fork() as branch:
        await branch.python("x.append(math.floor(2.5))")
        await branch.write({"g": "y"})
        assert (await branch.python("x")).stdout == "[1, 2]\n"
        assert await branch.list() == ["f", "g"]
    assert (await sandbox.python("x")).stdout == "[1]\n"
    assert await sandbox.list() == ["f"]


async def test_a_fake_sandbox_accepts_and_returns_files(tmp_path: Path) -> None:
    sandbox = FakeSandbox(files={"d/a/f": "x"})
    await sandbox.get("d", tmp_path / "out")
    await sandbox.put(tmp_path / "out", "copy")
    await sandbox.put(tmp_path / "out/a/f")
    assert await sandbox.read("copy/a/f") == await sandbox.read("f") == b"x"
    with pytest.raises(FileNotFoundError):
        await sandbox.get("none", tmp_path)


def test_the_sample_helper_needs_only_ids_and_changed_fields() -> None:
    made = sample([5], [6, 7, 8], loss_mask=[True, False, True])
    assert (made.prompt_ids.tolist(), made.response_ids.tolist()) == ([5], [6, 7, 8])
    assert (made.loss_mask.tolist(), made.advantages.tolist()) == ([True, False, True], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="logprobs: got 1 for 2 response_ids"):
        sample(logprobs=[0.0])
