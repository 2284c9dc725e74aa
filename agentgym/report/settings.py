"""The table of settings of a report: what the lines have otherwise, and what they share."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from agentgym.report.lines import OF_A_RUN, Line


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting: its name, its value in each line, and whether the lines differ in it."""

    name: str
    values: tuple[str, ...]
    differs: bool


def setting_rows(lines: Sequence[Line]) -> list[SettingRow]:
    """Return every setting of the lines, the files of their envs and their versions; those that differ first."""
    kept = [_settings(line) for line in lines]
    names = sorted({name for settings in kept for name in settings})
    rows = [_row(name, [settings.get(name, "") for settings in kept]) for name in names]
    return sorted(rows, key=lambda row: not row.differs)


def _row(name: str, values: Sequence[str]) -> SettingRow:
    return SettingRow(name, tuple(values), len(set(values)) > 1)


def _settings(line: Line) -> dict[str, str]:
    first = line.runs[0]
    found = {name: _text(value) for name, value in first.settings.items() if name not in OF_A_RUN}
    found["seed"] = ", ".join(_text(seed) for seed in line.seeds)
    found |= {f"files of {name}": sha[:12] for name, sha in first.envs.items()}
    packages = sorted({name for run in line.runs for name in run.versions})
    for name in packages:
        versions = dict.fromkeys(_text(run.versions.get(name)) for run in line.runs)
        found[f"version of {name}"] = ", ".join(versions)
    return found


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
