"""Four processes as two copies of two shards train like four shards, on real processes: torchrun, gloo, FSDP2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgym.samples import build_samples
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.rollout import Group
from tests.torchrun import of_each_rank, run_on_ranks

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("replicas_script.py")
CONFIGS = {
    "lora": TrainConfig(
        lora_rank=4, lora_alpha=8, lr=1e-3, rollouts_per_minibatch=4, max_tokens_per_microbatch=48, device="cpu"
    ),
    "full": TrainConfig(method="full", lr=1e-3, rollouts_per_minibatch=4, kl_coef=0.1, device="cpu"),
}
FIGURES = ("loss", "grad_norm", "kl", "entropy", "lr", "trained_tokens", "optimizer_steps")


@pytest.fixture(scope="module")
def ranks(
    tiny_model: Path, groups_of: Callable[..., list[Group]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Any]]:
    out = tmp_path_factory.mktemp("replicas")
    batches = [list(build_samples(groups_of(seed))) for seed in (1, 2, 3)]
    run_on_ranks(SCRIPT, (tiny_model, CONFIGS, batches), out, ranks=4)
    return out, of_each_rank(out, 4)


def close(mine: tuple[Any, ...], theirs: tuple[Any, ...], *, steps: int) -> None:
    assert len(mine[0]) == steps
    for ours, others in zip(mine[0], theirs[0][-steps:], strict=True):
        for name in FIGURES:
            assert ours[f"train/{name}"] == pytest.approx(others[f"train/{name}"], rel=1e-3, abs=1e-6), name
    assert mine[1].keys() == theirs[1].keys()
    for name, weight in theirs[1].items():
        np.testing.assert_allclose(mine[1][name], weight, atol=5e-5, err_msg=name)


@pytest.mark.parametrize("method", CONFIGS)
def test_two_copies_of_two_shards_have_the_losses_and_weights_of_four_shards(
    ranks: tuple[Path, list[Any]], method: str
) -> None:
    for of_rank in ranks[1]:
        close(of_rank[method]["two"], of_rank[method]["one"], steps=3)
        np.testing.assert_equal(of_rank[method]["two"][1], ranks[1][0][method]["two"][1])


def test_a_rank_stores_twice_as_much_of_the_model_with_two_copies(ranks: tuple[Path, list[Any]]) -> None:
    for of_rank in ranks[1]:
        assert of_rank["full"]["two"][2] == pytest.approx(2 * of_rank["full"]["one"][2], rel=0.05)


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize(("here", "there"), [("one", "two"), ("two", "one")])
def test_a_checkpoint_of_shards_resumes_as_copies_and_vice_versa(
    ranks: tuple[Path, list[Any]], method: str, here: str, there: str
) -> None:
    for of_rank in ranks[1]:
        resumed = of_rank[method][f"{here} from {there}"]
        assert resumed[2] == (1, {"said": there})
        close(resumed, of_rank[method][here], steps=2)


def test_the_second_copy_writes_none_of_the_model_into_a_checkpoint(ranks: tuple[Path, list[Any]]) -> None:
    step = ranks[0] / "full" / "two" / "step-000001"
    sizes = [sum(file.stat().st_size for file in (step / f"rank-{rank}").glob("*.distcp")) for rank in range(4)]
    assert min(sizes[:2]) > 100_000
    assert sizes[2:] == [0, 0]


def test_an_indivisible_number_of_copies_is_refused_by_name(ranks: tuple[Path, list[Any]], tiny_model: Path) -> None:
    said = "replicas: 4 processes cannot be divided into 3 copies of the same size; set a divisor of 4"
    assert {of_rank[method]["refused"] for of_rank in ranks[1] for method in CONFIGS} == {said}
    with pytest.raises(ValueError, match=r"^replicas: 1 processes"), Trainer(tiny_model, TrainConfig(replicas=2)):
        pass
