"""What the chaos test reports about an episode that ended in a forbidden way."""

import pytest

from agentgym.errors import SandboxError
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.sandboxes.remote.refusals import SANDBOX_LOST
from tests.sandboxes.test_chaos import SEED, end_of, episode


async def test_a_wrong_answer_is_reported_with_seed_episode_call_and_sandbox() -> None:
    sandboxes = FakeSandboxPool()  # Its Python finds none of the sandbox's files.
    with pytest.raises(AssertionError) as raised:
        await episode(sandboxes, "episode 7")
    how, what = end_of(raised.value)
    assert how == "wrong"
    assert "\n" not in what
    for part in (f"seed {SEED}", "episode 7", "python of a file of the Docker sandbox fake", "No such file"):
        assert part in what


def test_a_lost_sandbox_is_labeled_and_other_sandbox_errors_are_reported() -> None:
    assert end_of(SandboxError(f"{SANDBOX_LOST}: it was closed")) == ("lost", "")
    how, what = end_of(SandboxError("what is this"))
    assert how == "unlabeled"
    assert "what is this" in what
