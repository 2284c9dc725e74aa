"""The JSON API of the page: each function serves one kind of URL from the runs' folders."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from agentgym.store.overview import TASK_SORTS, failure_kinds, group_advantages, reward_histogram, task_rows, visits
from agentgym.store.reader import RolloutStore
from agentgym.store.run_settings import versions
from agentgym.store.table import page, rows_of
from agentgym.store.texts import texts_of
from agentgym.view import asked
from agentgym.view.answers import Refused
from agentgym.view.asked import Query
from agentgym.view.metrics import GROUPS, metric_rows
from agentgym.view.rollout_page import env_of, rollout_page, table_row, token_window
from agentgym.view.runs import Run, Runs, env_texts
from agentgym.view.search.index import snippet
from agentgym.view.search.indexing import Indexing

MOST_TOKENS = 20_000
"""Largest number of tokens in one response."""
MOST_READ = 20_000_000
"""Characters that one response may scan for search snippets, which takes half a second."""
_KINDS = "SELECT DISTINCT kind FROM (SELECT kind FROM segments LIMIT 20000) ORDER BY 1"
"""SQL for the kinds of the first 20,000 segments, since scanning all segments would take too long."""
_ENDS = "SELECT min(step) AS first_step FROM rollouts UNION ALL SELECT max(step) FROM rollouts"
"""SQL for the first and the last step."""
NO_CHOICES: dict[str, list[Any]] = {"phases": [], "stop_reasons": [], "kinds": [], "steps_range": [None, None]}
"""The filter choices of a run without a store."""
T = TypeVar("T")


class Api:
    """Returns a JSON-compatible value for each kind of URL, or raises Refused with an explanation."""

    def __init__(self, runs: Runs, indexing: Indexing) -> None:
        self.runs, self.indexing, self.version = runs, indexing, versions()["agentgym"]
        self.of_runs: Mapping[str, Callable[[Run, Query], Any]] = {
            "": self.about_run,
            "metrics": metrics,
            "state": self.state,
            "rollouts": self.rollouts,
            "groups": group,
            "tasks": tasks,
            "task": task,
            "failures": failures,
            "reward-histogram": histogram,
        }
        self.of_rollouts: Mapping[str, Callable[[Run, int, Query], Any]] = {"": rollout, "tokens": tokens}

    def all_runs(self) -> dict[str, Any]:
        """Return a short summary of every run."""
        return {"runs": [self.in_short(run) for run in self.runs.all()], "version": self.version}

    def of_run(self, key: str, what: str, query: Query) -> Any:
        """Return the response to a URL of a run.

        Args:
            key: The run's key in URLs.
            what: The last part of the URL, such as "metrics"; "" for the run itself.
            query: The URL's parameters.

        Raises:
            Refused: If the run or the URL doesn't exist, or the request can't be fulfilled.
        """
        if what not in self.of_runs:
            raise Refused(
                f"the URL of a run cannot end in {what!r:.80}; it can end in {', '.join(filter(None, self.of_runs))}",
                404,
            )
        return self.of_runs[what](self.runs.get(key), query)

    def of_rollout(self, key: str, number: str, what: str, query: Query) -> Any:
        """Return the response to a URL of a rollout.

        Args:
            key: The run's key in URLs.
            number: The rollout's number, as written in the URL.
            what: The last part of the URL, "tokens"; "" for the rollout itself.
            query: The URL's parameters.

        Raises:
            Refused: If the run, the rollout or the URL doesn't exist, or the request can't be fulfilled.
        """
        run = self.runs.get(key)
        if not (number.isascii() and number.isdigit()) or len(number) > 18:
            raise Refused(f"rollout: expected a number such as 12, got {number!r:.80}", 404)
        if what not in self.of_rollouts:
            raise Refused(f"the URL of a rollout cannot end in {what!r:.80}; it can end in tokens", 404)
        return self.of_rollouts[what](run, int(number), query)

    def in_short(self, run: Run) -> dict[str, Any]:
        """Return a short summary of a run."""
        progress = self.runs.progress(run)
        (many, failed), steps = _counts(run), run.settings().get("max_steps")
        return {
            "run": run.key,
            "name": run.name,
            "folder": str(run.folder),
            "kind": run.kind,
            "env": dict(env_texts(run)),
            "begun": run.begun(),
            "live": run.is_live(),
            "steps_done": progress.steps,
            "steps": steps if isinstance(steps, int) else None,
            "rollouts": many,
            "failed": failed,
            "reward_last": progress.reward if run.kind == "train" else _score(run),
        }

    def about_run(self, run: Run, query: Query) -> dict[str, Any]:
        """Return everything known about a run except its metrics and rollouts."""
        return self.in_short(run) | {
            "settings": run.settings(),
            "versions": run.settings_file().get("versions") or {},
            "summary": run.summary(),
            "envs": _envs(run),
            "has_search": self.indexing.of(run) is not None,
            **_of_store(run, _choices, NO_CHOICES),
        }

    def state(self, run: Run, query: Query) -> dict[str, Any]:
        """Return the values that change while a run is active."""
        progress = self.runs.progress(run)
        return {
            "rollouts": _counts(run)[0],
            "lines": progress.lines,
            "live": run.is_live(),
            "indexed": self.indexing.indexed(run),
            "steps_done": progress.steps,
        }

    def rollouts(self, run: Run, query: Query) -> dict[str, Any]:
        """Return a page of the rollout table."""
        wanted, index, found, indexed = asked.text(query, "q"), self.indexing.of(run), None, None
        if wanted is not None:
            if index is None:
                raise Refused(f"q: this run cannot be searched now: {self.indexing.why(run)}", 409)
            indexed, found = index.indexed(), index.numbers(wanted)
        filters, (offset, limit) = asked.filters(query, found), asked.paging(query)
        sort, descending = asked.sorting(query)
        envs = _envs(run)
        # With a single env, its name filters nothing, and any other name matches no rollout.
        if len(envs) < 2 and filters.env is not None:
            filters = replace(filters, env=None, among=filters.among if filters.env in envs else [])
        with run.store() as store:
            total, rows = page(store, filters, sort=sort, descending=descending, offset=offset, limit=limit)
            shown = [table_row(row, envs) for row in rows]
            if wanted is not None:
                _add_snippets(store, shown, wanted)
        return {"total": total, "offset": offset, "rows": shown, "indexed": indexed}


def _add_snippets(store: RolloutStore, rows: list[dict[str, Any]], wanted: str) -> None:
    """Add a snippet around the search text to each of the first rows, until MOST_READ characters were scanned."""
    left = MOST_READ
    for row in rows:
        if left > 0:
            texts = texts_of(store, row["number"])
            left -= sum(map(len, texts))
            row["snippet"] = snippet(texts, wanted)


def metric_names() -> dict[str, Any]:
    """Return how metrics are grouped into charts."""
    return {"groups": [{"unit": "", **group} for group in GROUPS]}


def metrics(run: Run, query: Query) -> bytes:
    """Return the metrics that the page doesn't have yet, as JSON."""
    return metric_rows(run.folder, asked.whole(query, "after", 0), asked.maybe_whole(query, "mark")).as_json()


