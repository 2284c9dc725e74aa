"""The command `agentgym report`: writes plots and one HTML file on runs and evaluations."""

from pathlib import Path

import tyro

from agentgym.cli.output import flush, say
from agentgym.errors import AgentGymError
from agentgym.types.transcript import counted


def report(runs: tyro.conf.Positional[tuple[Path, ...]], output_dir: Path | None = None, transcripts: int = 2) -> int:
    """Write a report on runs and evaluations, finished or not: one HTML file, and its plots as PNG files.

    It has curves with the spread over seeds, the final metrics, the rollouts that were not trained on, failures,
    settings with the differences marked, and the best and the worst rollouts. Runs that differ only in their seed are
    one line. The file needs no other file and no network, and a model's output in it is always plain text.

    For example:
    $ agentgym report runs/chase_grpo/20260801-101500
    $ agentgym report runs/chase_grpo runs/chase_async --output-dir report
    $ agentgym report runs/eval-pointers/before runs/eval-pointers/after --transcripts 5

    Args:
        runs: Folders of runs or evaluations; for any other folder, those directly below it.
        output_dir: The folder for report.html and the plots; by default RUN/report, or ./report for several runs.
        transcripts: The maximum number of best and of worst rollouts for each line; 0 for none.
    """
    from agentgym.cli.doctor import installed
    from agentgym.errors.extras import DISTRIBUTION
    from agentgym.store.schema import StoreError
    from agentgym.view.report.page import write_report

    if not runs:
        raise AgentGymError("runs: name the folder of a run, such as runs/RECIPE/TIME")
    if transcripts < 0:
        raise AgentGymError(f"--transcripts: must not be negative, got {transcripts}")
    version = installed(DISTRIBUTION) or "of a checkout"
    try:
        written = write_report(runs, output_dir, transcripts=transcripts, version=version)
    except (StoreError, FileNotFoundError) as error:
        raise AgentGymError(f"runs: {error}") from error
    counts = [counted(written.runs, "run"), counted(written.lines, "line"), counted(len(written.pictures), "plot")]
    say(f"{written.page}: {counts[0]} in {counts[1]}, with {counts[2]} in the same folder")
    flush()
    return 0
