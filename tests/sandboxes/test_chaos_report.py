"""What the chaos test says of an episode that came to a wrong end."""

import pytest

from agentgym.errors import SandboxError
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.sandboxes.remote.refusals import SANDBOX_LOST
from tests.sandboxes.test_chaos import SEED, end_of, episode


async def test_a_wrong_answer_is_named_with_the_seed_the_episode_the_call_and_the_sandbox() -> None:
    sandboxes = FakeSandboxPool()  # Its Python finds no file of the sandbox.
    with pytest.raises(AssertionError) as raised:
        await episode(sandboxes, "episode 7")
    how, what = end_of(raised.value)
    assert how == "wrong"
    assert "\n" not in what
    for part in (f"seed {SEED}", "episode 7", "python of a file of the Docker sandbox fake", "No such file"):
        assert part in what


def test_a_lost_sandbox_is_labeled_and_any_other_error_of_a_sandbox_is_named() -> None:
    assert end_of(SandboxError(f"{SANDBOX_LOST}: it was closed")) == ("lost", "")
    how, what = end_of(SandboxError("what is this"))
    assert how == "unlabeled"
    assert "what is this" in what
