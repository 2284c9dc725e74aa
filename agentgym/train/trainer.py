"""Trainer of an adapter or a whole model, on one process or on many."""

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
from agentgym.hub import absolute_model
from agentgym.train.checkpoint import last_checkpoint
from agentgym.train.config import TrainConfig, with_rate
from agentgym.train.distributed import find_device, gpus_here, open_ranks
from agentgym.train.kept_logprobs import ScoredSample
from agentgym.train.learner import Learner
from agentgym.train.memory import TrainerFacts
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
    """The thread and the learner of an open trainer."""

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
    """Open a trainer. If that fails, nothing is left open."""
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
    torch.set_num_threads(config.threads or 1)
    ranks = open_ranks(config.device, group=shards_alone(config, find_device(config.device)))
    try:
        learner = Learner(model, config, ranks, seed=seed)
        torch.set_num_threads(learner.config.threads or 1)
        return learner
    except BaseException:
        ranks.close()
        raise


class Trainer:
    """Trains a LoRA adapter or a whole model.

    The same samples give the same weights on any number of processes. Open it with `async with` or `with`. Under
    torchrun, every process opens a trainer and makes the same calls with the same samples. Each process does a part
    of each call's work. All work runs in a separate thread, so the event loop stays free and collectives keep their
    order. The methods that aren't async block their caller.

    Args:
        model: A model folder, a Hugging Face name or "tiny". If an adapter is trained, the model's weights stay
            frozen. The model's files are never changed.
        config: The settings of the trainer. The open trainer's `config` has a value for each setting whose default
            depends on the model.
        seed: Seed of the initial weights of the adapter, and of the critic if there is one.
    """

    def __init__(self, model: Path | str, config: TrainConfig, *, seed: int = 0) -> None:
        self.model = absolute_model(model)  # saving and merging read it again, and adapters name it
        self.config, self.seed = with_rate(config, model), seed
        self._opened: _Opened | None = None

    def __enter__(self) -> "Trainer":
        self._opened = _open(self.model, self.config, self.seed)
        self.config = self._opened.learner.config
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
            # A thread can't be cancelled. Wait until it has opened the trainer, then close the trainer.
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
        """Rank of this process, starting at 0."""
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
        """Numbers of this machine's GPUs that the processes train on; empty if they train on the CPU."""
        return gpus_here(self.config.device) if self.on_gpu else ()

    @property
    def dtype(self) -> str:
        """Name of the data type that the model computes in, such as float32."""
        return str(weight_type(self.config, self._open_now.learner.ranks.device)).removeprefix("torch.")

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps so far, including those before a resume; skipped steps don't count."""
        return self._call(lambda learner: learner.optimizer_steps)

    async def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on the samples, with one optimizer step per mini-batch of rollouts.

        A gradient that isn't finite is not applied: the step is counted in `train/skipped_steps`, and a
        RuntimeWarning names the rollouts that caused it. Most other metrics cover only the steps that were taken. A
        mini-batch without a trained token takes no step either: it is counted in `train/untrained_steps`, with a
        RuntimeWarning. An empty batch takes no step. Cancelling the call doesn't stop the step.

        Args:
            samples: All samples of the batch, the same on every rank.

        Returns:
            The metrics to log, the same on every rank.

        Raises:
            ValueError: If ranks hold different samples, if the model or the loss can't use a sample, if a group was
                trained on before, or if the critic can't learn from the batch.
        """
        opened = self._open_now
        return await asyncio.wrap_future(opened.thread.submit(opened.learner.train, samples))

    async def step_and_logprobs(
        self, samples: Sequence[Sample]
    ) -> tuple[dict[str, float], dict[SampleKey, ScoredSample]]:
        """Train like `step`, and also return the log-probabilities that the step computed.

        The log-probabilities are those of the policy before the optimizer step of the sample's mini-batch or, with
        old_logprobs="trainer", before the first optimizer step of the call. Returning them adds no forward pass.

        Args:
            samples: All samples of the batch, the same on every rank.

        Returns:
            The metrics of `step`, and the log-probabilities by the sample's rollout id, segment and step. Rank 0 gets
            the log-probabilities of all ranks, the others an empty dict.

        Raises:
            ValueError: As in `step`.
        """
        opened = self._open_now
        return await asyncio.wrap_future(opened.thread.submit(opened.learner.train_and_keep, samples))

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Train like `step`, for code without an event loop.

        Args:
            samples: All samples of the batch, the same on every rank.

        Returns:
            The metrics to log, the same on every rank.

        Raises:
            ValueError: As in `step`.
        """
        return self._call(lambda learner: learner.train(samples))

    def values(self, samples: Sequence[Sample]) -> dict[SampleKey, Floats]:
        """Return the critic's value of the state before each token that the samples' loss masks cover.

        The critic is a value head, created by the first call. The next `step` trains it, on the `returns` of its
        `SampleBatch` and on the hidden states of the latest call. `value_samples` calls this method. To discard
        values that no step will learn from, call `values([])`. Every rank must call it.

        Args:
            samples: All samples, the same on every rank.

        Returns:
            The values in units of reward, by the sample's rollout id, segment and step. Every rank gets all of them.

        Raises:
            ValueError: If ranks hold different samples, or if the model can't use a sample.
        """
        return self._call(lambda learner: learner.values(samples))

    def adapter(self) -> Adapter:
        """Return a snapshot of the whole adapter on the CPU, on every rank. Every rank must call it.

        Raises:
            ValueError: If a whole model is trained instead of an adapter.
        """
        if not self.adapts:
            raise ValueError("method: full trains no adapter; use `weights()`, or set method='lora'")
        return self._call(lambda learner: export_adapter(learner.policy))

    def weights(self, *, first_only: bool = False) -> ModelWeights | None:
        """Return a snapshot of all trained weights on the CPU, in the data type that the model computes in.

        Every rank must call it.

        Args:
            first_only: Whether to return the weights only on rank 0, and None on the other ranks.

        Raises:
            ValueError: If an adapter is trained instead of a whole model.
        """
        if self.adapts:
            raise ValueError("method: lora trains an adapter; use `adapter()`, or set method='full'")
        keep = not first_only or self.rank == 0
        dtype = getattr(torch, self.dtype)
        return self._call(lambda learner: export_weights(learner.policy, dtype, keep=keep))

    @property
    def adapts(self) -> bool:
        """Whether an adapter is trained, rather than the model itself."""
        return self.config.method == "lora"

    def save(self, path: Path | str, *, files: Mapping[str, str] = MappingProxyType({})) -> None:
        """Write the adapter for `PeftModel.from_pretrained`, or the trained whole model with its tokenizer.

        The folder is complete on return. A whole model is written in the data type that the trainer computes in. Every
        rank must call it.

        Args:
            path: Folder to write. Missing parent folders are created.
            files: Texts of additional files in the folder, by file name.
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
        """Merge the adapter into the base model, and write the result as a plain model folder, with its tokenizer.

        The folder is complete on return. The merged weights are computed in float32 and written in the base model's
        data type. If a whole model is trained, this method does the same as `save`. Every rank must call it.

        Args:
            path: Folder to write. Missing parent folders are created.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if not self.adapts:
            self.save(path)
            return
        adapter = self.adapter()
        self.first(lambda: write_merged(self.model, adapter, Path(path)))

    def describe(self) -> TrainerFacts:
        """Return what this process trains, and an estimate of its memory."""
        return self._call(lambda learner: learner.describe())

    def probe(self, limit_s: float) -> float | None:
        """Measure the speed of forward and backward passes. Nothing that training uses is changed.

        Args:
            limit_s: About the maximum number of seconds that the passes may take.

        Returns:
            Trained tokens per second, or None if several processes train.
        """
        return self._call(lambda learner: learner.probe(limit_s))

    def snapshot(self) -> Snapshot:
        """Return a copy of everything needed to resume training, in this process's memory. Every rank must call it."""
        return self._call(lambda learner: learner.snapshot())

    def checkpoint(self, folder: Path | str, step: int, *, keep: int = 2, run: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint with everything needed to resume training, complete or not at all.

        See `write_checkpoint`. Every rank must call it. If a whole model is trained, each rank writes its part, so
        `folder` must be the same folder on all ranks.

        Args:
            folder: Folder of the run's checkpoints; created if missing.
            step: Number of finished steps.
            keep: Number of latest checkpoints to keep.
            run: Plain values and tensors of the caller, which `resume` returns. None is an empty dict.
        """
        self.write(self.snapshot(), folder, step, keep=keep, run=run)

    def write(
        self, snapshot: Snapshot, folder: Path | str, step: int, *, keep: int = 2, run: Mapping[str, Any] | None = None
    ) -> None:
        """Write a snapshot as a checkpoint, like `checkpoint`. Every rank must call it.

        Args:
            snapshot: The result of `snapshot`.
            folder: Folder of the run's checkpoints; created if missing.
            step: Number of finished steps.
            keep: Number of latest checkpoints to keep.
            run: Plain values and tensors of the caller, which `resume` returns. None is an empty dict.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        write = partial(snapshot.write_checkpoint, Path(folder), step, run=run or {}, keep=keep)
        if self.rank:
            write()
        self.first(write)

    def resume(self, folder: Path | str) -> tuple[int, dict[str, Any]]:
        """Resume from the last complete checkpoint in `folder`.

        Weights, optimizer moments and random states are restored, even on a different number of ranks. Learning rate,
        schedule, betas and weight decay come from this trainer's config and may differ from the checkpoint's. Every
        rank must call it.

        Args:
            folder: Folder of the run's checkpoints.

        Returns:
            The checkpoint's step, and the `run` that was written with it.

        Raises:
            ValueError: If no checkpoint is complete, or if the checkpoint was written with another base model,
                method, temperature or kind of adapter, in which case nothing is changed. The message names the
                difference.
        """
        found = self.first(lambda: last_checkpoint(Path(folder)))
        self._call(lambda learner: learner.restore(found.state["trainer"], found.folder))
        return found.step, found.state["run"]

    def first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank.

        Every rank must call it, and waits until the work is done.

        Args:
            work: Function without arguments, called on rank 0 only.

        Raises:
            AgentGymError: On the other ranks, if `work` fails on rank 0. Rank 0 raises the original error.
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
        """Return the log-probability (nats) of each id except the first, given the ids before it.

        Every rank must call it.

        Args:
            token_ids: At least two token ids.
            sampling: Sampling parameters; only the temperature is used.
            base: Whether to score with the model as it was before training.

        Raises:
            ValueError: If the model can't process the ids, or if `base` is true, the whole model has been trained,
                and there is no frozen copy (`kl_coef` is 0).
        """
        return self._call(lambda learner: learner.score(token_ids, sampling, base=base))

    async def gather(self, objects: list[T]) -> list[T]:
        """Return all ranks' objects in rank order, on every rank.

        Every rank must call it. The event loop stays free until every rank has called it.

        Args:
            objects: This rank's objects, which must be picklable.
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
