"""The page's modules, each called by itself in the browser."""

import sys
import unicodedata
from typing import Any

import pytest

from tests.view.browser.viewer import Watched

INVISIBLE = {"Cc", "Cf", "Zl", "Zp"}
"""Categories of invisible characters and control characters."""
WRITTEN = {"\n", "\t"}


def call(viewer: Watched, module: str, name: str, *values: Any) -> Any:
    """Return the result of a function that a module exports."""
    source = f"async values => (await import(new URL('{module}', document.baseURI))).{name}(...values)"
    return viewer.page.evaluate(source, list(values))


def test_every_invisible_unicode_character_is_replaced_by_a_label(viewer: Watched) -> None:
    hidden = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in INVISIBLE]
    wanted = [one for one in hidden if one not in WRITTEN]
    assert len(wanted) > 200
    found = [call(viewer, "core/visible_text.js", "parts", f"a{''.join(f'{one}b' for one in wanted)}")]
    assert [part["text"] for part in found[0] if part["hidden"]] == wanted


def test_emoji_sequences_and_right_to_left_text_are_kept(viewer: Watched) -> None:
    for text in ("👩\u200d💻 ❤\ufe0f", "שלום عربي", "e\u0301 ñ 漢字", "a\tb\nc", "<b>&amp;"):
        assert call(viewer, "core/visible_text.js", "parts", text) == [{"text": text, "hidden": False}]


def test_a_title_spells_out_invisible_characters(viewer: Watched) -> None:
    said = call(viewer, "core/visible_text.js", "spelled", "a\u202eb\x1b[31mc\u200d")
    assert said == "a<RLO>b<ESC[31m>c<ZWJ>"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "\u2013"),
        (0, "0"),
        (0.12345, "0.1235"),
        (-2.5, "\u22122.5"),
        (1234567, "1.23e6"),
        (0.0000012, "1.20e\u22126"),
        (12345, "12,345"),
    ],
)
def test_metrics_are_short_and_show_their_magnitude(viewer: Watched, value: float | None, shown: str) -> None:
    assert call(viewer, "core/format.js", "metric", value) == shown


def test_an_address_survives_a_round_trip(viewer: Watched) -> None:
    made = call(viewer, "core/address.js", "link", ["run", "task"], {"task": "a/b c?&#%", "sort": "", "failed": True})
    assert call(viewer, "core/address.js", "parse", made) == {
        "path": ["run", "task"],
        "query": {"task": "a/b c?&#%", "failed": "1"},
    }


def row(step: int, **metrics: float) -> dict[str, Any]:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return {"step": step, "time": float(step), "held_out": "eval/reward" in named, "metrics": named}


@pytest.mark.parametrize(
    ("rows", "page", "words"),
    [
        (
            [row(s, rollouts__failed=3, rollouts__finished=7) for s in range(3)],
            "failures",
            "30% of the rollouts failed",
        ),
        (
            [row(s, samples__groups=8, samples__groups_without_signal=6, groups__solved_by_none=0.7) for s in range(3)],
            "tasks",
            "75% of the groups had no training signal recently, mostly because no attempt solves the task",
        ),
        (
            [row(s, tools__python__calls=10, tools__python__errors=5) for s in range(3)],
            "rollouts",
            "tool python failed",
        ),
        ([row(s, mismatch__mean=0.4, mismatch__ess=0.3) for s in range(3)], "rollouts", "0.4 nats apart"),
        (
            [row(s, stop__length=0.9) for s in range(3)],
            "rollouts",
            "90% of the rollouts recently ended at a limit (length)",
        ),
        ([row(s, train__entropy=1 / 4**s) for s in range(8)], "tasks", "entropy fell"),
        ([row(s, train__optimizer_steps=0) for s in range(6)], "tasks", "No optimizer step was taken"),
        (
            [row(0, eval__reward=0.2), *(row(s, reward=s / 6) for s in range(6)), row(6, eval__reward=0.2)],
            "rollouts",
            "not on held-out tasks",
        ),
    ],
)
def test_findings_explain_why_a_reward_does_not_rise(
    viewer: Watched, rows: list[dict[str, Any]], page: str, words: str
) -> None:
    found = call(viewer, "core/findings.js", "findings", rows)
    assert [one["page"] for one in found] == [page]
    assert words in found[0]["sentence"]


