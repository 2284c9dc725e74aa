"""Held-out evaluations of a run, between two steps or on separate workers while training continues."""

import asyncio
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from agentgym.evals.evaluation import Evaluation
from agentgym.run.callbacks import Callbacks
from agentgym.run.collector import Collector
from agentgym.run.config import RunConfig
from agentgym.run.lost import WorkersLost
from agentgym.run.metrics.clock import StepClock
from agentgym.run.recorder import Recorder
from agentgym.run.resume import CheckpointManager
from agentgym.run.summary import look_at_failed
from agentgym.run.tasks.envs import env_metrics
from agentgym.scheduling.accounting import raise_if_all_failed
from agentgym.weight_sync.sync import load_policy

if TYPE_CHECKING:  # torch is loaded when a run starts, so that --help and an early Ctrl-C stay fast
    from agentgym.train.trainer import Trainer

PREFIX = ".evaluating-"
"""Prefix of the names of folders that store a policy while its evaluation is running."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """An evaluation that runs while training continues."""

    done: int
    """Number of steps finished before the evaluation."""
    playing: "asyncio.Task[Evaluation]"
    policy: Path
    """The folder of the evaluated policy."""
    checkpoints: CheckpointManager


class Evaluations:
    """Evaluates a run's policies on the held-out tasks, and records the results. Use it inside `async with`.

    `beside` is a collector with separate workers, or None. If it is given, the evaluations that `begin` starts run
    while training continues, one at a time. A result is recorded between two steps, under the step after which the
    evaluation started. If the `async with` ends with an error, a running evaluation is cancelled, and the resumed run
    reports which result is missing.
    """

    def __init__(
        self,
        run: RunConfig,
        trainer: "Trainer",
        collector: Collector,
        record: Recorder,
        callbacks: Callbacks,
        clock: StepClock,
        *,
        beside: Collector | None = None,
    ) -> None:
        self._run, self._trainer, self._collector = run, trainer, collector
        self._record, self._callbacks, self._clock = record, callbacks, clock
        self._beside = beside
        self._pending: _Pending | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pending is not None:
            self._pending.playing.cancel()
            await asyncio.wait([self._pending.playing])

    def say_missing(self, steps: int) -> None:
        """Report which evaluations of the first `steps` steps were running when the run stopped.

        Deletes the policies of all unfinished evaluations. Blocks on disk I/O.
        """
        folder = self._record.log.folder
        for left in sorted(folder.glob(f"{PREFIX}*")):
            done = int(left.name.removeprefix(PREFIX))
            if done < steps:
                self._record.log.alert(
                    f"The evaluation after {done} steps was running when the run stopped; its result is missing."
                )
            shutil.rmtree(left, ignore_errors=True)

    async def now(self, phase: str, done: int, checkpoints: CheckpointManager | None = None) -> float | None:
        """Run the held-out tasks after `done` steps, record the results, and return their mean reward.

        Args:
            phase: The phase under which rollouts are stored, such as "eval_before".
            done: Number of finished steps.
            checkpoints: Saves the policy if this evaluation is the run's best so far, unless the run only evaluates
                before and after training. None saves no policy.

        Returns:
            The mean reward, or None if the run has no held-out tasks.
        """
        run = self._run
        if not run.eval_tasks:
            return None
        self._record.log.note("held-out evaluation")
        with self._clock.part("eval"):
            rollout = await self._played(self._collector)
        reward = await self._recorded(rollout, phase, done)
        if checkpoints is not None and run.eval_every and done:
            await checkpoints.evaluated(reward, done)
        return reward

    async def begin(self, done: int, checkpoints: CheckpointManager) -> None:
        """Evaluate the policy after `done` steps: during training if there are separate workers, otherwise immediately.

        If another evaluation is still running, waits for it first.
        """
        if self._beside is None:
            await self.now("eval", done, checkpoints)
            return
        await self.end()
        self._record.log.note(f"held-out evaluation after {done} steps, during training")
        name, then = f"{PREFIX}{done:06}", f"the evaluation after {done} steps is missing"
        save = lambda folder: self._trainer.save(folder / name)  # noqa: E731
        if not await asyncio.to_thread(checkpoints.write, "a policy to evaluate", save, then=then):
            return
        policy = self._record.log.folder / name
        try:
            await load_policy(self._trainer, self._beside.engine, version=done)
        except WorkersLost as lost:
            self._miss(done, policy, lost)
            return
        playing = asyncio.create_task(self._played(self._beside))
        self._pending = _Pending(done, playing, policy, checkpoints)

    async def settle(self) -> None:
        """Record the evaluation that runs during training, if it has ended."""
        if self._pending is not None and self._pending.playing.done():
            await self.end()

    async def end(self) -> None:
        """Wait for the evaluation that runs during training and record it, or report that its workers were lost.

        Raises:
            AgentGymError: If all rollouts of the evaluation failed.
        """
        if (pending := self._pending) is None:
            return
        try:
            with self._clock.part("eval"):
                rollout = await asyncio.shield(pending.playing)
        except WorkersLost as lost:
            self._pending = None
            self._miss(pending.done, self._place(pending.policy), lost)
            return
        self._pending = None
        reward = await self._recorded(rollout, "eval", pending.done)
        await pending.checkpoints.evaluated(reward, pending.done, saved=self._place(pending.policy))

    def _place(self, policy: Path) -> Path:
        """Return the policy folder's current path, since the run's folder may have been moved."""
        return self._record.log.folder / policy.name

    def _miss(self, done: int, policy: Path, lost: WorkersLost) -> None:
        self._record.log.alert(f"The evaluation after {done} steps is missing: {lost}")
        shutil.rmtree(policy, ignore_errors=True)

    async def _played(self, collector: Collector) -> Evaluation:
        run = self._run
        evaluation = await collector.evaluate(
            run.eval_tasks,
            n=run.eval_rollouts,
            seed=run.held_out_seed,
            must_score=False,
            sampling=run.held_out_sampling,
        )
        return replace(evaluation, solved=run.solved)

    async def _recorded(self, evaluation: Evaluation, phase: str, done: int) -> float:
        """Record an evaluation in the store and the log, and return its mean reward."""
        self._record.evaluated(evaluation, phase=phase, done=done)
        raise_if_all_failed(evaluation.groups, then=look_at_failed(self._record.log.folder))
        metrics = await asyncio.to_thread(evaluation.metrics)
        metrics |= env_metrics(self._collector.env, evaluation.groups, "eval/")
        await asyncio.to_thread(self._record.log.held_out, done, metrics)
        await self._callbacks.call("on_evaluation", done, evaluation, metrics)
        return metrics["eval/reward"]
