"""What an evaluation tells a script besides its scores: the exit status, and lines on stderr."""

import sys
from pathlib import Path

from agentgym.cli.flags import without_flags
from agentgym.evals.evaluation import Evaluation
from agentgym.files.names import command

INCOMPLETE = 3
"""The exit status if the scores are there, and too many rollouts have no reward or some could not be kept."""
FAILED_SHARE = 0.1
"""The largest share of rollouts without a reward with which the exit status is 0."""


def exit_status(evaluation: Evaluation, folder: Path) -> int:
    """Return the exit status of an evaluation, and say on stderr what is missing and how to get it.

    It is 0 if all but a tenth of the rollouts at most have a reward and all are kept, and else 3. An evaluation without
    any reward is an error, with the exit status 1.
    """
    many, failed = len(evaluation.rollouts), evaluation.failed
    again = resuming(folder)
    if evaluation.resumed == many:
        _say(f"nothing was played: all {many} rollouts are in {folder} already")
    if failed:
        _say(f"{failed} of {many} rollouts have no reward; this plays them again: {again} --retry-failed")
    if evaluation.not_kept:
        _say(f"{evaluation.not_kept} of {many} rollouts are not in {folder}; this plays them again: {again}")
    return INCOMPLETE if failed > FAILED_SHARE * many or evaluation.not_kept else 0


def resuming(folder: Path) -> str:
    """Return the command line that goes on with an evaluation: the one that was typed, with its folder."""
    words = sys.argv[1:] if sys.argv[1:2] == ["eval"] else ["eval", "..."]
    kept = without_flags(words, ("--output-dir",), switches=("--resume", "--retry-failed"))
    return command(*kept, "--output-dir", folder, "--resume")


def _say(line: str) -> None:
    sys.stderr.write(f"agentgym: {line}\n")
