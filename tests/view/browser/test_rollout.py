"""One rollout: its segments, its tokens as in the store, and another rollout next to it."""

import re
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from agentgym.store.reader import RolloutStore, StoredRollout
from agentgym.types.rollout import SegmentKind
from tests.view.browser.conftest import Made, Open, Routes
from tests.view.browser.viewer import Watched, route_of, serving
from tests.view.made_runs import run_trained_in_part


def with_kind(store: RolloutStore, kind: SegmentKind, least: int = 1) -> StoredRollout:
    """Return a trained rollout with at least this many segments of that kind."""
    kinds = ((one, [segment.kind for segment in one.rollout.segments]) for one in store.find(phase="train"))
    return next(one for one, found in kinds if found.count(kind) >= least and one.advantages[0] is not None)


def drawn_tokens(page: Page) -> list[tuple[int, str]]:
    """Return the index and classes of every token on the page, in order."""
    found = page.locator(".tokens [data-i]").evaluate_all("all => all.map(t => [Number(t.dataset.i), t.className])")
    return [(int(index), str(classes)) for index, classes in found]


def test_a_rollout_with_compaction_shows_the_following_segment(viewer: Watched, routes: Routes, made: Made) -> None:
    with RolloutStore(made.compaction) as store:
        number = with_kind(store, "compaction").number
    page = viewer.open(f"#/{routes.compaction}/rollout/{number}")
    tree = page.get_by_role("navigation", name="Segments")
    expect(tree.get_by_role("link")).to_contain_text(["0 root", "1 compaction"])
    expect(page.get_by_text("Summarise.", exact=True).first).to_be_visible()
    tree.get_by_role("link", name="1 compaction").click()
    expect(page.locator(".segment-head")).to_contain_text("Segment 1: compaction of segment 0")
    assert "segment=1" in page.url


def test_a_rollout_with_forks_shows_the_tree_and_collapses_repeated_parts(
    viewer: Watched, routes: Routes, made: Made
) -> None:
    with RolloutStore(made.tree) as store:
        found = with_kind(store, "fork", least=2)
    page = viewer.open(f"#/{routes.tree}/rollout/{found.number}?segment=1")
    entries = page.get_by_role("navigation", name="Segments").get_by_role("link")
    expect(entries).to_contain_text([f"{s.index} {s.kind}" for s in found.rollout.segments])
    folded = page.locator(".folded")
    expect(folded).to_contain_text("messages as in segment 0")
    expect(folded.locator(".message")).to_have_count(0)
    folded.locator("summary").click()
    expect(folded.locator(".message").first).to_be_visible()
    page.keyboard.press("[")
    expect(page.locator(".goes-on").first).to_contain_text("Segment 1 forks here")


@pytest.mark.parametrize("kind", ["compaction", "fork"])
def test_the_highlighted_tokens_are_the_trained_ones(
    viewer: Watched, routes: Routes, made: Made, kind: SegmentKind
) -> None:
    folder, route = (made.compaction, routes.compaction) if kind == "compaction" else (made.tree, routes.tree)
    with RolloutStore(folder) as store:
        found = with_kind(store, kind)
    for segment, advantages in zip(found.rollout.segments, found.advantages, strict=True):
        page = viewer.open(f"#/{route}/rollout/{found.number}?view=tokens&segment={segment.index}")
        expect(page.locator(".tokens [data-i]")).to_have_count(len(segment.token_ids))
        tokens = drawn_tokens(page)
        assert [index for index, _ in tokens] == list(range(len(segment.token_ids)))
        trained = segment.sampled & bool(advantages)
        assert [" trained" in classes for _, classes in tokens] == trained.tolist()
        assert [" sampled" in classes for _, classes in tokens] == (segment.sampled & ~trained).tolist()


def test_tokens_of_an_evaluation_are_sampled_but_not_trained(viewer: Watched, routes: Routes, made: Made) -> None:
    with RolloutStore(made.grpo) as store:
        found = next(store.find(phase="eval_after"))
    page = viewer.open(f"#/{routes.grpo}/rollout/{found.number}?view=tokens")
    expect(page.locator(".tokens .sampled")).to_have_count(int(found.rollout.segments[0].sampled.sum()))
    expect(page.locator(".tokens .trained")).to_have_count(0)


def test_tokens_of_a_segment_trained_in_part_are_perhaps_trained(opened: Open, tmp_path: Path) -> None:
    folder = run_trained_in_part(tmp_path / "mine")
    with serving(folder) as address:
        viewer = opened(address)
        page = viewer.open(f"#/{route_of(viewer.page, folder)}/rollout/1?view=tokens")
        expect(page.locator(".tokens .sampled")).to_have_count(6)
        expect(page.locator(".tokens .trained")).to_have_count(0)
        page.locator(".tokens .sampled").first.hover()
        expect(page.locator(".token-tip")).to_contain_text("sampled, perhaps trained")


