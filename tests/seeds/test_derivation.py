"""The function from which all seeds come: no collisions, no correlation of neighbors, and the same everywhere."""

import random
import re
from enum import IntEnum, StrEnum
from itertools import combinations, product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from agentgym.seeds import VERSION, Purpose, seed_for

ROOT = Path(__file__).parents[2]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


@pytest.mark.parametrize("bits", [63, 31])
def test_ten_thousand_seeds_of_neighboring_uses_all_differ(bits: int) -> None:
    uses = list(product(PURPOSES, range(10), ["t0", "t1", "t10"], range(25)))[:10_000]
    assert len(uses) == 10_000
    seeds = {seed_for(*use, bits=bits) for use in uses}
    assert len(seeds) == len(uses)
    assert all(0 <= seed < 1 << bits for seed in seeds)


def test_every_bit_of_a_seed_is_set_half_of_the_time() -> None:
    seeds = [seed_for("turn", run, turn) for run in range(10) for turn in range(1000)]
    shares = [np.mean([seed >> bit & 1 for seed in seeds]) for bit in range(63)]
    assert max(abs(share - 0.5) for share in shares) < 4.5 * 0.5 / len(seeds) ** 0.5


def ranks(values: Any) -> Any:
    return np.argsort(np.argsort(values)).astype(float)


def rank_correlations(runs: Any, lags: range) -> Any:
    """Return Spearman's rank correlation for each pair of runs and each lag, in standard errors of independent runs."""
    found = []
    for (one, other), lag in product(combinations(runs, 2), lags):
        a, b = one[max(lag, 0) : len(one) + min(lag, 0)], other[max(-lag, 0) : len(other) - max(lag, 0)]
        found.append(np.corrcoef(ranks(a), ranks(b))[0, 1] * (len(a) - 1) ** 0.5)
    return np.array(found)


def draws(run: int, derived: Any) -> list[float]:
    """Return the first random number of each of the run's turns, over many batches of the same few tasks."""
    return [random.Random(derived(run, batch, task)).random() for batch in range(60) for task in range(5)]


def independent(found: Any) -> bool:
    """Return whether these look like independent runs: none is extreme, and their variance is 1."""
    return bool(np.abs(found).max() < 4.3 and abs(np.mean(found**2) - 1) < 4 * (2 / len(found)) ** 0.5)


LAGS = range(-10, 11)


def test_runs_of_ten_neighboring_seeds_are_independent_by_a_rank_test() -> None:
    runs = [draws(run, lambda *of: seed_for("turn", *of)) for run in range(10)]
    found = rank_correlations(runs, LAGS)
    assert len(found) == 45 * 21
    assert independent(found), (np.abs(found).max(), np.mean(found**2))


def test_the_rank_test_detects_runs_whose_seeds_are_sums() -> None:
    runs = [draws(run, lambda run, batch, task: 1000 * task + run + batch) for run in range(10)]
    assert not independent(rank_correlations(runs, LAGS))


def test_uses_with_different_parts_have_different_seeds() -> None:
    texts = ["a, b", "a', 'b", "a\", 'b", "a\\", "a\nb", "", "ab", "1", "1, 1", "\ud83d\ude00", "😀", "\\ud83d\\ude00"]
    uses: list[tuple[int | str, ...]] = [("a", "b"), ("a", "", "b"), ("a\\", "b"), (), (1,), (1, 1), (11,), (-1,)]
    uses += [(text,) for text in texts]
    assert len({seed_for("turn", *use) for use in uses}) == len(uses)
    assert len({seed_for(purpose, "a", 1) for purpose in PURPOSES}) == len(PURPOSES)


def test_numpy_integers_and_enums_count_as_their_plain_values() -> None:
    class Number(IntEnum):
        THREE = 3

    class Name(StrEnum):
        TRAIN = "train"

    int64: Any = np.int64(3)
    plain = seed_for("turn", 3, "train")
    assert seed_for("turn", int64, "train") == seed_for("turn", Number.THREE, Name.TRAIN) == plain
    for wrong in (1.0, None, b"a"):
        with pytest.raises((TypeError, AttributeError)):
            seed_for("turn", wrong)  # type: ignore[arg-type]


def test_a_seed_is_the_same_on_every_machine_and_in_every_release() -> None:
    found = seed_for("turn", 0, "chase-1/0", "", 0, 0), seed_for("env", 0, "é", bits=31)
    # A change here changes the draws of every run: raise VERSION, so that earlier runs are not resumed.
    assert (VERSION, *found) == (2, 130339638612190488, 1157811603)


def test_seeds_fit_the_generators_that_use_them() -> None:
    for number in range(100):
        random.Random(seed_for("turn", number))
        np.random.default_rng(seed_for("turn", number))
        np.random.RandomState(seed_for("env", number, bits=31))


def test_each_purpose_occurs_once_and_no_other_code_derives_seeds() -> None:
    files = [path for folder in ("agentgym", "envs", "recipes", "templates") for path in (ROOT / folder).rglob("*.py")]
    texts = {path: path.read_text() for path in files if not path.name.startswith("test_")}
    places = {
        purpose: [str(path) for path, text in texts.items() for _ in re.findall(rf'seed_for\(\s*"{purpose}"', text)]
        for purpose in PURPOSES
    }
    assert {purpose: len(found) for purpose, found in places.items()} == dict.fromkeys(PURPOSES, 1)
    arithmetic = re.compile(r"\bseed\b\s*(?:[+^*]|-\s)|[+^*]\s*(?:\w+\.)*_?seed\b|Random\(f[\"'][^\"']*seed")
    allowed = {"warm_start.py"}  # it trains the shipped checkpoints, with the seeds that they were trained with
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if arithmetic.search(line) and path.name not in allowed
    ]
    assert found == []
