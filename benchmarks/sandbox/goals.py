"""The goals of `benchmarks.sandbox`: upper limits of results, and ratios to the speed of other ways."""

from benchmarks.harness import Goal, at_least, at_most
from benchmarks.sandbox.measure import (
    Figures,
)
from benchmarks.sandbox.sandboxes import AT_ONCE, SANDBOXES_AT_ONCE

LIMITS: dict[str, dict[str, float]] = {
    "bubblewrap": {
        "call_p50_ms": 0.12,
        "call_p99_ms": 5.0,
        "cpu_ms_per_call_1": 0.12,
        "reset_p50_ms": 2.5,
        "new_sandbox_p50_ms": 45.0,
        "pool_lease_p50_ms": 0.05,
        "fork_100mb_p50_ms": 6.0,
        "idle_sandbox_pss_mib": 20.0,
    },
    "docker": {
        "call_p50_ms": 0.2,
        "call_p99_ms": 5.0,
        "cpu_ms_per_call_8": 0.6,
        "reset_p50_ms": 3.0,
        "new_sandbox_p50_ms": 250.0,
        "pool_lease_p50_ms": 1.0,
        "fork_100mb_p50_ms": 7.0,
        "idle_sandbox_pss_mib": 20.0,
    },
}
"""Upper limits of results, by kind of sandbox."""
CALLS_PER_S, EPISODES_PER_S = 3500, 200
NAMES = {"docker_exec": "docker exec", "swerex": "SWE-ReX", "inspect": "inspect_ai"}
SAME = {"programs": 1.0, "new containers": 1.0}
TIMES: dict[str, dict[str, float]] = {
    "docker_exec": {"calls": 250.0, "episodes": 50.0, **SAME},
    "swerex": {"calls": 10.0, "sessions": 10.0, "episodes": 10.0, **SAME},
    "inspect": {"calls": 10.0, "episodes": 10.0, **SAME},
}
"""How many times as fast as each other way our containers should be, with as many at once on both sides."""
COMPARED = {
    "programs": ("ours_program_calls", ("program_calls",)),
    "sessions": ("ours_session_calls", ("session_calls",)),
    "new containers": ("ours_new_episodes", ("new_episodes",)),
    "calls": ("ours_session_calls", ("program_calls", "session_calls")),
    "episodes": ("ours_reset_episodes", ("new_episodes",)),
}
"""Our side of each comparison, and the other ways' sides, of which the fastest counts."""


def goals(figures: Figures) -> dict[str, Goal]:
    """Return all goals; one whose result was not measured, because something is missing here, has no verdict."""
    made: dict[str, Goal] = {}
    for kind, limits in LIMITS.items():
        for name, limit in limits.items():
            made[f"{kind}_{name}"] = at_most(figures.get(f"{kind}_{name}"), limit)
        made[f"{kind}_sandboxes_at_once"] = many_goal(figures, kind)
        for name in ("calls_per_s_8", "calls_per_s_32"):
            made[f"{kind}_{name}"] = at_least(figures.get(f"{kind}_{name}"), CALLS_PER_S)
        best = max(figures.get(f"{kind}_episodes_per_s_{count}", 0.0) for count in AT_ONCE)
        made[f"{kind}_episodes_per_s"] = at_least(best or None, EPISODES_PER_S)
    return made | {name: at_least(ratio, goal) for name, (ratio, goal) in ratios(figures).items()}


def many_goal(figures: Figures, kind: str) -> Goal:
    """Return the goal for the number of sandboxes open at once without a failure; smaller runs don't measure it."""
    goal = at_least(figures.get(f"{kind}_sandboxes_at_once"), SANDBOXES_AT_ONCE)
    if not goal["met"] and not figures.get(f"{kind}_sandboxes_at_once_failures"):
        goal["met"] = None
    return goal


def ratios(figures: Figures) -> dict[str, tuple[float | None, float]]:
    """Return our containers' rates over other ways', with as many at once on both sides, and their goals.

    A ratio is None if one side was not run.
    """
    made: dict[str, tuple[float | None, float]] = {}
    for means, wanted in TIMES.items():
        for work, goal in wanted.items():
            ours, theirs = COMPARED[work]
            for count in AT_ONCE:
                end = f"_per_s_{count}"
                ways = [figures[name] for way in theirs if (name := f"{means}_{way}{end}") in figures]
                ratio = figures[ours + end] / max(ways) if ways and ours + end in figures else None
                made[f"{work} over {NAMES[means]}, {count} at once"] = (ratio, goal)
    return made
