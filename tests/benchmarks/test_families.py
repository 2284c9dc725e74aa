"""The families benchmark, reduced: one family for each kind of layer is right in every layout."""

import pytest

from benchmarks.families.comparison import LAYOUTS, Cell, compare_families, compare_sharded, rows
from tests.support.model_families import FAMILIES, FAMILIES_SHARDED

ONE_OF_EACH = {
    "llama": "rotary positions",
    "gemma3": "windows in a wrapper for images",
    "vaultgemma": "capped scores and logits",
    "gpt_oss": "sinks, windows and experts",
    "qwen3_5_text": "linear attention",
    "deepseek_v3": "latent attention",
    "phi3, longrope": "frequencies that depend on the length",
    "cohere": "scaled logits",
    "llama4_text": "chunks",
    "rwkv": "a state, and no mask of padding",
    "stablelm": "attention that is not said to use the interface",
}
"""Families by the kind of layer that they represent."""
REFUSED = {("phi3, longrope", "tree")}


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_family_is_right_in_every_layout_or_refused_before_training(name: str) -> None:
    cells = compare_families([name])[name]
    kinds = {layout: cell.kind for layout, cell in cells.items()}
    assert kinds == {layout: "refused" if (name, layout) in REFUSED else "right" for layout in LAYOUTS}, cells
    assert all("use layout packed" in cell.said for cell in cells.values() if cell.kind == "refused")


@pytest.mark.slow
@pytest.mark.proof
def test_every_listed_family_is_right_in_padded_and_wrong_in_no_layout() -> None:
    table = compare_families(sorted(FAMILIES))
    found = [cell.kind for cells in table.values() for cell in cells.values()]
    assert len(table) >= 40
    assert {cells["padded"].kind for cells in table.values()} == {"right"}, "\n".join(rows(table))
    assert not {"wrong", "error"} & set(found), "\n".join(rows(table))
    assert found.count("right") / len(found) >= 0.75


@pytest.mark.slow
def test_two_ranks_that_shard_a_family_have_the_same_gradient_as_one() -> None:
    table = dict(compare_sharded(FAMILIES_SHARDED))
    assert len(table) >= 12
    assert not {cell.kind for cells in table.values() for cell in cells.values()} & {"wrong", "error"}, table
    assert {cells["padded"].kind for cells in table.values()} == {"right"}, table


def test_the_table_says_why_a_cell_failed() -> None:
    cells = {"padded": Cell(kind="right", said="0"), "tree": Cell(kind="refused", said="use layout packed")}
    assert list(rows({"one": cells}))[-2:] == ["| one | right | refused |", "one, tree: refused: use layout packed"]
