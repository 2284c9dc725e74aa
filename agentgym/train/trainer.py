"""The trainer of an adapter or of a whole model, on one process or on many."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar, cast

import torch

from agentgym.errors import AgentGymError
from agentgym.files.names import whole_path
from agentgym.hub import find_model
from agentgym.train.checkpoint import last_checkpoint
from agentgym.train.config import TrainConfig, with_rate
from agentgym.train.distributed import find_device, gpus_here, open_ranks
from agentgym.train.kept_logprobs import ScoredSample
from agentgym.train.learner import Learner
from agentgym.train.policy.adapter_io import export_adapter, export_weights, write_adapter, write_merged, write_model
from agentgym.train.policy.fsdp import shards_alone, weight_type
from agentgym.train.snapshot import Snapshot
from agentgym.types.arrays import Floats
from agentgym.types.completion import Sampling
from agentgym.types.sample import Sample, SampleKey
from agentgym.types.weights import Adapter, ModelWeights

T = TypeVar("T")

__all__ = ["TrainConfig", "Trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """The thread and the learner that an open trainer holds, and closes."""

    thread: ThreadPoolExecutor
    learner: Learner
    threads_before: int

    def close(self) -> None:
        try:
            self.thread.submit(self.learner.ranks.close).result()
        finally:
            self.thread.shutdown()
            torch.set_num_threads(self.threads_before)


def _open(model: Path | str, config: TrainConfig, seed: int) -> _Opened:
    """Open a trainer; if that fails, nothing is left open."""
    threads_before = torch.get_num_threads()
    thread = ThreadPoolExecutor(1, "trainer")
    try:
        learner = thread.submit(_learner, model, config, seed).result()
    except BaseException:
        thread.shutdown()
        torch.set_num_threads(threads_before)
        raise
    return _Opened(thread=thread, learner=learner, threads_before=threads_before)


def _learner(model: Path | str, config: TrainConfig, seed: int) -> Learner:
    torch.set_num_threads(config.threads)
    ranks = open_ranks(config.device, group=shards_alone(config, find_device(config.device)))
    try:
        return Learner(model, config, ranks, seed=seed)
    except BaseException:
        ranks.close()
        raise


class Trainer:
    """Trains a LoRA adapter or a whole model; the same samples give the same weights on any number of processes.

    `model` is a folder, a Hugging Face name or "tiny"; beside an adapter it stays frozen, and its files stay in any
    case. `seed` decides the adapter's first weights.
    Open it with `async with` or `with`. Under torchrun, every process opens one and makes the same calls with the
    same samples; each computes its share. All work runs in one thread of its own, so that an event loop stays
    free and collectives keep their order. The methods that are not async block their caller.
    """

    def __init__(self, model: Path | str, config: TrainConfig, *, seed: int = 0) -> None:
        found = find_model(model)
        self.model = whole_path(found) if Path(found).exists() else found  # it is read again at the end
        self.config, self.seed = with_rate(config, model), seed
        self._opened: _Opened | None = None

    def __enter__(self) -> "Trainer":
        self._opened = _open(self.model, self.config, self.seed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened, self._opened = self._open_now, None
        opened.close()

    async def __aenter__(self) -> "Trainer":
        opening = asyncio.create_task(asyncio.to_thread(self.__enter__))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: what it opens has to be waited for, and closed.
            await asyncio.wait([opening])
            if self._opened is not None:
                await self.__aexit__(None, None, None)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self._open_now.learner.ranks.rank

    @property
    def world(self) -> int:
        """Number of processes that train together."""
        return self._open_now.learner.ranks.world

    @property
    def on_gpu(self) -> bool:
        """Whether this process trains on a GPU."""
        return self._open_now.learner.ranks.device.type == "cuda"

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs of this machine that the processes train on."""
        return gpus_here(self.config.device) if self.on_gpu else ()

    @property
    def dtype(self) -> str:
        """The type that the model computes in, such as float32."""
        return str(weight_type(self.config, self._open_now.learner.ranks.device)).removeprefix("torch.")

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps so far, those before a resume included; skipped ones do not count."""
        return self._call(lambda learner: learner.optimizer_steps)

    async def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on these samples, one optimizer step for each mini-batch of rollouts; returns the metrics of the log.

        Every rank passes all of the samples, and gets the same metrics. A gradient that is not finite is not
        applied: the step is counted in `train/skipped_steps`, and a RuntimeWarning names the rollouts that it came
        from. The other metrics are of the steps that were taken. A mini-batch in which no token is trained is no step
        either: it is counted in `train/untrained_steps`, with a RuntimeWarning. Without samples there is no step.
        Cancelling the call does not stop the step.
        Raises ValueError if ranks hold different samples, and for samples that the model cannot be given.
        """
        opened = self._open_now
        return await asyncio.wrap_future(opened.thread.submit(opened.learner.train, samples))

    async def step_and_logprobs(
        self, samples: Sequence[Sample]
    ) -> tuple[dict[str, float], dict[SampleKey, ScoredSample]]:
        """Do a `step`, and also return the log-probabilities that it computed on the way.

        They are those of the policy before the optimizer step of the sample's mini-batch, or with
        old_logprobs="trainer" before the first one of the call, by the sample's rollout id, segment and step. Rank 0
        gets those of all ranks, and the others an empty dict. No forward is added.
        """
        opened = self._open_now
        return await asyncio.wrap_future(opened.thread.submit(opened.learner.train_and_keep, samples))

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Do the same as `step`, for code without an event loop."""
        return self._call(lambda learner: learner.train(samples))

    def values(self, samples: Sequence[Sample]) -> dict[SampleKey, Floats]:
        """Return a value for each token of the samples' loss masks: what the critic expects from the state before it.

        They are in units of reward, by the sample's rollout id, segment and step. The critic is a value head
        that the first call makes; the next `step` trains it, on the `returns` of its `SampleBatch` and on the
        states of the last call. `value_samples` calls this; `values([])` lets the values go that no step is to learn
        from. Every rank must call it with all of the samples, and gets all values. Raises ValueError as `step` does.
        """
        return self._call(lambda learner: learner.values(samples))

    def adapter(self) -> Adapter:
        """Return a snapshot of the adapter on the CPU, whole on every rank. Every rank must call it.

        Raises ValueError where a whole model is trained.
        """
        if not self.adapts:
            raise ValueError("method: full trains no adapter; take `weights()`, or set method='lora'")
        return self._call(lambda learner: export_adapter(learner.policy))

    def weights(self, *, first_only: bool = False) -> ModelWeights | None:
        """Return a snapshot on the CPU of the weights that are trained, whole, in the type of the model's computation.

        Every rank must call it, and gets it; with `first_only` the others get None. Raises ValueError where an adapter
        is trained.
        """
        if self.adapts:
            raise ValueError("method: lora trains an adapter; take `adapter()`, or set method='full'")
        keep = not first_only or self.rank == 0
        dtype = getattr(torch, self.dtype)
        return self._call(lambda learner: export_weights(learner.policy, dtype, keep=keep))

    @property
    def adapts(self) -> bool:
        """Whether an adapter is trained, and not the model itself."""
        return self.config.method == "lora"

    def save(self, path: Path | str, *, files: Mapping[str, str] = MappingProxyType({})) -> None:
        """Write the adapter for `PeftModel.from_pretrained`, or the model that was trained whole with its tokenizer.

        It is complete on return, and `files`, texts by their names, are beside it. A model is in the type that the
        trainer computes in. Every rank must call it.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if self.adapts:
            adapter = self.adapter()
            self.first(lambda: write_adapter(adapter, Path(path), files))
        else:
            weights = self.weights(first_only=True)
            tensors = {} if weights is None else weights.tensors
            dtype, base = getattr(torch, self.dtype), self._open_now.learner.policy.base_fingerprint
            write = partial(write_model, self.model, tensors, Path(path), dtype=dtype, fingerprint=base, files=files)
            self.first(write)

    def merge(self, path: Path | str) -> None:
        """Write base and adapter as one plain model with its tokenizer; it is complete on return.

        Every rank must call it. The sums are made in float32 and written in the base's own type. Of a model that is
        trained whole it is what `save` writes.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if not self.adapts:
            self.save(path)
            return
        adapter = self.adapter()
        self.first(lambda: write_merged(self.model, adapter, Path(path)))

    def snapshot(self) -> Snapshot:
        """Return a copy of all that training goes on from, in this process's memory. Every rank must call it."""
        return self._call(lambda learner: learner.snapshot())

    def checkpoint(self, folder: Path | str, step: int, *, keep: int = 2, run: Mapping[str, Any] | None = None) -> None:
        """Write all that training goes on from into `folder`, complete or not at all; see `write_checkpoint`.

        `run` holds plain values and tensors of the caller's own, which `resume` gives back. Every rank must call it. Of
        a model that is trained whole each rank writes its part, so all of them need the same `folder`.
        """
        self.write(self.snapshot(), folder, step, keep=keep, run=run)

    def write(
        self, snapshot: Snapshot, folder: Path | str, step: int, *, keep: int = 2, run: Mapping[str, Any] | None = None
    ) -> None:
        """Write a snapshot as `checkpoint` does. Every rank must call it."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        write = partial(snapshot.write_checkpoint, Path(folder), step, run=run or {}, keep=keep)
        if self.rank:
            write()
        self.first(write)

    def resume(self, folder: Path | str) -> tuple[int, dict[str, Any]]:
        """Go on from the last whole checkpoint in `folder`; returns its step and the `run` that was written with it.

        Weights, the optimizer's moments and random states are as they were, also on another number of ranks. Learning
        rate, schedule, betas and weight decay are those of this trainer's config, and may differ from the
        checkpoint's. Every rank must call it. Raises ValueError, and changes nothing, if no checkpoint is whole or if
        it was written with another base model, method, temperature or kind of adapter, naming what differs.
        """
        found = self.first(lambda: last_checkpoint(Path(folder)))
        self._call(lambda learner: learner.restore(found.state["trainer"], found.folder))
        return found.step, found.state["run"]

    def first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank; if it fails there, the others raise AgentGymError.

        Every rank must call it, and none goes on before the work is done.
        """
        if self.world == 1:
            return work()
        done: T | None = None
        failure: Exception | None = None
        if self.rank == 0:
            try:
                done = work()
            except Exception as error:
                failure = error
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        answer, why_not = self._call(lambda learner: learner.ranks.broadcast((done, said)))
        if failure is not None:
            raise failure
        if why_not is not None:
            raise AgentGymError(f"rank 0: {why_not}")
        return cast("T", answer)

    def score(self, token_ids: Sequence[int], *, sampling: Sampling, base: bool = False) -> Floats:
        """Return the log-probability (nats) of each id but the first, given the ids before it. Every rank must call it.

        With `base` it is that of the model as it was before training: ValueError where that was trained whole, and no
        frozen copy is kept (`kl_coef` 0).
        """
        return self._call(lambda learner: learner.score(token_ids, sampling, base=base))

    async def gather(self, objects: list[T]) -> list[T]:
        """Return all ranks' objects in rank order, on every rank. Every rank must call it.

        The event loop is free until every rank has come.
        """
        opened = self._open_now
        return await asyncio.wrap_future(opened.thread.submit(opened.learner.ranks.gather, objects))

    @property
    def _open_now(self) -> _Opened:
        if self._opened is None:
            raise RuntimeError("the trainer is not open: use `async with Trainer(model, config)` or `with`")
        return self._opened

    def _call(self, work: Callable[[Learner], T]) -> T:
        opened = self._open_now
        return opened.thread.submit(work, opened.learner).result()
