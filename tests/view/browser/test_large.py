"""Long rollouts: the number of rendered elements is bounded by the window, not by the rollout."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from agentgym.store.training_step import Trained
from agentgym.store.writer import RolloutWriter
from agentgym.types.completion import Version
from agentgym.types.messages import Message
from agentgym.types.rollout import Group, Rollout, Segment, Turn
from tests.view.browser.conftest import Open
from tests.view.browser.viewer import Watched, route_of, serving

TOKENS, TURNS = 200_000, 400
WORDS = [b" the", b" value", b"\n", b" of", b" key", b" is", b"42", b"."]


def long_segment() -> Segment:
    """Return a segment of turns that each have 300 sampled tokens, next to 200 tokens of context."""
    size = TOKENS // TURNS
    turns = tuple(
        Turn(
            start=number * size + 200,
            stop=(number + 1) * size,
            finish_reason="stop",
            versions=(Version(0, number // 100),),
            message=Message(role="assistant", content=f"said {number}"),
            env_messages=(Message(role="tool", content="done", name="python"),),
            number=number,
        )
        for number in range(TURNS)
    )
    sampled = np.arange(TOKENS) % size >= 200
    return Segment(
        index=0,
        parent=None,
        kind="root",
        token_ids=np.arange(TOKENS) % len(WORDS),
        sampled=sampled,
        logprobs=np.where(sampled, -0.3, 0.0),
        turns=turns,
        prompt_messages=(Message(role="user", content="go on"),),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large").resolve() / "long"
    rollout = Rollout(rollout_id="long/0", group_id="long", segments=(long_segment(),), reward=1.0, stop_reason="done")
    with RolloutWriter(folder, token_bytes=lambda model, ids: {number: WORDS[number] for number in ids}) as writer:
        writer.add([Group(group_id="long", rollouts=(rollout,))], step=0)
        logprobs = np.full(int(rollout.segments[0].sampled.sum()), -0.3, np.float32)
        writer.add_step(
            [Trained(rollout_id="long/0", segment=0, logprobs=logprobs, advantages=[0.5, -0.5] * (TURNS // 2))], step=0
        )
    return folder


@pytest.fixture(scope="module")
def large_address(folder: Path) -> Iterator[str]:
    with serving(folder) as printed:
        yield printed


@pytest.fixture
def large(opened: Open, large_address: str) -> Watched:
    return opened(large_address)


def drawn(page: Page) -> list[int]:
    """Return the indices of the tokens on the page."""
    found = page.locator(".tokens [data-i]").evaluate_all("all => all.map(t => Number(t.dataset.i))")
    return [int(index) for index in found]


def test_of_200_000_tokens_only_those_near_the_view_are_rendered(large: Watched, folder: Path) -> None:
    page = large.open(f"#/{route_of(large.page, folder)}/rollout/1?view=tokens&color=advantage")
    expect(page.locator('.tokens [data-i="0"]')).to_be_visible()
    assert 0 < len(drawn(page)) < 12_000
    page.evaluate("window.scrollTo(0, document.documentElement.scrollHeight)")
    page.wait_for_function('() => document.querySelector(\'.tokens [data-i="150000"], .tokens [data-i="199999"]\')')
    page.wait_for_function("() => !document.querySelector('.tokens [data-i=\"0\"]')")
    assert 0 < len(drawn(page)) < 12_000


def test_a_link_to_a_token_scrolls_it_into_view(large: Watched, folder: Path) -> None:
    page = large.open(f"#/{route_of(large.page, folder)}/rollout/1?view=tokens&at=123456")
    expect(page.locator('.tokens [data-i="123456"]')).to_be_in_viewport()
    expect(page.locator('.tokens [data-i="123456"]')).to_have_class("t trained chosen")
    expect(page.locator(".token-tip")).to_contain_text("123,456")


def test_clicking_the_map_of_a_segment_scrolls_there(large: Watched, folder: Path) -> None:
    page = large.open(f"#/{route_of(large.page, folder)}/rollout/1?view=tokens")
    strip = page.locator(".strip")
    bounds = strip.bounding_box()
    assert bounds is not None
    strip.click(position={"x": bounds["width"] * 0.75, "y": 6})
    chosen = page.locator(".tokens .chosen")
    expect(chosen).to_be_in_viewport()
    assert abs(int(chosen.get_attribute("data-i") or 0) - 150_000) < 2_000


def test_a_conversation_of_400_turns_shows_its_last_turn(large: Watched, folder: Path) -> None:
    page = large.open(f"#/{route_of(large.page, folder)}/rollout/1")
    expect(page.get_by_text("said 399", exact=True)).to_be_attached()
