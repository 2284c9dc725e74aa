"""The HTML of a report: one file without scripts, in which all text from a run is escaped."""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from agentgym.errors import AgentGymError
from agentgym.files.disk import write_whole
from agentgym.types.transcript import counted, printable
from agentgym.view.report.folders import kept_runs
from agentgym.view.report.lines import Line, lines_of
from agentgym.view.report.metrics import SettingRow, end_rows, score_rows, setting_rows, stop_rows, unlearned_rows
from agentgym.view.report.plots import Chart, draw_charts
from agentgym.view.report.rollouts import Quoted, failed_in, failures, quoted

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 0.9rem; }
th, td { border: 1px solid #8886; padding: 0.25rem 0.6rem; text-align: left; vertical-align: top; }
tr.differs th { border-left: 4px solid #d55e00; }
figure { display: inline-block; margin: 0.5rem 0.5rem 1rem 0; max-width: 34rem; vertical-align: top; }
img { max-width: 100%; background: white; }
figcaption, .said { font-size: 0.85rem; opacity: 0.8; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #8886; padding: 0.6rem; font-size: 0.8rem; }
summary { cursor: pointer; overflow-wrap: anywhere; }
"""
"""The CSS of the page."""
PAGE = "report.html"
"""Name of the file that contains the whole report."""


def page(lines: Sequence[Line], charts: Sequence[Chart], *, transcripts: int, version: str) -> str:
    """Return the page, with the charts' pictures embedded."""
    parts = [
        f"<h1>{_text('Report on ' + counted(sum(len(line.runs) for line in lines), 'run'))}</h1>",
        f'<p class="said">{_text(f"Made by agentgym {version}.")}</p>',
        *_lines(lines),
        *_charts(charts),
        *_section("Metrics at the end", end_rows(lines), said="Mean ± standard deviation (lowest to highest)."),
        *_section("Evaluations", score_rows(lines), said="Mean ± standard deviation (lowest to highest)."),
        *_unlearned(lines),
        *_failures(lines),
        *_settings([line for line in lines if line.is_training], "Settings"),
        *_settings([line for line in lines if not line.is_training], "Settings of evaluations"),
        *_transcripts(lines, transcripts),
    ]
    return _whole("\n".join(parts))


def _whole(body: str) -> str:
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width">\n<title>Report</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    """Return HTML that shows the text literally; markup, control characters and lone surrogates are escaped."""
    return escape(printable(text))


def _lines(lines: Sequence[Line]) -> Iterator[str]:
    rows = [["", "line", "seeds", "folder", "state"]]
    for line in lines:
        for place, run in enumerate(line.runs):
            head = [line.mark, line.name] if place == 0 else ["", ""]
            done, planned = len(run.steps), run.settings.get("max_steps")
            ended = "ended" if run.summary else f"not ended: {done} of {planned} steps" if run.steps else "not ended"
            rows.append([*head, str(run.settings.get("seed")), str(run.folder), ended])
    yield "<h2>Runs</h2>"
    yield '<p class="said">Runs that differ only in their seed form one line.</p>'
    yield _table(rows)


def _charts(charts: Sequence[Chart]) -> Iterator[str]:
    if charts:
        yield "<h2>Curves</h2>"
    for chart in charts:
        data = base64.b64encode(chart.png).decode()
        image = f'<img alt="{_text(chart.title)}" src="data:image/png;base64,{data}">'
        yield f"<figure>{image}<figcaption>{_text(chart.said)}</figcaption></figure>"


def _section(title: str, rows: Sequence[Sequence[str]], *, said: str) -> Iterator[str]:
    if rows:
        yield f"<h2>{_text(title)}</h2>"
        yield f'<p class="said">{_text(said)}</p>'
        yield _table(rows)


def _unlearned(lines: Sequence[Line]) -> Iterator[str]:
    yield from _section("Not trained on", unlearned_rows(lines), said="Totals over all steps.")
    if rows := stop_rows(lines):
        yield '<p class="said">How rollouts ended, as shares of all scored rollouts over all steps.</p>'
        yield _table(rows)


def _failures(lines: Sequence[Line]) -> Iterator[str]:
    total = failed_in(lines)
    yield "<h2>Failures</h2>"
    yield f"<p>{_text(counted(total, 'rollout') + ' failed.' if total else 'No rollout failed.')}</p>"
    for line in lines:
        yield from (_folded(one.title, one.text) for one in failures(line))


def _settings(lines: Sequence[Line], title: str) -> Iterator[str]:
    if not lines:
        return
    rows = setting_rows(lines)
    differ, same = [row for row in rows if row.differs], [row for row in rows if not row.differs]
    yield f"<h2>{title}</h2>"
    if len(lines) > 1:
        said = (
            "The lines differ in these settings, each marked with ≠." if differ else "All lines have the same settings."
        )
        yield f'<p class="said">{_text(said)}</p>'
        yield _setting_table(lines, differ)
    yield f"<details{' open' if len(lines) == 1 else ''}><summary>{len(same)} settings shared by all lines</summary>"
    yield _setting_table(lines[:1], same)
    yield "</details>"


def _setting_table(lines: Sequence[Line], rows: Sequence[SettingRow]) -> str:
    head = "".join(f'<th scope="col">{_text(line.mark)}</th>' for line in lines)
    body = "".join(_setting(row, len(lines)) for row in rows)
    return f'<table><tr><th scope="col">setting</th>{head}</tr>{body}</table>'


def _setting(row: SettingRow, count: int) -> str:
    mark, name = (' class="differs"', f"{row.name} ≠") if row.differs else ("", row.name)
    cells = "".join(f"<td>{_text(value)}</td>" for value in row.values[:count])
    return f'<tr{mark}><th scope="row">{_text(name)}</th>{cells}</tr>'


def _transcripts(lines: Sequence[Line], count: int) -> Iterator[str]:
    if not count:
        return
    for title, order in (("Best rollouts", "best"), ("Worst rollouts", "worst")):
        found: list[Quoted] = [one for line in lines for one in quoted(line, order, count)]  # type: ignore[arg-type]
        if found:
            yield f"<h2>{title}</h2>"
        yield from (_folded(one.title, one.text) for one in found)


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{_text(title)}</summary><pre>{_text(text)}</pre></details>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    heads = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in head)
    lines = ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in body]
    return f"<table><tr>{heads}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The files of a written report, and how many runs and lines it covers."""

    page: Path
    pictures: tuple[Path, ...]
    runs: int
    lines: int


def write_report(folders: Sequence[Path], output_dir: Path | None, *, transcripts: int, version: str) -> Written:
    """Write the report on the runs and evaluations in these folders, which may still be active.

    Args:
        folders: Folders of runs or evaluations, or folders that contain such folders.
        output_dir: Where to write it. None means `report` in the folder if only one is given, otherwise in the
            working directory.
        transcripts: How many of the best and of the worst rollouts of each line to quote.
        version: The version of agentgym to name in the report.

    Returns:
        The files written, and how many runs and lines they cover.

    Raises:
        AgentGymError: If a folder doesn't exist or has no run, or if the output folder has other files.
    """
    runs = kept_runs(folders)
    lines = lines_of(runs)
    folder = output_dir or (folders[0] / "report" if len(folders) == 1 else Path("report"))
    if output_dir is None and folder.is_symlink():
        raise AgentGymError(
            f"--output-dir: {folder} is a symbolic link to {folder.readlink()}; remove it, or name a folder"
        )
    _make(folder)
    charts = draw_charts(lines)
    write_whole(folder / PAGE, page(lines, charts, transcripts=transcripts, version=version))
    pictures = {folder / chart.file: chart.png for chart in charts}
    for path, png in pictures.items():
        write_whole(path, png)
    for path in set(folder.glob("*.png")).difference(pictures):
        path.unlink(missing_ok=True)  # of an earlier report
    return Written(page=folder / PAGE, pictures=tuple(pictures), runs=len(runs), lines=len(lines))


def _make(folder: Path) -> None:
    """Create the folder; if it contains anything, it must be the folder of an earlier report, maybe a killed one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise AgentGymError(
            f"--output-dir: {folder} cannot be created ({error.strerror}); name another folder"
        ) from error
    if there and not any(name == PAGE or name.startswith(f".{PAGE}-") for name in there):
        raise AgentGymError(
            f"--output-dir: {folder} has {there[0]!r} but no {PAGE}; name a new folder, or the folder of a report"
        )
    for path in [folder / name for name in there if name == PAGE or name.endswith(".png")]:
        if path.is_dir() and not path.is_symlink():
            raise AgentGymError(
                f"--output-dir: {path} is a folder, but the report needs to write a file there; remove it"
            )
