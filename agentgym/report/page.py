"""The HTML of a report: one file without scripts, in which every text of a run is plain text."""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from agentgym.report.charts import Chart
from agentgym.report.figures import end_rows, score_rows, stop_rows, unlearned_rows
from agentgym.report.lines import Line
from agentgym.report.rollouts import FailureKind, Quoted, failed_in, failures, quoted
from agentgym.report.settings import SettingRow, setting_rows
from agentgym.transcript import counted, printable

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
"""The style of the page."""


def page(lines: Sequence[Line], charts: Sequence[Chart], folder: Path, *, transcripts: int, version: str) -> str:
    """Return the page; the pictures of `charts` are read from `folder` and stand within it."""
    parts = [
        f"<h1>{_text('Report on ' + counted(sum(len(line.runs) for line in lines), 'run'))}</h1>",
        f'<p class="said">{_text(f"Made by agentgym {version}.")}</p>',
        *_lines(lines),
        *_charts(charts, folder),
        *_section("Figures at the end", end_rows(lines), said="Mean ± standard deviation (lowest to highest)."),
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
    """The text as HTML that shows it and nothing else: marks, controls and half characters are escaped."""
    return escape(printable(text))


def _lines(lines: Sequence[Line]) -> Iterator[str]:
    rows = [["", "line", "seeds", "folder", "state"]]
    for line in lines:
        for place, run in enumerate(line.runs):
            head = [line.mark, line.name] if place == 0 else ["", ""]
            done, planned = len(run.steps), run.settings.get("steps")
            ended = "ended" if run.summary else f"not ended: {done} of {planned} steps" if run.steps else "not ended"
            rows.append([*head, str(run.settings.get("seed")), str(run.folder), ended])
    yield "<h2>Runs</h2>"
    yield '<p class="said">Runs that differ in nothing but their seed are one line.</p>'
    yield _table(rows)


def _charts(charts: Sequence[Chart], folder: Path) -> Iterator[str]:
    if charts:
        yield "<h2>Curves</h2>"
    for chart in charts:
        data = base64.b64encode((folder / chart.file).read_bytes()).decode()
        image = f'<img alt="{_text(chart.title)}" src="data:image/png;base64,{data}">'
        yield f"<figure>{image}<figcaption>{_text(chart.said)}</figcaption></figure>"


def _section(title: str, rows: Sequence[Sequence[str]], *, said: str) -> Iterator[str]:
    if rows:
        yield f"<h2>{_text(title)}</h2>"
        yield f'<p class="said">{_text(said)}</p>'
        yield _table(rows)


def _unlearned(lines: Sequence[Line]) -> Iterator[str]:
    yield from _section("What was not learned from", unlearned_rows(lines), said="Totals of all steps.")
    if rows := stop_rows(lines):
        yield '<p class="said">How rollouts ended, as shares of those with a reward, of all steps together.</p>'
        yield _table(rows)


def _failures(lines: Sequence[Line]) -> Iterator[str]:
    total = failed_in(lines)
    yield "<h2>Failures</h2>"
    yield f"<p>{_text(counted(total, 'rollout') + ' failed.' if total else 'No rollout failed.')}</p>"
    for line in lines:
        yield from map(_failure, failures(line))


def _failure(kind: FailureKind) -> str:
    return _folded(f"{kind.mark}, {kind.times} times: {kind.message}", kind.text)


def _settings(lines: Sequence[Line], title: str) -> Iterator[str]:
    if not lines:
        return
    rows = setting_rows(lines)
    differ, same = [row for row in rows if row.differs], [row for row in rows if not row.differs]
    yield f"<h2>{title}</h2>"
    if len(lines) > 1:
        said = "The lines differ in these settings; each is marked." if differ else "The lines differ in no setting."
        yield f'<p class="said">{_text(said)}</p>'
        yield _setting_table(lines, differ)
    yield f"<details{' open' if len(lines) == 1 else ''}><summary>{len(same)} settings of all lines</summary>"
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