def test_a_healthy_run_has_no_findings(viewer: Watched) -> None:
    good = [
        row(
            step,
            reward=step / 10,
            rollouts__finished=64,
            rollouts__failed=0,
            samples__groups=8,
            samples__groups_without_signal=1,
            train__optimizer_steps=1,
            train__entropy=0.5,
            mismatch__mean=1e-6,
            mismatch__ess=1.0,
            stop__answer=1.0,
        )
        for step in range(6)
    ]
    assert call(viewer, "core/findings.js", "findings", good) == []


def test_smoothing_is_not_biased_to_the_start_and_thinning_keeps_peaks(viewer: Watched) -> None:
    level = [{"x": step, "y": 5.0, "step": step} for step in range(5)]
    assert [point["y"] for point in call(viewer, "charts/series.js", "smoothed", level, 0.9)] == pytest.approx(
        [5.0] * 5
    )
    source = """async () => {
      const { thinned } = await import(new URL("charts/series.js", document.baseURI));
      const all = Array.from({ length: 50000 }, (_, x) => ({ x, y: x === 31337 ? 9 : 0, step: x }));
      const kept = thinned(all, (x) => x / 100);
      return [kept.length, Math.max(...kept.map((point) => point.y))];
    }"""
    length, peak = viewer.page.evaluate(source)
    assert length < 1100
    assert peak == 9


@pytest.mark.parametrize(
    "values", [[0.3, 0.1 + 0.2], [1e308, -1e308], [1e308, 0.99e308], [5e-324, 0], [1e15, 1e15 + 1], [7], []]
)
def test_every_range_of_values_has_an_axis_with_a_few_labels(viewer: Watched, values: list[float]) -> None:
    low, high = call(viewer, "charts/scale.js", "extent", values)
    assert low < high
    assert all(low <= value <= high for value in values)
    found = call(viewer, "charts/scale.js", "ticks", [low, high], 4)
    assert 1 <= len(found) <= 5
    assert found == sorted(set(found))


def test_an_axis_with_nearly_equal_ends_has_a_label(viewer: Watched) -> None:
    assert call(viewer, "charts/scale.js", "ticks", [1, 1 + 2e-16], 4) == [1]
    assert call(viewer, "charts/scale.js", "ticks", [1e15, 1e15 + 0.25], 6) == [1e15]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["chase_grpo", "chase_tree"], ["chase_grpo", "chase_tree"]),
        (["chase_grpo_of_long_settings_seed_1", "chase_grpo_of_long_settings_seed_12"], ["…seed_1", "…seed_12"]),
        (["chase_grpo_of_long_settings", "chase_grpo_of_long_settings_2"], ["…long_settings", "…long_settings_2"]),
        (["chase_grpo_with_long_settings_seed_1"] * 2, ["chase_grpo_with_long_settings_seed_1"] * 2),
        (["a_long_name_that_is_alone_in_its_beginning", "b"], ["a_long_name_that_is_alone_in_its_beginning", "b"]),
        (["chase_grpo/20260801-101500", "chase_grpo/20260801-111500"], ["…20260801-101500", "…20260801-111500"]),
    ],
)
def test_the_common_part_of_long_run_names_is_cut(viewer: Watched, names: list[str], shown: list[str]) -> None:
    source = "async names => [...(await import(new URL('core/run_names.js', document.baseURI))).shortNames(names)]"
    found = dict(viewer.page.evaluate(source, names))
    assert [found[name] for name in names] == shown


def test_band_edges_must_be_finite(viewer: Watched) -> None:
    rows = [
        {"step": step, "time": step, "metrics": {"mean": mean, "std": 1e308}} for step, mean in enumerate((1e308, 5))
    ]
    found = call(viewer, "charts/series.js", "band", rows, "mean", "std", "step", True)
    assert found == [{"x": 1, "low": -1e308, "high": 1e308}]
