"""The command `agentgym compare`: two evaluations beside each other."""

from pathlib import Path
from typing import Annotated

import tyro

from agentgym.cli.output import flush, say
from agentgym.errors import AgentGymError


def compare_runs(
    one: tyro.conf.Positional[Path],
    other: tyro.conf.Positional[Path],
    phase: tuple[str, ...] = ("after",),
    common: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    rows: int = 20,
) -> int:
    """Compare two evaluations of the same tasks: how much the rewards differ, and whether that could be chance.

    For example:
    $ agentgym compare runs/eval-pointers/before runs/eval-pointers/after
    $ agentgym compare runs/pointers/20260801-101500 runs/pointers/20260801-101500 --phase before after

    Args:
        one: The folder of an evaluation or of a training run, which holds rollouts.sqlite.
        other: The folder of the second one; a difference above 0 means that this one earned more.
        phase: Which evaluation of a training run is meant: after, before, or the number of steps done before it; or two
            of these, for the first and the second folder.
        common: Compare the tasks that both have played, even if one has played others too.
        rows: Lines of the table of the tasks that differ most.
    """
    from agentgym.evals.comparison import compare
    from agentgym.evals.report import comparison_lines

    try:
        found = compare(one, other, phase=phase, common=common)
    except ValueError as error:
        raise AgentGymError(str(error)) from error
    for line in comparison_lines(found, rows):
        say(line)
    flush()
    return 0