def test_the_tokens_text_is_what_the_model_read_and_wrote(viewer: Watched, routes: Routes, made: Made) -> None:
    with RolloutStore(made.grpo) as store:
        found = next(store.find(phase="train"))
    page = viewer.open(f"#/{routes.grpo}/rollout/{found.number}?view=tokens")
    text = page.locator(".tokens [data-i]").evaluate_all("all => all.map(t => t.textContent).join('')")
    assert found.rollout.segments[0].prompt_messages[0]["content"] in text.replace("↵", "")


def test_a_token_shows_its_log_probability_ratio_advantage_and_version(
    viewer: Watched, routes: Routes, made: Made
) -> None:
    with RolloutStore(made.grpo) as store:
        found = next(one for one in store.find(phase="train") if one.advantages[0])
    segment = found.rollout.segments[0]
    first = int(np.flatnonzero(segment.sampled)[0])
    page = viewer.open(f"#/{routes.grpo}/rollout/{found.number}?view=tokens&color=advantage")
    page.locator(f'.tokens [data-i="{first}"]').hover()
    said = page.locator(".token-tip").inner_text()
    assert f"id {segment.token_ids[first]}" in said
    assert "sampled, trained" in said
    for name in ("log-prob", "ratio", "advantage", "policy version"):
        assert name in said
    page.locator(f'.tokens [data-i="{first}"]').click()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token-tip")).to_contain_text(f"id {segment.token_ids[first + 1]}")


def test_the_coloring_of_tokens_is_chosen_by_button_and_kept_in_the_url(
    viewer: Watched, routes: Routes, made: Made
) -> None:
    with RolloutStore(made.grpo) as store:
        number = next(one.number for one in store.find(phase="train") if one.advantages[0])
    page = viewer.open(f"#/{routes.grpo}/rollout/{number}?view=tokens")
    page.get_by_role("button", name="Log-prob").click()
    expect(page.locator(".tokens .trained.measured").first).to_have_class(re.compile(r"\blp-\d\b"))
    assert "color=logprob" in page.url
    page.reload()
    expect(page.get_by_role("button", name="Log-prob")).to_have_attribute("aria-pressed", "true")


def test_no_label_on_a_groups_axis_is_cut_off(viewer: Watched, routes: Routes, made: Made) -> None:
    with RolloutStore(made.grpo) as store:
        one = next(iter(store.find(order="worst", phase="eval_before")))
    assert one.rollout.reward == 0  # it is the only one, so the axis is symmetric around 0
    page = viewer.open(f"#/{routes.grpo}/group?phase=eval_before&step={one.step}&task={one.rollout.group_id}")
    axis = page.locator("th.axis svg")
    expect(axis).to_be_visible()
    room = axis.bounding_box()
    assert room is not None
    for mark in axis.locator("text.tick").all():
        bounds = mark.bounding_box()
        assert bounds is not None
        assert room["x"] <= bounds["x"]
        assert bounds["x"] + bounds["width"] <= room["x"] + room["width"]


def test_two_rollouts_of_a_group_are_shown_side_by_side_with_their_first_difference(
    viewer: Watched, routes: Routes, made: Made
) -> None:
    with RolloutStore(made.grpo) as store:
        best = next(one for one in store.find(order="best", phase="train") if one.advantages[0])
    page = viewer.open(f"#/{routes.grpo}/rollout/{best.number}")
    page.keyboard.press("c")
    expect(page.get_by_role("heading", name="Two rollouts")).to_be_visible()
    expect(page.locator(".heads .panel")).to_have_count(2)
    expect(page.locator(".heads .panel").first).to_contain_text(best.rollout.rollout_id)
    page.keyboard.press("g")
    expect(page.get_by_role("heading", level=1, name=best.rollout.group_id)).to_be_visible()
    expect(page.locator("table.attempts tbody tr")).to_have_count(8)
    expect(page.locator("table.attempts line.baseline").first).to_be_attached()


def test_a_rollouts_time_is_drawn_as_a_waterfall(viewer: Watched, routes: Routes, made: Made) -> None:
    with RolloutStore(made.compaction) as store:
        found = with_kind(store, "compaction")
    turns = sum(len(segment.turns) for segment in found.rollout.segments)
    page = viewer.open(f"#/{routes.compaction}/rollout/{found.number}")
    page.keyboard.press("w")
    expect(page.locator(".waterfall")).to_contain_text("segment 0, turn 0")
    assert page.locator(".waterfall rect.span").count() > turns


def test_a_link_to_a_missing_rollout_says_so(viewer: Watched, routes: Routes) -> None:
    page = viewer.open(f"#/{routes.grpo}/rollout/999999")
    expect(page.locator(".empty")).to_contain_text("there is no rollout 999999")
    viewer.faults[:] = [fault for fault in viewer.faults if "404" not in fault]  # the browser itself logs the response
