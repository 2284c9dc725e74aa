"""The command `agentgym play`: a person, or a program through a pipe, takes the role of the model."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import tyro

from agentgym.cli.envs.names import NONE, Parameters, find, task_of
from agentgym.cli.output import say
from agentgym.environments.env import Env, Split
from agentgym.environments.mixture import member_of
from agentgym.environments.parameters import parameters as declared_parameters, variant
from agentgym.types.transcript import outcome, printable

if TYPE_CHECKING:
    from agentgym.cli.envs.player import Player

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""
NO_LIMIT = 1 << 30
"""Replaces limits that are meant for a model: on seconds, and on tokens, which are bytes here."""


def play(
    env: tyro.conf.Positional[str],
    split: Split = "train",
    number: int = 0,
    task: str | None = None,
    seed: int = 0,
    parameters: Parameters = NONE,
) -> int:
    """Play an environment yourself: read what a model would read, and write its turns.

    A line is a message. `/tool NAME KEY=VALUE ...`, or JSON with "name" and "arguments", calls a tool; `/help` lists
    the other commands and the tools. The number of turns is limited as for a model; time and tokens are not. At the
    end, the rewards are printed. Ctrl-D, Ctrl-C and `/quit` leave early, in which case the rollout is not scored. Turns
    can also come through a pipe, one per line.
    --env.NAME VALUE sets a parameter of the environment; the first lines of the output list the parameters.

    You play every conversation that the model would, including sub-agents and both sides of a self-play game: a line
    "--- conversation" says which one comes next, and its role. A game may have a parameter that lets a program play
    the other side.

    For example:
    $ agentgym play hello
    $ agentgym play hello --split test --number 3
    $ agentgym play tictactoe --env.opponent perfect
    $ printf '/tool python code=get(10)\\nAnswer: 20\\n' | agentgym play hello

    Args:
        env: A registered name, the folder of an env.py, module:Class, or path/env.py:Class.
        split: The split that the task is from.
        number: The task's number in the split, starting at 0.
        task: The task's id, instead of its number.
        seed: The seed of the rollout, from which the seeds of the env and of the models it queries are derived.
    """
    from agentgym.cli.envs.player import Player, last_answer
    from agentgym.engines.base import Engine
    from agentgym.engines.scripted import Seeing
    from agentgym.rollouts.rollout import rollout
    from agentgym.tools.images import image_in

    cls = find(env, parameters)
    chosen = task_of(cls, split, number, task)
    player, member = Player(), member_of(cls, chosen)
    for line in _parameter_lines(member):
        say(line)
    try:
        engine: Engine = player if image_in(member, [chosen]) is None else Seeing(player)
        played = asyncio.run(rollout(_unlimited(member, player), chosen, engine, seed=seed))
    except KeyboardInterrupt:
        say("\nended early: the rollout was not scored")
        return INTERRUPTED
    if player.left:
        say(f"ended early: {player.left}")
        return 0 if sys.stdin.isatty() else 1
    for line in last_answer(played):
        say(line)
    worth = "failed" if played.reward is None else f"reward {played.reward:g}"
    say(f"{worth}, stopped by {played.stop_reason}")
    metrics = {name: value for name, value in played.metrics.items() if name != "seconds"}  # the person's own time
    if result := outcome(played.rewards, metrics, played.failure, played.failed_cases, played.role_rewards):
        say(result)
    return 1 if played.reward is None else 0


def _parameter_lines(cls: type[Env[Any]]) -> Iterator[str]:
    """Yield a line for each parameter of the env: its flag, its value, and its description."""
    for name, parameter in declared_parameters(cls).items():
        about = f": {parameter.doc}" if parameter.doc else ""
        yield printable(f"--env.{name.replace('_', '-')} {parameter.value}{about}")


def _unlimited(cls: type[Env[Any]], player: "Player") -> type[Env[Any]]:
    """Return the env without the limits that are meant for a model; the limit on turns stays.

    The player is told the role of each conversation that the env opens.
    """
    limits = replace(
        cls.limits, seconds=NO_LIMIT, context_tokens=NO_LIMIT, turn_tokens=NO_LIMIT, tokens=None, retries=0
    )

    @asynccontextmanager
    async def fork(env: Env[Any], *given: Any, **named: Any) -> AsyncIterator[Any]:
        opened: Any = cls.fork(env, *given, **named)
        async with opened as agent:
            player.know_role(agent.conversation)
            yield agent

    return variant(cls, {"limits": limits, "fork": fork})
