"""The writing of a report: one HTML file, and its pictures beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentgym.errors import AgentGymError
from agentgym.report.charts import draw_charts
from agentgym.report.folders import kept_runs
from agentgym.report.lines import lines_of
from agentgym.report.page import page

PAGE = "report.html"
"""The file of a report that holds all of it."""
FRESH = f".{PAGE}-new"
"""The page while it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written, and of how much."""

    page: Path
    pictures: tuple[Path, ...]
    runs: int
    lines: int


def write_report(folders: Sequence[Path], out: Path | None, *, transcripts: int, version: str) -> Written:
    """Write the report on the runs and evaluations of these folders, also while they go on; return what was written.

    Without `out` it goes into `report` within the only folder that is named, or here. AgentGymError for a folder that
    is not there or holds no run, and for an `out` that holds other files.
    """
    runs = kept_runs(folders)
    lines = lines_of(runs)
    folder = out or (folders[0] / "report" if len(folders) == 1 else Path("report"))
    if out is None and folder.is_symlink():
        raise AgentGymError(f"--out: {folder} is a link, to {folder.readlink()}; remove it, or name a folder")
    _make(folder)
    charts = draw_charts(lines, folder)
    text = page(lines, charts, folder, transcripts=transcripts, version=version)
    fresh = folder / FRESH
    fresh.unlink(missing_ok=True)  # of a report that was killed, or a link that a stranger has put there
    with fresh.open("x", encoding="utf-8") as file:
        file.write(text)
    fresh.replace(folder / PAGE)
    pictures = tuple(folder / chart.file for chart in charts)
    return Written(page=folder / PAGE, pictures=pictures, runs=len(runs), lines=len(lines))


def _make(folder: Path) -> None:
    """Make the folder; what an earlier report drew there goes, and nothing else may be in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise AgentGymError(f"--out: {folder} cannot be made ({error.strerror}); name another folder") from error
    if there and PAGE not in there:
        raise AgentGymError(f"--out: {folder} holds {there[0]!r} and no {PAGE}; name a new folder, or that of a report")
    own = [folder / name for name in there if name in (PAGE, FRESH) or name.endswith(".png")]
    for path in own:
        if path.is_dir() and not path.is_symlink():
            raise AgentGymError(f"--out: {path} is a folder in the way of a report's file; remove it")
    for path in own:
        if path.suffix == ".png":
            path.unlink()
