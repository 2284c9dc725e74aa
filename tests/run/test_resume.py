"""Runs that were stopped and resumed, on the real engine and the real trainer."""

import asyncio
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors.numpy import load_file

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from agentgym.environments.env import Split
from agentgym.errors import AgentGymError
from agentgym.files.folder_lock import hold_folder
from agentgym.launch.train import train_policy
from agentgym.run.follow_model import with_begun
from agentgym.run.metrics_logger import LONGEST_LINE, MetricsLogger, steps_in
from agentgym.run.preflight import hold_checked
from agentgym.run.resume import RunState, read_best, read_run_state
from agentgym.store.run_settings import FOLLOW_MODEL, flat, refuse_changes, with_defaults, write_settings
from agentgym.train.learner import Learner

MODEL = Path(__file__).parents[2] / "recipes" / "checkpoints" / "chase"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
OWN = """
import asyncio, os, signal, sys
from dataclasses import replace
import agentgym as ag
from agentgym.run.metrics_logger import MetricsLogger
from tests.run.test_resume import SETTINGS

note = MetricsLogger.note
def interrupted(self, doing):
    note(self, doing)
    if doing == "training" and len(self.rows) == 1:
        os.kill(os.getpid(), signal.SIGINT)
MetricsLogger.note = interrupted
asyncio.run(ag.train_policy(replace(SETTINGS, output_dir=sys.argv[1], eval_tasks=0)))
"""
CLOCKS = {"train/seconds", "rollout/seconds", "oversample/length_bias"}
"""Metrics that depend on wall time."""


def task(number: int) -> ag.Task:
    return ag.Task(id=f"t{number}", prompt=(ag.Message(role="user", content=f"Start at key {number}."),))


@ag.register("terse")
class Terse(ag.ToolEnv[ag.Task]):
    """Rewards shorter answers; has no sandbox."""

    limits = ag.Limits(turns=2)
    on_reset: ClassVar[Callable[[], object] | None] = None

    @classmethod
    def tasks(cls, split: Split) -> ag.Procedural[ag.Task]:
        return ag.Procedural(task, range(10, 99))

    async def setup(self) -> None:
        self.asked = 0
        if Terse.on_reset is not None:
            Terse.on_reset()

    @ag.tool
    async def python(self, code: str) -> str:
        """Run Python code."""
        self.asked += len(code)
        return f"see {len(code)}"

    @ag.reward
    def terse(self) -> float:
        return -float(len(self.answer or "") + self.asked)


# One rollout at a time, so that float noise is the same.
SETTINGS = ag.RunConfig(
    recipe="terse",
    env="terse",
    model=MODEL,
    engine=ag.TransformersConfig(slots=1),
    train=ag.TrainConfig(temperature=0.7, rollouts_per_minibatch=4, device="cpu"),
    max_steps=4,
    prompts_per_step=2,
    group_size=3,
    max_turn_tokens=12,
    eval_tasks=2,
    save_every=2,
)


