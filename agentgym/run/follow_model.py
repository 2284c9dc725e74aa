"""Settings of a run whose default depends on the model: the values found, and those that a resumed run started with."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentgym.engines.base import Engine
from agentgym.engines.transformers.engine import TransformersEngine
from agentgym.run.config import RunConfig
from agentgym.store.run_settings import FOLLOW_MODEL, begun_defaults, flat

if TYPE_CHECKING:  # torch is loaded when a run starts
    from agentgym.train.trainer import Trainer


def with_begun(run: RunConfig) -> RunConfig:
    """Return a resumed run with the values that it started with; return any other run unchanged.

    This concerns settings that are None and whose default depends on the model.
    """
    if run.resume is None:
        return run
    now = flat(run)
    for name, value in begun_defaults(run.resume).items():
        if name in now and now[name] is None:
            part, _, field = name.partition(".")
            run = replace(run, **{part: replace(getattr(run, part), **{field: value})})
    return run


def found_values(run: RunConfig, trainer: "Trainer", engine: Engine) -> dict[str, Any]:
    """Return the values of the run's settings whose default depends on the model, by the setting's name.

    Args:
        run: The run.
        trainer: Its open trainer.
        engine: Its open engine. The embedded engine has found values of its own.
    """
    found = flat(trainer.config, "train.")
    if isinstance(engine, TransformersEngine):
        found |= flat(engine.config, "engine.")
    now = flat(run)
    return {name: found[name] for name in FOLLOW_MODEL if name in found and name in now and now[name] is None}
