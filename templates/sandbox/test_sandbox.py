"""Tests of the environment sandbox_template, in sandboxes of this process, and in a real one if there is one."""

import pytest

import agentgym as ag
from agentgym.errors import SandboxError
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.testing import Scripted, call, check_env, say

from .env import SandboxTemplate, make_task, oracle

TASK = make_task(37)


async def test_the_right_function_is_rewarded(sandboxes: SandboxPool) -> None:
    rollout = await ag.rollout(SandboxTemplate, TASK, Scripted(oracle(TASK)), sandboxes=sandboxes)
    assert rollout.reward == 1.0, rollout


async def test_a_constant_passes_only_one_case(sandboxes: SandboxPool) -> None:
    constant = call("write", source="def f(x):\n    return 7\n")
    rollout = await ag.rollout(SandboxTemplate, TASK, Scripted([constant, say("done")]), sandboxes=sandboxes)
    assert rollout.reward == 0.25, rollout


async def test_the_model_reads_what_its_code_prints(sandboxes: SandboxPool) -> None:
    rollout = await ag.rollout(
        SandboxTemplate, TASK, Scripted([call("python", code="6 * 7"), say("done")]), sandboxes=sandboxes
    )
    assert rollout.transcript()[0].messages[2]["content"] == "42", rollout


async def test_the_env_keeps_its_contract_in_a_real_sandbox() -> None:
    try:
        async with SandboxTemplate.sandbox_spec.open(1) as real, real.lease():
            pass
    except SandboxError as error:
        pytest.skip(f"no sandbox runs on this machine: {error}")
    await check_env(SandboxTemplate, TASK, oracle=oracle(TASK))
