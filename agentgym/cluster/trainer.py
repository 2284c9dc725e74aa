"""The training processes of a run on Ray, which the driver uses as one `Trainer`."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from agentgym.engines.sglang.launching.process import free_port
from agentgym.hub import absolute_model
from agentgym.run.lost import TrainerLost
from agentgym.run.peers import Share
from agentgym.train import memory
from agentgym.train.checkpoint import last_checkpoint
from agentgym.train.config import TrainConfig
from agentgym.train.kept_logprobs import ScoredSample
from agentgym.train.policy.adapter_io import write_adapter
from agentgym.train.snapshot import Snapshot
from agentgym.train.trainer import Trainer
from agentgym.types.arrays import Floats
from agentgym.types.completion import Sampling
from agentgym.types.sample import Sample, SampleKey
from agentgym.types.weights import Adapter, ModelWeights

T = TypeVar("T")
LOST_S = 10.0
"""Seconds to wait, after an error in one training process, for another process to end. If one ends, that is reported
as the cause of the error.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """The driver's information about the open trainers."""

    on_gpu: bool
    dtype: str
    config: TrainConfig


class TrainerProcess:
    """One training process with an ordinary `Trainer`. All processes get the same calls in the same order."""

    def __init__(self, share: Share) -> None:
        place = {"RANK": share.rank, "WORLD_SIZE": share.world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        os.environ |= {name: str(value) for name, value in place.items()}
        self._trainer: Trainer | None = None
        self._kept: Snapshot | None = None

    def address(self) -> tuple[str, int]:
        """Return a host and port of this process at which the other processes can connect to it."""
        return ray.util.get_node_ip_address(), free_port()

    def open(self, master: tuple[str, int], model: Path | str, config: TrainConfig, seed: int) -> TrainerFacts:
        """Connect to the other processes and open the trainer.

        Args:
            master: The first process's host and port, where the processes connect.
            model: The folder or name of the model.
            config: The trainer's settings.
            seed: The trainer's seed.
        """
        os.environ |= {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}
        self._trainer = Trainer(model, config, seed=seed)
        self._trainer.__enter__()
        opened = self._trainer
        return TrainerFacts(on_gpu=opened.on_gpu, dtype=opened.dtype, config=opened.config)

    def call(self, method: str, *values: Any, **named: Any) -> Any:
        """Call a method of the trainer; return its result on the first process and None on the others."""
        done = getattr(self._opened, method)(*values, **named)
        return done if self._opened.rank == 0 else None

    def step_and_logprobs(self, samples: Sequence[Sample]) -> Any:
        """Call the trainer's `step_and_logprobs`; return its result on the first process and None on the others."""
        done = asyncio.run(self._opened.step_and_logprobs(samples))
        return done if self._opened.rank == 0 else None

    def keep(self) -> None:
        """Store a snapshot in this process's memory, replacing the previous one."""
        self._kept = self._opened.snapshot()

    def kept(self) -> Snapshot | None:
        """Return this process's snapshot, which is the whole adapter, or a part of a fully trained model."""
        return self._kept

    def write_part(self, folder: Path, step: int, run: Mapping[str, Any], keep: int) -> None:
        """Write this process's part of the snapshot.

        Args:
            folder: Folder of the checkpoints, which must be the same one on every node.
            step: Number of finished steps.
            run: The state of the run, which the checkpoint also contains.
            keep: Number of latest checkpoints to keep.
        """
        assert self._kept is not None
        self._kept.write_checkpoint(folder, step, run=run, keep=keep)

    def write_policy(self, folder: Path, checkpoint: Path, files: Mapping[str, str]) -> None:
        """Write the model of the snapshot's checkpoint into `folder`."""
        assert self._kept is not None
        self._kept.write_policy(folder, checkpoint, files)

    def close(self) -> None:
        """Close the trainer."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.__exit__(None, None, None)

    @property
    def _opened(self) -> Trainer:
        assert self._trainer is not None, "open() comes first"
        return self._trainer


@dataclass(frozen=True, slots=True, eq=False)
class ClusterSnapshot:
    """A snapshot that stays in the training processes' memory until it is written."""

    trainer: "ClusterTrainer"

    def write_checkpoint(self, folder: Path, step: int, *, run: Mapping[str, Any], keep: int) -> None:
        """Write the checkpoint of this step.

        The driver writes an adapter's checkpoint. For a full model, every process writes its part into the same
        folder.

        Args:
            folder: Folder of the checkpoints.
            step: Number of finished steps.
            run: The state of the run, which the checkpoint also contains.
            keep: Number of latest checkpoints to keep.
        """
        if self.trainer.adapts:
            self._whole().write_checkpoint(folder, step, run=run, keep=keep)
        else:
            self.trainer.all_of("write_part", folder.absolute(), step, dict(run), keep)

    def write_policy(self, folder: Path, checkpoint: Path, files: Mapping[str, str]) -> None:
        """Write the adapter, or the model from its checkpoint."""
        if self.trainer.adapts:
            self._whole().write_policy(folder, checkpoint, files)
        else:
            self.trainer.first_of("write_policy", folder.absolute(), checkpoint.absolute(), dict(files))

    def _whole(self) -> Snapshot:
        kept: Snapshot = self.trainer.first_of("kept")
        return kept


class ClusterTrainer:
    """Trains in separate processes, and is used like a `Trainer` of a single process.

    If a process terminates unexpectedly, the call raises TrainerLost, and so does every later call.
    """

    rank, world = 0, 1
    gpus: tuple[int, ...] = ()

    def __init__(self, processes: Sequence[Any], model: Path | str, config: TrainConfig, *, seed: int) -> None:
        self.model, self.config, self.seed = absolute_model(model), config, seed
        self._processes = list(processes)
        self._facts: TrainerFacts | None = None
        self._lost = ""

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._open)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._lost:
            with suppress(TrainerLost):
                await asyncio.to_thread(self.all_of, "close")

    def _open(self) -> None:
        master = self.first_of("address")
        facts: TrainerFacts = self.all_of("open", master, self.model, self.config, self.seed)
        self._facts, self.config = facts, facts.config

    @property
    def adapts(self) -> bool:
        """Whether an adapter is trained instead of the full model."""
        return self.config.method == "lora"

    @property
    def on_gpu(self) -> bool:
        """Whether the processes train on GPUs."""
        return self._opened.on_gpu

    @property
    def dtype(self) -> str:
        """The data type that the model computes in, such as float32."""
        return self._opened.dtype

    async def gather(self, objects: list[T]) -> list[T]:
        """Return the objects unchanged: the driver is one process, and already has the rollouts of all workers."""
        return objects

    def first(self, work: Callable[[], T]) -> T:
        """Run `work` here on the driver. (A `Trainer` of several processes runs it only on the first one.)"""
        return work()

    async def step_and_logprobs(
        self, samples: Sequence[Sample]
    ) -> tuple[dict[str, float], dict[SampleKey, ScoredSample]]:
        """Run a step in all processes. The samples are put into the object store once for all of them."""
        done: tuple[dict[str, float], dict[SampleKey, ScoredSample]]
        done = await asyncio.to_thread(lambda: self.all_of("step_and_logprobs", ray.put(samples)))
        return done

    def values(self, samples: Sequence[Sample]) -> dict[SampleKey, Floats]:
        """Return the critic's values of the samples' states, as `Trainer.values` does."""
        values: dict[SampleKey, Floats] = self._call("values", list(samples))
        return values

    def describe(self) -> memory.TrainerFacts:
        """Return what the first process trains, and an estimate of its memory."""
        facts: memory.TrainerFacts = self._call("describe")
        return facts

    def probe(self, limit_s: float) -> float | None:
        """Return the trained tokens per second, as `Trainer.probe` does, or None if several processes train."""
        if len(self._processes) > 1:
            return None
        rate: float | None = self._call("probe", limit_s)
        return rate

    def adapter(self) -> Adapter:
        """Return a snapshot of the adapter."""
        adapter: Adapter = self._call("adapter")
        return adapter

    def weights(self, *, first_only: bool = False) -> ModelWeights | None:
        """Return a snapshot of the fully trained model's weights.

        `first_only` has no effect: only the first process ever returns weights, so the driver receives one copy.
        """
        weights: ModelWeights | None = self._call("weights", first_only=True)
        return weights

    def score(self, token_ids: Sequence[int], *, sampling: Sampling, base: bool = False) -> Floats:
        """Return the log-probability (nats) of each id except the first, as `Trainer.score` does."""
        scores: Floats = self._call("score", list(token_ids), sampling=sampling, base=base)
        return scores

    def save(self, path: Path | str, *, files: Mapping[str, str] = MappingProxyType({})) -> None:
        """Save the trained adapter or model in `path`.

        The driver writes an adapter. The first training process writes a full model, in a folder that the driver must
        see, too.

        Args:
            path: Folder to write. Missing parent folders are created.
            files: Texts of additional files in the folder, by file name.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if self.adapts:
            write_adapter(self.adapter(), Path(path), files)
        else:
            self._call("save", Path(path).absolute(), files=dict(files))

    def snapshot(self) -> ClusterSnapshot:
        """Have every process store a copy of everything that training resumes from."""
        self.all_of("keep")
        return ClusterSnapshot(self)

    def resume(self, folder: Path | str) -> tuple[int, dict[str, Any]]:
        """Resume from the last complete checkpoint in `folder`, which every process must see."""
        found = last_checkpoint(Path(folder))
        self._call("resume", Path(folder).absolute())
        return found.step, found.state["run"]

    def first_of(self, method: str, *values: Any) -> Any:
        """Call a method of the first process."""
        return self._answers([getattr(self._processes[0], method).remote(*values)])

    def all_of(self, method: str, *values: Any) -> Any:
        """Call a method of all processes at once; return the first process's result."""
        return self._answers([getattr(process, method).remote(*values) for process in self._processes])

    def _call(self, method: str, *values: Any, **named: Any) -> Any:
        return self._answers([process.call.remote(method, *values, **named) for process in self._processes])

    def _answers(self, asked: Sequence[Any]) -> Any:
        if self._lost:
            raise TrainerLost(self._lost)
        waiting = list(asked)
        try:
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=1)
                ray.get(done)
            return ray.get(asked[0])
        except RayActorError as error:
            raise self._is_lost(error) from error
        except RayTaskError as error:  # a process whose peer ended fails too, and may report first
            for other in waiting:
                try:
                    ray.get(other, timeout=LOST_S)
                except RayActorError as ended:
                    raise self._is_lost(ended) from error
                except Exception:  # the first process's error is the one to raise
                    continue
            raise (error.cause if isinstance(error.cause, Exception) else error) from None

    def _is_lost(self, error: Exception) -> TrainerLost:
        self._lost = f"a training process has ended: {str(error).splitlines()[0]}"
        return TrainerLost(self._lost)

    @property
    def _opened(self) -> TrainerFacts:
        if self._facts is None:
            raise RuntimeError("the trainer is not open: use `async with`")
        return self._facts
