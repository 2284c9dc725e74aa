"""The command `agentgym play`: a person, or a program behind a pipe, in the place of the model."""

import asyncio
import sys
from dataclasses import replace
from typing import Any

import tyro

from agentgym.cli.envs.names import NONE, Parameters, find, task_of
from agentgym.cli.output import say
from agentgym.environments.env import Env, Split
from agentgym.environments.mixture import member_of
from agentgym.transcript import outcome

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""
NO_LIMIT = 1 << 30
"""In place of a limit that is meant for a model: of seconds, and of tokens, which here are bytes."""


def play(
    env: tyro.conf.Positional[str],
    split: Split = "train",
    number: int = 0,
    task: str | None = None,
    seed: int = 0,
    parameters: Parameters = NONE,
) -> int:
    """Play an environment yourself: you read what the model would read, and write its turns.

    A line is a message. `/tool NAME KEY=VALUE ...`, or JSON with "name" and "arguments", calls a tool; `/help` says the
    rest. Turns count as those of a model; time and tokens are not limited. It ends with the rewards. Ctrl-D, Ctrl-C and
    `/quit` leave before; the rollout is not scored then. The turns may come through a pipe, a line each.
    --env.NAME VALUE sets a parameter of the environment.

    For example:
    $ agentgym play hello
    $ agentgym play hello --split test --number 3
    $ agentgym play tictactoe --env.opponent perfect
    $ printf '/tool python code=get(10)\\nAnswer: 20\\n' | agentgym play hello

    Args:
        env: A registered name, the folder of an env.py, module:Class, or path/env.py:Class.
        split: Where the task is from.
        number: The task's number in the split; the first is 0.
        task: The task's id, in place of its number.
        seed: The seed that the env gets.
    """
    from agentgym.cli.envs.player import Player, last_answer
    from agentgym.engines.base import Engine
    from agentgym.engines.scripted import Seeing
    from agentgym.rollouts.rollout import rollout
    from agentgym.tools.images import image_in

    cls = find(env, parameters)
    chosen = task_of(cls, split, number, task)
    player = Player()
    try:
        own = member_of(cls, chosen)
        engine: Engine = player if image_in(own, [chosen]) is None else Seeing(player)
        played = asyncio.run(rollout(_unlimited(own), chosen, engine, seed=seed))
    except KeyboardInterrupt:
        say("\nleft: the rollout was not scored")
        return INTERRUPTED
    if player.left:
        say(f"left: {player.left}")
        return 0 if sys.stdin.isatty() else 1
    for line in last_answer(played):
        say(line)
    worth = "failed" if played.reward is None else f"reward {played.reward:g}"
    say(f"{worth}, stopped by {played.stop_reason}")
    metrics = {name: value for name, value in played.metrics.items() if name != "seconds"}  # the player's own
    if result := outcome(played.rewards, metrics, played.failure, played.failed_cases, played.role_rewards):
        say(result)
    return 1 if played.reward is None else 0


def _unlimited(cls: type[Env[Any]]) -> type[Env[Any]]:
    """Return the env without the limits that are meant for a model; its turns are limited as they are."""
    limits = replace(
        cls.limits, seconds=NO_LIMIT, context_tokens=NO_LIMIT, turn_tokens=NO_LIMIT, tokens=None, retries=0
    )
    body: dict[str, Any] = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    made: type[Env[Any]] = type(cls.__name__, (cls,), {**body, "limits": limits})
    return made
