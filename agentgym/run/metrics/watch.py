"""Warnings during a run, each with its cause."""

from collections.abc import Callable, Mapping
from statistics import fmean

from agentgym.rollouts.rollout_warnings import ToolUse
from agentgym.run.callbacks import Callback
from agentgym.run.metrics.batch import tool_counts
from agentgym.run.metrics.health import Rows, collapsed, signs, slower
from agentgym.scheduling.accounting import Groups
from agentgym.store.tool_counts import ToolCounts

NO_SIGNAL = 5
"""Number of consecutive batches without a signal, or without an optimizer step, after which the run warns."""
LEAST_CALLS = 20
"""Minimum number of calls to a tool before its share of errors is checked."""


class Watch(Callback):
    """Checks the metrics of each step, and warns once about each problem."""

    def __init__(self, alert: Callable[[str], None], rows: Rows = ()) -> None:
        """Create the watch.

        Args:
            alert: Prints a warning.
            rows: The metrics of the steps before a resume.
        """
        self._alert = alert
        self._rows, self._resumed = list(rows), len(rows)
        self._silent = self._idle = self._unbranched = 0
        self._counts, self._use = ToolCounts(), ToolUse()
        self._unsolved: list[float] = []
        self._lost = 0.0
        self._said: set[str] = set()

    def on_step(self, step: int, groups: Groups, metrics: Mapping[str, float]) -> None:
        self._rows.append(metrics)
        causes = {
            **signs(self._rows, resumed=self._resumed),
            **self._no_signal(metrics),
            **self._tools(metrics),
            **self._servers(metrics),
        }
        causes |= {**self._no_branch(metrics), **self._no_call(groups, metrics)}
        for key, said in causes.items():
            if key not in self._said:
                self._said.add(key)
                self._alert(said)

    def _no_signal(self, metrics: Mapping[str, float]) -> dict[str, str]:
        groups = metrics.get("samples/groups")
        none = groups is not None and metrics.get("samples/groups_without_signal") == groups
        self._silent = self._silent + 1 if none else 0
        idle = not none and metrics.get("train/optimizer_steps") == 0
        self._idle = self._idle + 1 if idle else 0
        said = {}
        if self._silent >= NO_SIGNAL:
            solved = metrics.get("groups/solved_by_all", 0.0)
            why = "all tasks are solved" if solved == 1 else "all rollouts of each task have the same reward"
            then = "use other tasks, more rollouts per task (group_size), or a higher train.temperature"
            if solved < 1 and collapsed(self._rows):
                why += ", and the policy has got worse"
                then = f"use a lower train.lr{slower(self._rows, self._resumed)}"
            said["signal"] = f"No group had a signal in the last {NO_SIGNAL} batches: {why}; {then}."
        if self._idle >= NO_SIGNAL:
            said["idle"] = (
                f"No optimizer step was taken in the last {NO_SIGNAL} batches, although rewards differ: in the last "
                f"one, {metrics.get('train/skipped_steps', 0.0):g} step(s) were skipped for a non-finite gradient "
                f"and {metrics.get('train/untrained_steps', 0.0):g} had no tokens to train on."
            )
        return said

    def _no_branch(self, metrics: Mapping[str, float]) -> dict[str, str]:
        none = metrics.get("rollout/branches") == 0
        self._unbranched = self._unbranched + 1 if none else 0
        if self._unbranched < NO_SIGNAL:
            return {}
        return {
            "branches": (
                f"No branch was run in the last {NO_SIGNAL} batches, so credit is the same as with outcome: "
                "branching.after and branching.every select no state; set a smaller branching.every, or "
                "another branching.after."
            )
        }

    def _tools(self, metrics: Mapping[str, float]) -> dict[str, str]:
        self._counts.add(tool_counts(metrics))
        return {
            f"tool {name}": (
                f"The tool {name!r} has failed in {errors} of {calls} calls; `agentgym show FOLDER --suspicious` "
                "shows some of them."
            )
            for name, (errors, calls) in self._counts.failing(least_calls=LEAST_CALLS).items()
        }

    def _no_call(self, groups: Groups, metrics: Mapping[str, float]) -> dict[str, str]:
        if self._use.calls:
            return {}
        self._use.add(groups.rollouts)
        if (unsolved := metrics.get("groups/solved_by_none")) is not None:
            self._unsolved.append(unsolved)
        said = self._use.warning()
        # Tasks that are solved without a call don't need the tools.
        if said is None or len(self._unsolved) < NO_SIGNAL or fmean(self._unsolved) <= 0.5:
            return {}
        return {"calls": said}

    def _servers(self, metrics: Mapping[str, float]) -> dict[str, str]:
        lost = metrics.get("engine/lost_servers", 0.0)
        grew, self._lost = lost > self._lost, lost
        if not grew:
            return {}
        return {f"lost {lost:g}": f"The engine has lost {lost:g} server(s) so far; see its log for the reason."}
