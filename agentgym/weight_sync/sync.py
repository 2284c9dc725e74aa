"""Weight syncs: the trainer's policy to the engine, once for all processes, and proven each time."""

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

if TYPE_CHECKING:  # torch is loaded when a run begins: a command line asks for help, or is stopped, before
    from agentgym.train.trainer import Trainer

_LOG = logging.getLogger(__name__)


class WeightSync:
    """Gives an engine each policy of a trainer, and proves on the `probe` ids that it samples from that.

    Make it while the engine samples from the trainer's base model, and `begin` it before the first training step: the
    proof starts from there. Beside an adapter the base model stays, and the first sync begins it too. Under torchrun
    every process makes one and calls it at the same steps; an engine on shared servers is given each policy once, by
    the first process, and the others pull it. `tolerance` is the largest gap in nats of an engine in float32. `base`
    is what an earlier process scored with the trainer when it began, for a run that is resumed.
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
        """The ids that trainer and engine both score after a sync."""
        self.unproven = 0
        """Syncs whose update was too small to tell whether it arrived."""
        self.base = list(base)
        """The trainer's log-probabilities of these under its base model; empty before it has begun."""
        self._trainer, self._engine = trainer, engine
        self._sampling, self._tolerance = sampling, tolerance
        self._start: Scored | None = None
        self._old: Scored | None = None

    async def __call__(self, version: int) -> dict[str, float]:
        """Make the trainer's policy the engine's, as `version`; return the metrics of the proof.

        Raises EngineError, on every process, where the engine of one does not sample from it. An update that is too
        small to tell is counted, and proven together with the next ones.
        """
        with all_clocks_stopped():  # no turn goes on while the engine takes the weights and scores
            start = self._start or await self.begin()
            await self._give(version)
            new = await self._scored(await self._by_trainer(base=False))
        verdict = await self._agreed(start, self._old or start, new, version)
        if verdict.proven:
            self._old = new
        else:
            self.unproven += 1
            _LOG.info("version %d: the update is too small to tell on the probe whether it arrived", version)
        metrics = {
            "sync/logprob_gap": verdict.gap_max,
            "sync/logprob_gap_mean": verdict.gap_mean,
            "sync/unproven": float(self.unproven),
        }
        return metrics | ({"sync/arrived": verdict.arrived} if verdict.proven else {})

    async def begin(self) -> Scored:
        """Score the probe under the base model, which the engine must not have left yet; do nothing a second time.

        Every process must call it. Raises ValueError where the model is trained whole and has left it, EngineError
        where the engine's model is another.
        """
        if self._start is not None:
            return self._start
        with all_clocks_stopped():  # the first batch of a run that plays ahead is in play
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
                f"engine: its score of {len(self.probe)} ids has the shape {by_engine.shape} and not "
                f"{by_trainer.shape}; it must give one log-probability for each id but the first"
            )
        return Scored(trainer=by_trainer, engine=by_engine)

    async def _agreed(self, start: Scored, old: Scored, new: Scored, version: int) -> Verdict:
        """This process's verdict; the refusal of any process is one of all, so that none waits for it."""
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
        await trainer.gather([None])  # nobody samples while the servers' own weights change
        pushed, refusal = None, None
        if trainer.rank == 0:
            try:
                pushed = await engine.push(policy, version=version)
            except Exception as error:  # the others would wait for it
                refusal = error
        said = "" if refusal is None else f"{type(refusal).__name__}: {refusal}"
        pushed, said = (await trainer.gather([(pushed, said)]))[0]
        if refusal is not None:
            raise refusal
        if pushed is None:
            raise EngineError(f"sync: the first process could not push version {version}: {said}")
        await engine.pull(pushed)


async def load_policy(trainer: "Trainer", engine: Engine, *, version: int) -> None:
    """Have this process's engine sample from what the trainer trains, without a proof; every process must call it.

    Raises ValueError for a whole model where the engine takes none.
    """
    await load(engine, await asyncio.to_thread(_policy, trainer), version=version)


async def load(engine: Engine, policy: Adapter | ModelWeights | None, *, version: int) -> None:
    """Have an engine sample from this policy; ValueError for a whole model where the engine takes none."""
    if isinstance(policy, ModelWeights):
        await weights_engine(engine).load_weights(policy, version=version)
    else:
        await engine.load_adapter(policy, version=version)


def _policy(trainer: "Trainer", *, first_only: bool = False) -> Adapter | ModelWeights | None:
    """Return what an engine is given; with `first_only` the weights of a whole model on the first rank alone."""
    return trainer.adapter() if trainer.adapts else trainer.weights(first_only=first_only)
