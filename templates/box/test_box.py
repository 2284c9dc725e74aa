"""What the environment box_template promises, in boxes of this process, and in a real box where there is one."""

import pytest

import agentgym as ag
from agentgym.sandboxes.protocol import Boxes
from agentgym.testing import Scripted, call, check_env, say

from .env import BoxTemplate, make_task, oracle

TASK = make_task(37)


async def test_the_right_function_is_rewarded(boxes: Boxes) -> None:
    played = await ag.rollout(BoxTemplate, TASK, Scripted(oracle(TASK)), boxes=boxes)
    assert played.reward == 1.0, played


async def test_a_constant_is_right_in_one_case(boxes: Boxes) -> None:
    constant = call("write", source="def f(x):\n    return 7\n")
    played = await ag.rollout(BoxTemplate, TASK, Scripted([constant, say("done")]), boxes=boxes)
    assert played.reward == 0.25, played


async def test_the_model_reads_what_its_code_prints(boxes: Boxes) -> None:
    played = await ag.rollout(BoxTemplate, TASK, Scripted([call("python", code="6 * 7"), say("done")]), boxes=boxes)
    assert played.transcript()[0].messages[2]["content"] == "42", played


async def test_the_env_keeps_its_contract_in_a_real_box() -> None:
    try:
        async with BoxTemplate.sandbox.open(1) as real, real.lease():
            pass
    except ag.SandboxError as error:
        pytest.skip(f"no box runs on this machine: {error}")
    await check_env(BoxTemplate, TASK, oracle=oracle(TASK))