@pytest.fixture
def run(tmp_path: Path) -> ag.RunConfig:
    return replace(SETTINGS, output_dir=tmp_path / "run")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Complete a run without stopping it, and return its folder and its summary."""
    out = tmp_path_factory.mktemp("whole")
    return out, asyncio.run(train_policy(replace(SETTINGS, output_dir=out)))


def metrics(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "eval/reward" not in row]
    return [
        {
            name: value
            for name, value in row.items()
            if name not in CLOCKS and not name.startswith(("time/", "throughput/"))
        }
        for row in rows
    ]


def adapter(folder: Path) -> dict[str, Any]:
    return dict(load_file(folder / "adapter" / "adapter_model.safetensors"))


def resumed(run: ag.RunConfig, **changes: Any) -> ag.RunConfig:
    return replace(run, output_dir=None, resume=run.output_dir, **changes)


def folder(run: ag.RunConfig) -> Path:
    assert run.output_dir is not None
    return run.output_dir


def steps(run: ag.RunConfig) -> list[str]:
    return sorted(path.name for path in (folder(run) / "checkpoints").iterdir())


async def stop(run: ag.RunConfig, rollouts: int) -> None:
    """Interrupt the run, as Ctrl-C does, when this many rollouts have started."""
    job = asyncio.create_task(train_policy(run))
    begun = iter(range(rollouts))

    def one_more() -> None:
        if next(begun, None) is None:
            job.cancel()

    Terse.on_reset = one_more
    try:
        with pytest.raises(asyncio.CancelledError):
            await job
    finally:
        Terse.on_reset = None


async def test_a_run_in_two_parts_equals_a_run_in_one(run: ag.RunConfig, whole: tuple[Path, dict[str, Any]]) -> None:
    await train_policy(replace(run, max_steps=2))
    parts = await train_policy(resumed(run))
    assert metrics(folder(run)) == metrics(whole[0])
    assert [row["step"] for row in metrics(folder(run))] == [0, 1, 2, 3]
    theirs = adapter(whole[0])
    assert all(np.array_equal(tensor, theirs[name]) for name, tensor in adapter(folder(run)).items())
    same = ("reward_first", "reward_last", "steps", "rollouts", "eval_before", "eval_after")
    assert {name: parts[name] for name in same} == {name: whole[1][name] for name in same}
    assert metrics(folder(run))[0]["train/optimizer_steps"] > 0


async def test_an_interrupted_run_keeps_its_last_step_and_loses_the_unfinished_one(
    run: ag.RunConfig, whole: tuple[Path, dict[str, Any]]
) -> None:
    await stop(run, 2 + 3 * 6 + 2)  # the evaluation, three steps, and two rollouts of the fourth
    assert steps(run) == ["step-000002", "step-000003"]
    await train_policy(resumed(run))
    assert metrics(folder(run)) == metrics(whole[0])


async def test_evaluations_stay_comparable_after_a_resume_without_evaluations(run: ag.RunConfig) -> None:
    await train_policy(replace(run, max_steps=1, save_every=1))
    await train_policy(resumed(run, max_steps=2, eval_tasks=0))
    for changes, said in (({"eval_seed": 9}, "eval_seed"), ({"eval_tasks": 1}, "eval_tasks")):
        with pytest.raises(ValueError, match=f"was started with other settings; {said}: the run has "):
            await train_policy(resumed(run, max_steps=3, **changes))
    seeds = json.loads((folder(run) / "settings.json").read_text())["seeds"]
    assert seeds["evaluation"] == run.held_out_seed
    await train_policy(resumed(run, max_steps=3))


@pytest.mark.parametrize("held", ["an evaluation", "foreign settings", "a summary"])
async def test_a_new_run_refuses_a_folder_with_other_content(run: ag.RunConfig, tmp_path: Path, held: str) -> None:
    out = tmp_path / "out"
    if held == "an evaluation":
        await ag.evaluate(Terse, Scripted([say("x")]), n=2, output_dir=out)
    else:
        out.mkdir()
        (out / ("settings.json" if held == "foreign settings" else "summary.json")).write_text('{"recipe": "mine"}')
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ValueError, match=rf"^output_dir: {out} contains '\w+\.\w+' but no run; use a new or an empty"):
        await train_policy(replace(run, output_dir=out))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


async def test_a_truncated_checkpoint_is_named_and_the_run_resumes_from_the_previous_one(
    run: ag.RunConfig, whole: tuple[Path, dict[str, Any]]
) -> None:
    await train_policy(run)
    assert steps(run) == ["step-000002", "step-000004"]
    state = folder(run) / "checkpoints" / "step-000004" / "state.pt"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"step-000004 is not used: state\.pt has \d+ bytes, expected \d+"):
        await train_policy(resumed(run))
    assert metrics(folder(run)) == metrics(whole[0])


async def test_a_resumed_asynchronous_run_accounts_for_every_rollout(run: ag.RunConfig) -> None:
    ahead = replace(run, max_staleness=1, save_every=1, eval_tasks=0, engine=ag.TransformersConfig(slots=4))
    await train_policy(replace(ahead, max_steps=2))
    await train_policy(resumed(ahead, max_steps=5))
    rows = metrics(folder(run))
    for kind in ("rollouts", "groups", "requests"):
        of = {n: [row[f"{kind}/{n}"] for row in rows] for n in ("started", "resumed", "finished", "dropped", "failed")}
        carried = [row[f"{kind}/carried"] for row in rows]
        assert of["resumed"] == [0, *carried[:-1]]
        assert sum(of["started"]) == sum(of["finished"]) + sum(of["dropped"]) + sum(of["failed"]) + carried[-1]
    assert [row["rollouts/finished"] for row in rows] == [6] * 5


def test_a_checkpoint_of_another_format_is_refused_by_field() -> None:
    assert read_run_state(3, {"probe": [1], "sampler_states": []}) == RunState(step=3, probe=[1])
    with pytest.raises(ValueError, match=r"^resume: the checkpoint of step 3 has places, which .* start a new run"):
        read_run_state(3, {"probe": [1], "places": []})


async def test_only_the_requested_number_of_checkpoints_is_kept(run: ag.RunConfig) -> None:
    await train_policy(replace(run, save_every=1, keep_checkpoints=3, eval_tasks=0))
    assert steps(run) == ["step-000002", "step-000003", "step-000004"]


async def test_without_an_interval_only_the_last_step_is_saved(run: ag.RunConfig) -> None:
    await train_policy(replace(run, max_steps=2, save_every=0, eval_tasks=0))
    assert steps(run) == ["step-000002"]


async def test_fixed_settings_of_a_resumed_run_are_refused_by_name(run: ag.RunConfig) -> None:
    await train_policy(replace(run, max_steps=1, eval_tasks=0))
    changed = resumed(run, seed=1, train=replace(run.train, lora_alpha=64, rslora=True))
    with pytest.raises(ValueError, match=r"^resume: ") as refused:
        await train_policy(changed)
    for said in (
        "seed: the run has 0, not 1",
        "train.lora_alpha: the run has 32, not 64",
        "train.rslora",
        "agentgym merge",
    ):
        assert said in str(refused.value)
    with pytest.raises(ValueError, match=r"^output_dir: .* contains a run's checkpoints; resume that run"):
        await train_policy(run)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"eval_tasks": 4}, "eval_tasks: the run has 2, not 4"),
        ({"eval_rollouts": 3}, "eval_rollouts: the run has 1, not 3"),
        ({"eval_sampling": ag.Sampling(temperature=0.5)}, "eval_sampling.temperature: the run has null, not 0.5"),
    ],
)
def test_evaluation_settings_may_not_change_while_evaluations_are_compared(
    run: ag.RunConfig, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    write_settings(tmp_path, run)
    with pytest.raises(ValueError, match=f"^resume: .*{said}"):
        refuse_changes(tmp_path, replace(run, **changed))
    refuse_changes(tmp_path, replace(run, **(changed | {"eval_tasks": 0})))


async def test_fewer_steps_than_the_run_has_finished_are_refused_by_name(run: ag.RunConfig) -> None:
    await train_policy(replace(run, max_steps=2, eval_tasks=0))
    kept = metrics(folder(run))
    with pytest.raises(ValueError, match=r"^max_steps: the run in .* has finished 2 steps; expected at least 2, got 1"):
        await train_policy(resumed(run, max_steps=1))
    assert metrics(folder(run)) == kept


async def test_a_running_run_is_left_alone(run: ag.RunConfig) -> None:
    refused: list[str] = []

    class Second(ag.Callback):
        def on_step(self, *_: object) -> None:
            for other in (resumed(run), run):
                before = (folder(run) / "settings.json").read_bytes()
                with (
                    pytest.raises(AgentGymError, match=f"is in use by process {os.getpid()}") as error,
                    hold_checked(other, Terse, folder(run)),
                ):
                    raise AssertionError
                refused.append(str(error.value))
                assert (folder(run) / "settings.json").read_bytes() == before

    await train_policy(replace(run, max_steps=1, eval_tasks=0), callbacks=[Second()])
    assert len(refused) == 2
    assert not (folder(run) / ".lock").exists()


@pytest.mark.parametrize("name", ["checkpoints", "adapter", "model", "best"])
def test_a_file_in_place_of_a_run_subfolder_is_refused_by_path(tmp_path: Path, name: str) -> None:
    write_settings(tmp_path, SETTINGS)
    (tmp_path / name).write_text("")
    for run in (replace(SETTINGS, output_dir=tmp_path), replace(SETTINGS, resume=tmp_path)):
        field = "output_dir" if run.resume is None else "resume"
        said = rf"^{field}: {tmp_path / name} is a file, but a run needs a folder there; move it away"
        with pytest.raises(ValueError, match=said), hold_checked(run, Terse, tmp_path):
            raise AssertionError


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "rollouts.sqlite", "summary.json", "reward.png"])
def test_a_folder_in_place_of_a_run_file_is_refused_by_path(tmp_path: Path, name: str) -> None:
    write_settings(tmp_path, SETTINGS)
    (tmp_path / name).mkdir()
    said = rf"^resume: {tmp_path / name} is a folder, but a run needs a file there; move it away"
    with (
        pytest.raises(ValueError, match=said),
        hold_checked(replace(SETTINGS, resume=tmp_path), Terse, tmp_path),
    ):
        raise AssertionError


@pytest.mark.parametrize("said", [None, "", "[]", '{"step": 3}', '{"step": 3, "reward": "good"}'])
def test_a_best_policy_without_its_reward_is_refused(tmp_path: Path, said: str | None) -> None:
    write_settings(tmp_path, SETTINGS)
    (tmp_path / "best").mkdir()
    if said is not None:
        (tmp_path / "best" / "evaluation.json").write_text(said)
    with (
        pytest.raises(ValueError, match=r"^resume: .*evaluation\.json can't be read \(\w+\), so the best policy's"),
        hold_checked(replace(SETTINGS, resume=tmp_path), Terse, tmp_path),
    ):
        raise AssertionError


@pytest.mark.parametrize("kept", ["adapter", "model", "best"])
def test_a_trained_run_without_checkpoints_is_not_started_over(tmp_path: Path, kept: str) -> None:
    write_settings(tmp_path, SETTINGS)
    (tmp_path / kept).mkdir()
    (tmp_path / kept / "evaluation.json").write_text('{"step": 1, "reward": 0.5}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/reward": 0.5}\n')
    new, again = replace(SETTINGS, output_dir=tmp_path), replace(SETTINGS, resume=tmp_path)
    for run in (again,) if kept == "best" else (new, again):
        with hold_checked(run, Terse, tmp_path):  # no step was finished
            pass
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5}\n')
    with (
        pytest.raises(ValueError, match=rf"^output_dir: .* contains a run's trained weights, {kept}/; use another"),
        hold_checked(new, Terse, tmp_path),
    ):
        raise AssertionError
    if kept == "best":  # the run was killed before its first checkpoint, so it starts over
        with hold_checked(again, Terse, tmp_path):
            return
    with (
        pytest.raises(
            ValueError, match=rf"^resume: .* its run's trained weights, {kept}/, but no checkpoint to resume"
        ),
        hold_checked(again, Terse, tmp_path),
    ):
        raise AssertionError


def test_a_folder_whose_process_was_killed_can_be_used_again(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, pathlib; from agentgym.files.folder_lock import hold_folder\n"
        "with hold_folder(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    assert (tmp_path / ".lock").exists()
    with hold_folder(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
    assert not (tmp_path / ".lock").exists()


def test_temperature_0_is_refused_with_the_reason(run: ag.RunConfig) -> None:
    with pytest.raises(ValueError, match=r"^train\.temperature: at 0, all rollouts of a group are the same"):
        replace(run, train=replace(run.train, temperature=0))


async def test_a_folder_without_a_run_is_a_clear_error(run: ag.RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^resume: .* is not the folder of a run: there is no .*settings\.json"):
        await train_policy(resumed(run))
    await ag.evaluate(Terse, Scripted([say("x")]), n=1, output_dir=tmp_path / "eval 1")
    refused = r"^resume: .* has no run settings; resume an evaluation with `agentgym eval .* '.*/eval 1' --resume`"
    with pytest.raises(ValueError, match=refused):
        await train_policy(replace(run, output_dir=None, resume=tmp_path / "eval 1"))


@pytest.mark.parametrize("damaged", ["[]", '{"settings": [1]}', '{"settings": null}', "{"])
def test_damaged_settings_are_a_clear_error(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "settings.json").write_text(damaged)
    with pytest.raises(ValueError, match=r"^resume: .* is not the folder of a run: its settings\.json"):
        refuse_changes(tmp_path, SETTINGS)


async def test_a_run_that_was_stopped_in_its_first_step_starts_over(
    run: ag.RunConfig, whole: tuple[Path, dict[str, Any]]
) -> None:
    await stop(run, 2 + 3)  # the evaluation, and half of the first step
    assert not (folder(run) / "checkpoints").exists()
    await train_policy(resumed(run))
    assert metrics(folder(run)) == metrics(whole[0])


@pytest.mark.parametrize(
    "changes", [{"save_every": 1}, {"train": replace(SETTINGS.train, lr=1e-4)}, {"sandbox": "unsafe"}]
)
def test_settings_that_do_not_affect_the_policy_may_change(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_settings(tmp_path, SETTINGS)
    refuse_changes(tmp_path, replace(SETTINGS, resume=tmp_path, max_steps=9, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"advantage_estimator": "grpo"},
        {"credit": "turn"},
        {"env": "chase"},
        {"model": "tiny"},
        {"prompts_per_step": 3},
        {"max_staleness": 1},
    ]
    + [
        {"train": replace(SETTINGS.train, **of)}
        for of in ({"lora_rank": 4}, {"betas": (0.5, 0.9)}, {"dora": True}, {"temperature": 1.0})
    ],
)
def test_settings_that_affect_the_policy_are_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_settings(tmp_path, SETTINGS)
    name = next(iter(changes))
    with pytest.raises(ValueError, match=rf"started with other settings; {name}(\.\w+)?: the run has .*, not "):
        refuse_changes(tmp_path, replace(SETTINGS, **changes))


def test_a_runs_settings_have_the_values_found_for_those_that_follow_the_model(
    whole: tuple[Path, dict[str, Any]],
) -> None:
    settings = json.loads((whole[0] / "settings.json").read_text())["settings"]
    assert {name: settings[name] for name in FOLLOW_MODEL} == {
        "train.lr": 2e-3,
        "train.max_tokens_per_microbatch": 16_384,
        "train.threads": 1,
        "engine.context_tokens": 1024,
        "engine.threads": 1,
    }


def test_a_resumed_run_keeps_the_values_that_it_found_unless_others_are_set(tmp_path: Path) -> None:
    write_settings(tmp_path, SETTINGS)
    assert with_begun(replace(SETTINGS, resume=tmp_path)) == replace(SETTINGS, resume=tmp_path)
    found = {"train.lr": 3e-5, "train.max_tokens_per_microbatch": 64, "engine.context_tokens": 700}
    content = json.loads((tmp_path / "settings.json").read_text())
    (tmp_path / "settings.json").write_text(json.dumps(with_defaults(content, found)))
    assert with_begun(SETTINGS) == SETTINGS
    own = replace(SETTINGS, resume=tmp_path, train=replace(SETTINGS.train, lr=1e-4))
    begun = flat(with_begun(own))
    assert [begun[name] for name in found] == [1e-4, 64, 700]
    refuse_changes(tmp_path, with_begun(own))


async def test_a_stop_during_a_training_step_loses_only_that_step(
    run: ag.RunConfig, whole: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job: asyncio.Task[Any] | None = None
    train, calls = Learner.train, iter(range(9))

    def stopped(self: Learner, samples: Any) -> dict[str, float]:
        if next(calls) == 1:
            assert job is not None
            job.get_loop().call_soon_threadsafe(job.cancel)
        return train(self, samples)

    monkeypatch.setattr(Learner, "train", stopped)
    job = asyncio.create_task(train_policy(replace(run, save_every=0)))
    with pytest.raises(asyncio.CancelledError):
        await job
    assert steps(run) == ["step-000001"]
    assert adapter(folder(run))
    await train_policy(resumed(run))
    assert metrics(folder(run)) == metrics(whole[0])


async def test_a_failed_run_keeps_its_last_finished_step(run: ag.RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    train, calls = Learner.train, iter(range(9))

    def broken(self: Learner, samples: Any) -> dict[str, float]:
        if next(calls) == 1:
            raise RuntimeError("out of memory")
        return train(self, samples)

    monkeypatch.setattr(Learner, "train", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        await train_policy(replace(run, save_every=0))
    assert steps(run) == ["step-000001"]


@pytest.mark.slow
def test_ctrl_c_in_a_users_script_gives_a_short_traceback(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN)
    words = [sys.executable, str(script), str(tmp_path / "run")]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert len(done.stderr.split("Traceback", 1)[1].splitlines()) < 40
    assert (tmp_path / "run" / "checkpoints" / "step-000001").exists()


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("keep_checkpoints", {"keep_checkpoints": 0}),
        ("save_every", {"save_every": -1}),
        ("output_dir", {"resume": Path("other")}),
        ("output_dir", {"output_dir": 3}),
        ("advantage_estimator", {"advantage_estimator": "gae"}),
        ("credit", {"credit": "token"}),
        ("group_size", {"group_size": 1}),
        ("prompts_per_step", {"prompts_per_step": 0}),
        ("max_steps", {"max_steps": -1}),
        ("max_turn_tokens", {"max_turn_tokens": 0}),
        ("probe_tolerance", {"probe_tolerance": float("nan")}),
        ("sandbox", {"sandbox": "vm"}),
        ("engine", {"engine": 3}),
    ],
)
def test_invalid_settings_are_refused_by_name(run: ag.RunConfig, field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        replace(run, **changes)


def test_a_folder_may_be_given_as_a_string(run: ag.RunConfig) -> None:
    assert replace(run, output_dir="runs/x").output_dir == Path("runs/x")  # type: ignore[arg-type]  # as users write it


def test_the_log_is_cut_back_to_the_finished_steps(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "reward": step / 10, "rollouts/started": 2}) for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "rew')  # it died while writing
    with MetricsLogger(tmp_path, steps=5, done=3) as log:
        assert [row["reward"] for row in log.rows] == [0.0, 0.1, 0.2]
        log(3, {"reward": 0.5, "rollouts/started": 2})
    assert [json.loads(line)["reward"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        0.0,
        0.1,
        0.2,
        0.5,
    ]


@pytest.mark.parametrize(
    "damaged",
    [
        *(b'{"step": 0, "rew\xff": 1}\n', b'{"step": "0"}\n', b"[0]\n", b"\0\0\0\n", b'{"step": 1e3}\n'),
        *(b'{"step": 0, "reward": {"a": 1}}\n', b'{"step": 0, "eval/reward": "\\u001b[31m"}\n'),
        *(b'{"step": %s}\n' % (b"9" * 4000), b'{"step": 0, "reward": "%s"}\n' % (b"x" * LONGEST_LINE)),
    ],
    ids=lambda line: repr(line)[:40],
)
def test_a_damaged_line_of_the_log_is_reported_as_a_missing_step(tmp_path: Path, damaged: bytes) -> None:
    whole = json.dumps({"step": 1, "reward": 0.5, "rollouts/started": 2}).encode()
    (tmp_path / "metrics.jsonl").write_bytes(damaged + whole + b"\n")
    with (
        pytest.warns(UserWarning, match="has only 1 of the 2 finished steps"),
        MetricsLogger(tmp_path, steps=5, done=2) as log,
    ):
        assert log.summary()["reward_first"] == 0.5


def test_the_log_is_read_line_by_line_whatever_its_size(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.write(json.dumps({"step": 0, "reward": 0.5}).encode() + b"\n")
        file.truncate(8 * LONGEST_LINE)
    tracemalloc.start()
    try:
        assert steps_in(tmp_path / "metrics.jsonl") == 1
        assert tracemalloc.get_traced_memory()[1] < 4 * LONGEST_LINE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("progress", "said"),
    [
        ({"probe": "x"}, "resume: probe of the checkpoint of step 3: "),
        ({"probe_base": [0.5, "x"]}, "resume: probe_base.1 of the checkpoint of step 3: "),
        ({"eval_before": []}, "resume: eval_before of the checkpoint of step 3: "),
        ({"sampler_states": [3]}, "resume: sampler_states.0 of the checkpoint of step 3: "),
    ],
)
def test_a_checkpoint_whose_progress_has_wrong_types_is_refused_by_field(progress: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        read_run_state(3, progress)


@pytest.mark.parametrize("said", ['{"step": Infinity, "reward": 1}', '{"step": 1, "reward": 1%s}' % ("0" * 4000), "[]"])
def test_a_best_policy_whose_reward_is_not_a_number_is_named(tmp_path: Path, said: str) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best/evaluation.json").write_text(said)
    with pytest.raises(ValueError, match=r"^resume: .*evaluation\.json can't be read \(\w+\), so the best policy's"):
        read_best(tmp_path)


def test_steps_missing_from_the_log_are_named(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="has only 0 of the 2 finished steps"),
        MetricsLogger(tmp_path, steps=5, done=2) as log,
    ):
        assert log.rows == []
