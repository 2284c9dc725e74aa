"""The parts of a run and their locations: this process, processes that torchrun started, or Ray."""

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.engines.base import Engine
from agentgym.environments.env import Env
from agentgym.errors.extras import needs_extra
from agentgym.run.collector import Collector
from agentgym.run.config import RunConfig
from agentgym.run.open_collector import open_collector

if TYPE_CHECKING:  # torch is loaded when a run starts, so that --help and an early Ctrl-C stay fast
    from agentgym.train.trainer import Trainer

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Parts(Protocol):
    """The trainer and the collectors of a run, each opened once."""

    def trainer(self) -> "AbstractAsyncContextManager[Trainer]":
        """Return a context manager that opens the trainer of the run's policy."""
        ...

    def collector(
        self,
        env: type[Env[Any]],
        trainer: "Trainer",
        progress: Callable[[str], None],
        tokenizer: ChatTokenizer | None,
        engine: Engine | None,
    ) -> AbstractAsyncContextManager[Collector]:
        """Return a context manager that opens the run's collector; `engine` replaces the run's engine."""
        ...

    def evaluator(
        self, env: type[Env[Any]], progress: Callable[[str], None]
    ) -> AbstractAsyncContextManager[Collector | None]:
        """Return a context manager that opens the collector for evaluations during training.

        It yields None if training waits for its evaluations.
        """
        ...

    def lost(self) -> dict[str, int]:
        """Return the counts so far of lost processes, their replacements, and lost rollouts; {} if not on a cluster."""
        ...


@dataclass(frozen=True, slots=True)
class LocalParts:
    """The parts of a run in this process, which torchrun may have started with others."""

    run: RunConfig

    def trainer(self) -> "AbstractAsyncContextManager[Trainer]":
        """Return the trainer, which isn't open yet."""
        with needs_extra():
            from agentgym.train.trainer import Trainer
        return Trainer(self.run.model, self.run.train, seed=self.run.seed)

    def collector(
        self,
        env: type[Env[Any]],
        trainer: "Trainer",
        progress: Callable[[str], None],
        tokenizer: ChatTokenizer | None,
        engine: Engine | None,
    ) -> AbstractAsyncContextManager[Collector]:
        """Open the run's engine, sandboxes, resources and model roles."""
        return open_collector(self.run, env, trainer, progress, tokenizer=tokenizer, engine=engine)

    def evaluator(
        self, env: type[Env[Any]], progress: Callable[[str], None]
    ) -> AbstractAsyncContextManager[Collector | None]:
        """Return a context manager that yields None: without a cluster, training waits for its evaluations."""
        return nullcontext()

    def lost(self) -> dict[str, int]:
        """Return {}, because the run ends if one of this process's parts is lost."""
        return {}
