"""The parts of a run and where they are: in this process, in those that torchrun started, or on Ray."""

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

if TYPE_CHECKING:  # torch is loaded when a run begins: a command line asks for help, or is stopped, before
    from agentgym.train.trainer import Trainer

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Parts(Protocol):
    """What trains and what plays rollouts, each opened once."""

    def trainer(self) -> "AbstractAsyncContextManager[Trainer]":
        """Open what trains the run's policy."""
        ...

    def collector(
        self,
        env: type[Env[Any]],
        trainer: "Trainer",
        progress: Callable[[str], None],
        tokenizer: ChatTokenizer | None,
        engine: Engine | None,
    ) -> AbstractAsyncContextManager[Collector]:
        """Open what plays the run's rollouts; `engine` takes the place of the one that the run names."""
        ...

    def evaluator(
        self, env: type[Env[Any]], progress: Callable[[str], None]
    ) -> AbstractAsyncContextManager[Collector | None]:
        """Open what plays evaluations while training goes on; None where the run has nothing for it."""
        ...

    def lost(self) -> dict[str, int]:
        """Return the counts of what the run has lost so far; none where it is on no cluster."""
        ...


@dataclass(frozen=True, slots=True)
class LocalParts:
    """The parts of a run in this process, which torchrun may have started with others."""

    run: RunConfig

    def trainer(self) -> "AbstractAsyncContextManager[Trainer]":
        """Return the trainer, not open yet."""
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
        """Open the engine, the sandboxes, the resources and the model roles of the run."""
        return open_collector(self.run, env, trainer, progress, tokenizer=tokenizer, engine=engine)

    def evaluator(
        self, env: type[Env[Any]], progress: Callable[[str], None]
    ) -> AbstractAsyncContextManager[Collector | None]:
        """Return nothing: without a cluster training waits for its evaluations."""
        return nullcontext()

    def lost(self) -> dict[str, int]:
        """Return nothing: what this process loses ends the run."""
        return {}
