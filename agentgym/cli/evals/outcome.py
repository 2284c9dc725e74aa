"""What an evaluation reports to a script in addition to its scores: the exit status, and lines on stderr."""

import sys
from pathlib import Path

from agentgym.cli.flags import without_flags
from agentgym.evals.evaluation import Evaluation
from agentgym.files.names import command

INCOMPLETE = 3
"""Exit status if there are scores, but too many rollouts have no reward, or some could not be saved."""
FAILED_SHARE = 0.1
"""Maximum fraction of rollouts without a reward for exit status 0."""


def exit_status(evaluation: Evaluation, folder: Path) -> int:
    """Return the exit status of an evaluation, and print on stderr what is missing and how to get it.

    It is 0 if at most a tenth of the rollouts have no reward and all are saved, otherwise 3. An evaluation without
    any reward is an error, with exit status 1.
    """
    many, failed = len(evaluation.rollouts), evaluation.failed
    again = resuming(folder)
    if evaluation.resumed == many:
        _say(f"nothing to run: all {many} rollouts are already in {folder}")
    if failed:
        _say(f"{failed} of {many} rollouts have no reward; to run them again: {again} --retry-failed")
    if evaluation.not_kept:
        _say(f"{evaluation.not_kept} of {many} rollouts are not in {folder}; to run them again: {again}")
    return INCOMPLETE if failed > FAILED_SHARE * many or evaluation.not_kept else 0


def resuming(folder: Path) -> str:
    """Return the command line that resumes an evaluation: the one that was typed, with its folder."""
    words = sys.argv[1:] if sys.argv[1:2] == ["eval"] else ["eval", "..."]
    kept = without_flags(words, ("--output-dir",), switches=("--resume", "--retry-failed"))
    return command(*kept, "--output-dir", folder, "--resume")


def _say(line: str) -> None:
    sys.stderr.write(f"agentgym: {line}\n")
