"""A run's metrics and warnings other than rewards, each compared with values computed by hand."""

import io
import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.errors import Failure
from agentgym.run.metrics.batch import batch_metrics, mismatch_metrics, tool_metrics
from agentgym.run.metrics.clock import StepClock
from agentgym.run.metrics.environment import FILE, write_surroundings
from agentgym.run.metrics.health import HOLD, WINDOW
from agentgym.run.metrics.plot import draw_plot
from agentgym.run.metrics.watch import LEAST_CALLS, NO_SIGNAL, Watch
from agentgym.run.summary import Report
from agentgym.scheduling import Groups, Schedule
from agentgym.scheduling.run_groups import play_groups
from agentgym.store.suspicious import signs_of_group
from agentgym.store.tool_counts import MOST, OTHERS, FailureCounts, ToolCounts
from agentgym.testing import sample
from agentgym.train import usage
from agentgym.types.arrays import Floats
from agentgym.types.rollout import Group, Rollout

ROOT = Path(ag.__file__).parent


class Told(ag.ToolEnv[ag.Task]):
    """The reward is the number in the answer; the tool `look` fails, and `read` doesn't."""

    @ag.tool
    async def look(self) -> str:
        """Look."""
        raise ValueError("dark")

    @ag.tool
    async def read(self) -> str:
        """Read."""
        return "so"

    @ag.reward
    def told(self) -> float:
        return float(self.answer or "")


async def groups_of(*answers: list[Any]) -> Groups:
    """Return a group for each list of messages, with two rollouts each."""
    tasks = [ag.Task(id=str(n), prompt="Go.") for n in range(len(answers))]
    rollouts = [
        await play_groups(Told, [t], Scripted(said), Schedule(group_size=2))
        for t, said in zip(tasks, answers, strict=True)
    ]
    return Groups([group for groups in rollouts for group in groups])


async def test_the_metrics_of_a_batch_are_counted_by_task_tool_and_error() -> None:
    groups = await groups_of([say("1")], [say("0")], [call("look"), call("read"), say("1")], [say("not a number")])
    metrics = batch_metrics(groups)
    assert (metrics["groups/solved_by_all"], metrics["groups/solved_by_none"]) == (2 / 3, 1 / 3)
    assert batch_metrics(groups, least_solved=0.0)["groups/solved_by_all"] == 1.0
    assert batch_metrics(groups, least_solved=1.5)["groups/solved_by_none"] == 1.0
    assert metrics["reward/std"] == pytest.approx(np.std([1, 1, 0, 0, 1, 1]))
    assert metrics["failures/EnvError"] == 2
    assert (metrics["tools/look/calls"], metrics["tools/look/errors"], metrics["tools/read/calls"]) == (2, 2, 2)
    lengths = [r.sampled_tokens for r in groups.rollouts if r.reward is not None]
    assert metrics["length/rollout_max"] == max(lengths)
    assert metrics["length/rollout_p50"] == np.median(lengths)
    assert metrics["length/turn_max"] < max(lengths)


def test_calls_without_a_name_are_counted_as_no_name() -> None:
    counts = ToolCounts()
    counts.calls.update({"": 2, "look": 1})
    assert tool_metrics(counts) == {"tools/(no name)/calls": 2, "tools/look/calls": 1}


def test_the_mismatch_covers_trained_tokens_scored_before_the_policy_changed() -> None:
    rows = [sample(rollout_id=name, response_ids=[1, 2, 3], loss_mask=[1, 0, 1], logprobs=[-1, 0, -2]) for name in "ab"]
    scored: dict[tuple[str, int, int], tuple[Floats, bool]] = {
        ("a", rows[0].segment, rows[0].step): (np.array([-1.0, -1.5], np.float32), False),
        ("b", rows[1].segment, rows[1].step): (np.array([-9.0, -9.0], np.float32), True),
    }
    metrics = mismatch_metrics(rows, scored)
    weights = np.exp([0.0, 0.5])
    assert metrics["mismatch/mean"] == pytest.approx(0.25)
    assert metrics["mismatch/max"] == pytest.approx(0.5)
    assert metrics["mismatch/p99"] == pytest.approx(0.495)
    assert metrics["mismatch/ess"] == pytest.approx(weights.sum() ** 2 / (2 * (weights**2).sum()))
    assert mismatch_metrics([], {}) == {}