def rollout(run: Run, number: int, query: Query) -> dict[str, Any]:
    """Return one rollout without its tokens."""
    with run.store() as store:
        return rollout_page(store, number, _envs(run))


def tokens(run: Run, number: int, query: Query) -> dict[str, Any]:
    """Return a range of tokens of one segment."""
    place, start = asked.whole(query, "segment", 0), asked.whole(query, "from", 0)
    count = asked.whole(query, "count", 4000, least=1, most=MOST_TOKENS)
    with run.store() as store:
        return token_window(store, number, place, start, count)


def group(run: Run, query: Query) -> dict[str, Any]:
    """Return all rollouts of one task in one step."""
    filters, envs, name = asked.filters(query), _envs(run), _task(query)
    step = asked.maybe_whole(query, "step")
    if step is not None:
        filters = replace(filters, step_from=step, step_to=step)
    with run.store() as store:
        rows = rows_of(store, filters)
        gained = group_advantages(store, [row.summary.number for row in rows])
        fields = store.task(name)
    rewards = [row.summary.reward for row in rows if row.summary.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    spread = None if mean is None else math.hypot(*(reward - mean for reward in rewards)) / len(rewards) ** 0.5
    attempts = [table_row(row, envs) | {"advantage": gained.get(row.summary.number)} for row in rows]
    return {"attempts": attempts, "baseline": mean, "std": spread, "task_fields": fields}


def tasks(run: Run, query: Query) -> dict[str, Any]:
    """Return a page of the task table."""
    offset, limit = asked.paging(query)
    sort, descending = asked.sorting(query, TASK_SORTS, "task")
    phase, envs = asked.text(query, "phase"), _envs(run)
    with run.store() as store:
        total, rows = task_rows(store, phase=phase, sort=sort, descending=descending, offset=offset, limit=limit)
    return {"total": total, "offset": offset, "rows": [row | {"env": env_of(row["task"], envs)} for row in rows]}


def task(run: Run, query: Query) -> dict[str, Any]:
    """Return one task over the course of training."""
    name = _task(query)
    with run.store() as store:
        found, fields = visits(store, name), store.task(name)
    if not found:
        raise Refused(f"task: no rollout of this run has the task {name!r:.200}", 404)
    return {"task": name, "task_fields": fields, "visits": found}


def failures(run: Run, query: Query) -> dict[str, Any]:
    """Return the failed rollouts, grouped by their errors."""
    with run.store() as store:
        kinds, failed = failure_kinds(store), _both(store)[1]
    return {
        "failed": failed,
        "looked_at": sum(kind.count for kind in kinds),
        "groups": [
            asdict(kind.first)
            | {"count": kind.count, "steps": [kind.first_step, kind.last_step], "numbers": kind.numbers}
            for kind in kinds
        ],
    }


def histogram(run: Run, query: Query) -> dict[str, Any]:
    """Return the histogram of the rewards."""
    bins = asked.whole(query, "bins", 20, least=1, most=200)
    with run.store() as store:
        edges, counts = reward_histogram(store, asked.filters(query), bins)
    return {"edges": edges, "counts": counts}


def _task(query: Query) -> str:
    name = asked.text(query, "task")
    if name is None:
        raise Refused("task: missing; name the task")
    return name


def _of_store(run: Run, give: Callable[[RolloutStore], T], otherwise: T) -> T:
    """Return what `give` returns for the run's store, or `otherwise` if no store exists yet or it can't be read."""
    try:
        with run.store() as store:
            return give(store)
    except Refused as error:
        if error.status != 409:
            raise
        return otherwise


def _choices(store: RolloutStore) -> dict[str, list[Any]]:
    """Return the choices of the rollout filters."""
    return {
        "phases": store.phases(),
        "stop_reasons": [stop for (stop,) in store.query("SELECT DISTINCT stop_reason FROM rollouts ORDER BY 1")],
        "kinds": [kind for (kind,) in store.query(_KINDS)],
        "steps_range": [step for (step,) in store.query(_ENDS)],
    }


def _counts(run: Run) -> tuple[int, int]:
    """Return how many rollouts the run has, and how many of them failed."""
    return _of_store(run, _both, (0, 0))


def _score(run: Run) -> float | None:
    """Return the mean reward of an evaluation.

    If its summary has none, because it is still running or was rescored, the mean of its rollouts is returned.
    """
    said = (run.summary() or {}).get("reward")
    if isinstance(said, int | float):
        return said
    mean: float | None = _of_store(run, lambda store: store.query("SELECT avg(reward) FROM rollouts")[0][0], None)
    return mean


def _both(store: RolloutStore) -> tuple[int, int]:
    many = store.query("SELECT count(*) FROM rollouts")[0][0]
    return int(many), int(store.query("SELECT count(*) FROM rollouts WHERE reward IS NULL")[0][0])


def _envs(run: Run) -> list[str]:
    return list(env_texts(run))
