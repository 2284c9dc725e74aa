"""Weight syncs: load the trainer's policy into the engine, for all processes together, and check that it arrived."""

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from agentgym.engines.base import Engine, SharedEngine, weights_engine
from agentgym.errors import EngineError
from agentgym.machine.time_limits import all_clocks_stopped
from agentgym.types.arrays import Floats
from agentgym.types.completion import Sampling
from agentgym.types.weights import Adapter, ModelWeights
from agentgym.weight_sync.proof import Scored, Verdict, judge, refuse_other_model

if TYPE_CHECKING:  # torch is loaded when a run starts, not when a command prints its help
    from agentgym.train.trainer import Trainer

_LOG = logging.getLogger(__name__)


class WeightSync:
    """Loads each of a trainer's policies into an engine, and checks that the engine samples from it.

    Create it while the engine samples from the trainer's base model. Call `begin` before the first training step,
    because the checks compare with the base model's scores. If an adapter is trained, the base model stays available,
    and the first sync may call `begin` instead. Under torchrun, every process creates a WeightSync and calls it at the
    same steps. If the engine uses shared servers, the first process uploads each policy once, and the others pull it.

    Args:
        trainer: The trainer whose policies to load.
        engine: The engine to load them into.
        probe: Ids that trainer and engine both score.
        sampling: Sampling parameters that the probe is scored with.
        tolerance: Largest allowed gap, in nats, between the trainer and an engine in float32.
        base: If a run is resumed, the trainer's scores of the probe under its base model: the `base` of the earlier
            process. Empty for a new run.
    """

    def __init__(
        self,
        trainer: "Trainer",
        engine: Engine,
        probe: Sequence[int],
        sampling: Sampling,
        *,
        tolerance: float = 1e-3,
        base: Sequence[float] = (),
    ) -> None:
        self.probe = list(probe)
        """The ids that trainer and engine both score before and after a sync."""
        self.unproven = 0
        """Number of syncs whose update was too small to verify."""
        self.base = list(base)
        """The trainer's log-probabilities of the probe under its base model; empty before `begin`."""
        self._trainer, self._engine = trainer, engine
        self._sampling, self._tolerance = sampling, tolerance
        self._start: Scored | None = None
        self._old: Scored | None = None

    async def __call__(self, version: int) -> dict[str, float]:
        """Load the trainer's policy into the engine, and check that it arrived.

        An update that is too small to verify is counted. It is checked together with the updates that follow.

        Args:
            version: Policy version of the engine from now on.

        Returns:
            Metrics of the check.

        Raises:
            EngineError: On every process, if the engine of one of them doesn't sample from the policy.
        """
        with all_clocks_stopped():  # no turn continues while the engine loads the weights and scores
            start = self._start or await self.begin()
            await self._give(version)
            new = await self._scored(await self._by_trainer(base=False))
        verdict = await self._agreed(start, self._old or start, new, version)
        if verdict.proven:
            self._old = new
        else:
            self.unproven += 1
            _LOG.info("version %d: the update is too small for the probe to verify that it arrived", version)
        metrics = {
            "sync/logprob_gap": verdict.gap_max,
            "sync/logprob_gap_mean": verdict.gap_mean,
            "sync/unproven": float(self.unproven),
        }
        return metrics | ({"sync/arrived": verdict.arrived} if verdict.proven else {})

    async def begin(self) -> Scored:
        """Score the probe under the base model. Later calls return the same scores.

        The engine must not have loaded another policy yet. Every process must call this method.

        Returns:
            The scores at version 0.

        Raises:
            ValueError: If the whole model is trained and has already changed.
            EngineError: If the engine's model isn't the trainer's.
        """
        if self._start is not None:
            return self._start
        with all_clocks_stopped():  # rollouts of a pipelined run's first batch may be running
            by_trainer = np.array(self.base, np.float32) if self.base else await self._by_trainer(base=True)
            start = await self._scored(by_trainer)
        self.base = [float(score) for score in start.trainer]
        exact = self._trainer.dtype == getattr(self._engine, "dtype", None) == "float32"
        refuse_other_model(start, tolerance=self._tolerance, exact=exact)
        self._start = start
        return start

    async def _by_trainer(self, *, base: bool) -> Floats:
        return await asyncio.to_thread(self._trainer.score, self.probe, sampling=self._sampling, base=base)

    async def _scored(self, by_trainer: Floats) -> Scored:
        by_engine = np.asarray(await self._engine.score(self.probe, sampling=self._sampling))
        if by_engine.shape != by_trainer.shape:
            raise EngineError(
                f"engine: its scores of {len(self.probe)} ids have the shape {by_engine.shape}, expected "
                f"{by_trainer.shape}; it must return one log-probability for each id except the first"
            )
        return Scored(trainer=by_trainer, engine=by_engine)

    async def _agreed(self, start: Scored, old: Scored, new: Scored, version: int) -> Verdict:
        """Check the scores on every process, and return this process's verdict.

        Raises:
            EngineError: On every process, if the check of any process failed. Otherwise the other processes would wait
                for the failed one.
        """
        refusal, verdict = "", None
        try:
            verdict = judge(start, old, new, version=version, tolerance=self._tolerance)
        except EngineError as error:
            refusal = str(error)
        refusals = [said for said in await self._trainer.gather([refusal]) if said]
        if refusals or verdict is None:
            raise EngineError(refusals[0])
        return verdict

    async def _give(self, version: int) -> None:
        engine, trainer = self._engine, self._trainer
        if trainer.world == 1 or not isinstance(engine, SharedEngine):
            await load_policy(trainer, engine, version=version)
            return
        policy = await asyncio.to_thread(_policy, trainer, first_only=True)
        await engine.hold()
        await trainer.gather([None])  # no process samples while the servers' weights change
        pushed, refusal = None, None
        if trainer.rank == 0:
            try:
                pushed = await engine.push(policy, version=version)
            except Exception as error:  # passed on to the other processes, which would otherwise wait forever
                refusal = error
        said = "" if refusal is None else f"{type(refusal).__name__}: {refusal}"
        pushed, said = (await trainer.gather([(pushed, said)]))[0]
        if refusal is not None:
            raise refusal
        if pushed is None:
            raise EngineError(f"sync: the first process could not push version {version}: {said}")
        await engine.pull(pushed)


async def load_policy(trainer: "Trainer", engine: Engine, *, version: int) -> None:
    """Load the trainer's policy into this process's engine, without a check. Every process must call it.

    Raises:
        ValueError: If the policy is a whole model, and the engine can't load one.
    """
    await load(engine, await asyncio.to_thread(_policy, trainer), version=version)


async def load(engine: Engine, policy: Adapter | ModelWeights | None, *, version: int) -> None:
    """Load a policy into an engine.

    Raises:
        ValueError: If the policy is a whole model, and the engine can't load one.
    """
    if isinstance(policy, ModelWeights):
        await weights_engine(engine).load_weights(policy, version=version)
    else:
        await engine.load_adapter(policy, version=version)


def _policy(trainer: "Trainer", *, first_only: bool = False) -> Adapter | ModelWeights | None:
    """Return the trainer's policy.

    If `first_only` is true and the whole model is trained, only rank 0 gets the weights. The other ranks get None.
    """
    return trainer.adapter() if trainer.adapts else trainer.weights(first_only=first_only)