def test_the_parts_of_a_step_are_timed_and_the_next_step_starts_over() -> None:
    clock = StepClock()
    with clock.part("collect"):
        pass
    with clock.part("train"):
        pass
    first = clock.metrics(sampled_tokens=8, trained_tokens=4)
    assert 0 <= first["time/collect"] + first["time/train"] <= first["time/step"]
    assert first["throughput/sampled_tokens_per_s"] == pytest.approx(8 / first["time/step"])
    assert first["throughput/trained_tokens_per_s"] == pytest.approx(4 / first["time/train"])
    again = clock.metrics(sampled_tokens=0, trained_tokens=0)
    assert again.keys() == {"time/step", "time/stood_still", "throughput/sampled_tokens_per_s"}


QUIET = {"samples/groups": 4.0, "samples/groups_without_signal": 4.0, "train/optimizer_steps": 0.0}
IDLE = QUIET | {"samples/groups_without_signal": 0.0, "train/skipped_steps": 1.0}
FINE = {"samples/groups": 4.0, "samples/groups_without_signal": 1.0, "train/optimizer_steps": 1.0}


def watched(steps: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the warnings about steps with these metrics."""
    said: list[str] = []
    watch = Watch(said.append)
    for step, metrics in enumerate(steps):
        watch.on_step(step, Groups([]), metrics)
    return said


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([QUIET] * NO_SIGNAL, "all rollouts of each task have the same reward"),
        ([QUIET | {"groups/solved_by_all": 1.0}] * NO_SIGNAL, "all tasks are solved"),
        (
            [IDLE] * NO_SIGNAL,
            "No optimizer step was taken in the last 5 batches, although rewards differ: in the last one, 1 step(s)",
        ),
        (
            [FINE | {"tools/look/calls": LEAST_CALLS, "tools/look/errors": LEAST_CALLS - 1.0}],
            "'look' has failed in 19 of 20",
        ),
        ([FINE | {"mismatch/mean": m} for m in [0.01] * WINDOW + [0.1] * (WINDOW + HOLD)], "drift apart: "),
        ([FINE | {"engine/lost_servers": 1.0}], "has lost 1 server"),
        ([FINE | {"rollout/branches": 0.0}] * NO_SIGNAL, "No branch was run in the last 5 batches"),
    ],
)
def test_each_cause_is_warned_about_once_during_the_run(steps: list[dict[str, float]], said: str) -> None:
    heard = watched([*steps, steps[-1]])
    assert len(heard) == 1
    assert said in heard[0]


@pytest.mark.parametrize(
    "steps",
    [
        [QUIET] * (NO_SIGNAL - 1) + [FINE, QUIET],
        [FINE | {"tools/look/calls": LEAST_CALLS, "tools/look/errors": LEAST_CALLS / 2}],
        [FINE | {"mismatch/mean": m} for m in [1e-6] * WINDOW + [1e-3] * (WINDOW + HOLD)],
        [FINE | {"engine/lost_servers": 0.0}] * 2,
        ([FINE | {"rollout/branches": 0.0}] * (NO_SIGNAL - 1) + [FINE | {"rollout/branches": 0.1}]) * 2,
    ],
)
def test_a_healthy_run_gives_no_warnings(steps: list[dict[str, float]]) -> None:
    assert watched(steps) == []


async def heard_about_tools(*batches: Groups) -> list[str]:
    """Return the warnings of a run with these batches."""
    said: list[str] = []
    watch = Watch(said.append)
    for step, groups in enumerate(batches):
        watch.on_step(step, groups, FINE | batch_metrics(groups))
    return said


async def test_a_run_in_which_no_rollout_calls_a_tool_warns_once() -> None:
    quiet = await groups_of([say("0")], [say("<tool_call>look"), say("0")])
    assert await heard_about_tools(*[quiet] * (NO_SIGNAL - 1)) == []
    [said] = await heard_about_tools(*[quiet] * (NO_SIGNAL + 2))
    assert said.startswith(
        f"None of {4 * NO_SIGNAL} rollouts with tools has called one ({2 * NO_SIGNAL} malformed calls): "
    )
    assert "`agentgym doctor --model MODEL` checks the template" in said
    mostly_unsolved = await groups_of([say("0")], [say("0")], [say("1")])
    assert len(await heard_about_tools(*[mostly_unsolved] * NO_SIGNAL)) == 1
    with_failed = await groups_of([say("0")], [say("not a number")])
    [said] = await heard_about_tools(*[with_failed] * NO_SIGNAL)
    assert said.startswith(f"None of {2 * NO_SIGNAL} rollouts")


async def test_a_run_that_calls_a_tool_or_solves_tasks_without_one_does_not_warn() -> None:
    quiet, solved, called = [await groups_of([said], [said]) for said in (say("0"), say("1"), call("read"))]
    calling = await groups_of([call("read"), say("0")])
    assert called.rollouts[0].reward is None  # its answers ran out
    assert await heard_about_tools(*[calling], *[quiet] * 3 * NO_SIGNAL) == []
    assert await heard_about_tools(*[solved] * 2 * NO_SIGNAL) == []
    assert await heard_about_tools(*[called] * 2 * NO_SIGNAL) == []
    half = await groups_of([say("0")], [say("1")])
    assert await heard_about_tools(*[half] * 2 * NO_SIGNAL) == []
    without = [group_without_tools(group) for group in quiet]
    assert await heard_about_tools(*[Groups(without)] * 2 * NO_SIGNAL) == []


def group_without_tools(group: Group) -> Group:
    """Return the group as an env without tools would have played it."""
    rollouts = [
        replace(one, segments=tuple(replace(segment, tools=()) for segment in one.segments)) for one in group.rollouts
    ]
    return replace(group, rollouts=tuple(rollouts))


def test_the_runs_folder_records_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=code, check=True)

    code = tmp_path / "code"
    code.mkdir()
    monkeypatch.chdir(code)
    write_surroundings(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["git"] is None
    git("init", "-q")
    (code / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "first")
    write_surroundings(tmp_path)
    clean = json.loads((tmp_path / FILE).read_text())
    (code / "a").write_text("2")
    write_surroundings(tmp_path)
    dirty = json.loads((tmp_path / FILE).read_text())
    assert len(clean["git"]["commit"]) == 40
    assert [clean["git"]["dirty"], dirty["git"]["dirty"]] == [False, True]
    assert clean["versions"]["agentgym"] is not None
    assert clean["processes"] == 1


def test_rewards_are_plotted_if_matplotlib_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = io.BytesIO()
    assert draw_plot(picture, [{"reward": 0.1}, {}, {"reward": 0.5}], {0: 0.2, 3: 0.6})
    assert picture.getvalue().startswith(b"\x89PNG")


def test_the_share_of_the_gpus_peak_is_as_computed_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False}
    model: Any = Qwen3ForCausalLM(Qwen3Config(**shape, **heads)).to(torch.bfloat16)
    used = sum(weight.numel() for weight in model.parameters()) - 32 * 16
    model.requires_grad_(False)
    needed = 4 * used * 30 + 6 * 2 * 16 * (10**2 + 20**2)
    assert usage.needed_flops(model, [10, 20]) == needed
    device: Any = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    bf16 = torch.bfloat16
    metrics = usage.mfu_metrics(model, [10, 20], dtype=bf16, seconds=2.0, gpus=4, device=device)
    assert metrics == {"train/mfu": pytest.approx(needed / (2 * 4 * 989e12))}
    assert usage.mfu_metrics(model, [10], dtype=torch.float32, seconds=1.0, gpus=1, device=device) == {}
    assert usage.mfu_metrics(model, [10], dtype=bf16, seconds=1.0, gpus=1, device=torch.device("cpu")) == {}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L40S")
    assert usage.peak_flops(device) == 362e12


async def test_report_metrics_and_signs_use_the_same_count_of_calls_and_errors() -> None:
    groups = await groups_of([call("look"), call("read"), say("1")], [call("look"), say("0")])
    counts, metrics, report = ToolCounts.of(groups.rollouts), batch_metrics(groups), Report()
    report.add(groups)
    report.add(groups)
    assert (counts.calls, counts.errors) == ({"look": 4, "read": 2}, {"look": 4})
    for name, calls in counts.calls.items():
        assert metrics[f"tools/{name}/calls"] == calls
        assert metrics.get(f"tools/{name}/errors", 0) == counts.errors[name]
    assert report.tools == ToolCounts(counts.calls + counts.calls, counts.errors + counts.errors)
    assert "The tool 'look' failed in 8 of 8 calls." in report.warnings([])
    assert all("tool-fails" in signs for signs in signs_of_group(groups[0]).values())
    marked = {path.name for path in ROOT.rglob("*.py") if "tool_errors/" in path.read_text()}
    assert marked == {"tool_env.py", "tool_counts.py"}  # the module that writes them, and the one that counts them


@pytest.mark.parametrize(("errors", "calls", "least", "failing"), [(2, 3, 3, True), (2, 4, 1, False), (2, 3, 4, False)])
def test_a_tool_is_failing_if_more_than_half_of_enough_calls_are_errors(
    errors: int, calls: int, least: int, failing: bool
) -> None:
    counts = ToolCounts(Counter(look=calls, read=9), Counter(look=errors, read=1, unknown=1))
    assert counts.failing(least_calls=least) == ({"look": (errors, calls)} if failing else {})


def failed(message: str, where: str = "E: reward 'r'") -> Rollout:
    failure = Failure(type="EnvError", message=message, where=where)
    return Rollout(
        rollout_id="a/0", group_id="a", segments=(), reward=None, stop_reason="error", failure=failure, metrics={}
    )


def test_failures_at_the_same_line_are_one_kind_whatever_their_text() -> None:
    counts = FailureCounts()
    counts.add(
        [failed(f"E: reward 'r' raised KeyError: '{word}', at my_env.py:7 in r") for word in ("a", "b", "c, at d")]
    )
    counts.add([failed("E: reward 'r' raised KeyError: 'a', at my_env.py:9 in r")])
    assert counts.most_common() == [
        ("EnvError: E: reward 'r' raised KeyError: 'a', at my_env.py:7 in r", 3),
        ("EnvError: E: reward 'r' raised KeyError: 'a', at my_env.py:9 in r", 1),
    ]


def test_failures_outside_user_code_are_one_kind_if_only_their_numbers_differ() -> None:
    counts = FailureCounts()
    counts.add([failed(f"request {number:x}-4f3a was not answered after {number}.5 s", "ask") for number in range(9)])
    counts.add([failed("the endpoint is gone", "ask"), failed("the endpoint is gone", "lease")])
    assert [times for _, times in counts.most_common()] == [9, 1, 1]


def test_kinds_of_failures_and_tool_names_are_bounded_and_the_rest_is_summed() -> None:
    report = Report()
    words = ["".join(letters) for letters in product("abcdefgh", repeat=3)]
    report.failures.add([failed(f"E: no {word}") for word in words])
    assert (len(report.failures), report.failures.total()) == (MOST + 1, len(words))
    assert (OTHERS, len(words) - MOST) in report.failures.most_common()
    for word in words:
        report.tools.add(ToolCounts(Counter({"look": 2, word: 1}), Counter({"look": 2, word: 1})))
    assert len(report.tools.calls) <= MOST + 1
    assert report.tools.calls.total() == report.tools.errors.total() == 3 * len(words)
    assert report.tools.failing()["look"] == (2 * len(words), 2 * len(words))
    assert OTHERS not in report.tools.failing()
    metrics = tool_metrics(ToolCounts(Counter(words), Counter(words)))
    assert len(metrics) < 40
    assert metrics["tools/(others)/errors"] == len(words) - 16
