"""Every trainer option on one process and on two: its effect, and that it changes nothing else."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgym.engines.transformers.lora import Merger
from agentgym.samples import build_samples
from agentgym.train.config import learning_rate
from agentgym.train.loss.losses import LossSums
from agentgym.train.loss.metrics import Forward
from agentgym.train.loss.nonfinite import SHOWN, nonfinite_rollouts
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Group
from agentgym.types.sample import Sample
from tests.torchrun import of_each_rank, run_on_ranks
from tests.train.options_script import metrics

Groups = Callable[..., list[Group]]
SCRIPT = Path(__file__).with_name("options_script.py")
IDS = [3, 1, 4, 1, 5, 9, 2, 6]

PLAIN = TrainConfig(lora_rank=4, lora_alpha=8, lr=1e-3, warmup_steps=0, max_tokens_per_microbatch=60, device="cpu")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "rslora": {"rslora": True, "lora_targets": ("q_proj", "down_proj")},
    "dora": {"dora": True, "loss": "cispo", "kl_coef": 0.5, "kl_estimator": "k2"},
    "gspo_rollout": {"loss": "gspo_rollout", "clip_eps_low": 0.01, "clip_eps_high": 0.01, "kl_coef": 0.5},
    "bfloat16": {"dtype": "bfloat16", "shard": True},
}


def not_finite(row: Sample) -> Sample:
    return replace(row, advantages=np.where(row.loss_mask, 3e38, 0))  # finite, but its loss is not


@pytest.fixture(scope="module")
def batches(groups_of: Groups) -> list[list[Sample]]:
    return [list(build_samples(groups_of(7))), list(build_samples(groups_of(8)))]


@pytest.fixture(scope="module")
def runs(tiny_model: Path, batches: list[list[Sample]]) -> dict[str, tuple[Path, TrainConfig, list[list[Sample]]]]:
    first, *rest = batches[0]
    found = {name: (tiny_model, replace(PLAIN, **change), batches) for name, change in OPTIONS.items()}
    return found | {
        "no model": (tiny_model / "nowhere", PLAIN, batches),
        "not finite": (tiny_model, PLAIN, [[not_finite(first), *rest], batches[1]]),
    }


@pytest.fixture(scope="module")
def two(runs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return each of two ranks' results of every run."""
    out = tmp_path_factory.mktemp("options")
    run_on_ranks(SCRIPT, runs, out)
    return of_each_rank(out)


def assert_same(mine: dict[str, Any], theirs: dict[str, Any], *, rel: float, atol: float) -> None:
    for one, other in zip(mine["stats"], theirs["stats"], strict=True):
        assert one["train/optimizer_steps"] == 1
        for name in ("loss", "grad_norm", "reference_kl"):
            assert one.get(f"train/{name}", 0) == pytest.approx(other.get(f"train/{name}", 0), rel=rel, abs=1e-6), name
    assert mine["tensors"].keys() == theirs["tensors"].keys()
    for name, tensor in mine["tensors"].items():
        np.testing.assert_allclose(tensor, theirs["tensors"][name], atol=atol, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_two_ranks_train_like_one_under_every_option(
    runs: dict[str, Any], two: list[dict[str, Any]], name: str
) -> None:
    alone = metrics(*runs[name])
    coarse = name == "bfloat16"  # sums round differently, and Adam turns every sign into a step
    for rank in two:
        assert_same(rank[name], alone, rel=0.05 if coarse else 1e-4, atol=2.1e-3 if coarse else 5e-5)
        np.testing.assert_allclose(rank[name]["scores"], alone["scores"], atol=0.1 if coarse else 1e-4)


@pytest.mark.slow
def test_a_model_that_the_first_rank_cannot_load_is_refused_on_all(two: list[dict[str, Any]]) -> None:
    assert all("model: rank 0 could not load" in rank["no model"]["refused"] for rank in two)


@pytest.mark.slow
def test_a_skipped_step_names_the_same_rollouts_on_every_rank(
    two: list[dict[str, Any]], batches: list[list[Sample]]
) -> None:
    guilty = batches[0][0].rollout_id
    for rank in two:
        (warned,) = rank["not finite"]["warned"]
        assert warned == two[0]["not finite"]["warned"][0]
        assert guilty in warned.split("rollouts ")[1].split(", ")
        stats = rank["not finite"]["stats"]
        assert [row["train/optimizer_steps"] for row in stats] == [0, 1]
        named = len(warned.split("rollouts ")[1].split(", "))
        assert named == stats[0]["train/skipped_rollouts"] < len({row.rollout_id for row in batches[0]})


# On one process


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_gradient_checkpointing_changes_only_memory_use(
    tiny_model: Path, batches: list[list[Sample]], layout: Any
) -> None:
    kept, again = (
        metrics(tiny_model, replace(PLAIN, gradient_checkpointing=checkpointing, layout=layout), batches)
        for checkpointing in (False, True)
    )
    assert_same(again, kept, rel=1e-6, atol=1e-7)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointed_layers_keep_their_input_and_run_twice(
    tiny_model: Path, batches: list[list[Sample]], checkpointing: bool
) -> None:
    with Trainer(
        tiny_model, replace(PLAIN, gradient_checkpointing=checkpointing, max_tokens_per_microbatch=None)
    ) as trainer:
        runs: list[str] = []
        for layer in trainer._open_now.learner.policy.causal.get_decoder().layers:
            layer.mlp.register_forward_pre_hook(lambda *_: runs.append("mlp"))
        trainer.train(batches[0])
        assert len(runs) == (4 if checkpointing else 2)
        trainer.score(IDS, sampling=Sampling())
        assert len(runs) == (6 if checkpointing else 4)


def test_an_offload_without_a_gpu_is_refused(tiny_model: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"^offload: .*the device is the CPU"),
        Trainer(tiny_model, replace(PLAIN, offload=True, shard=True)),
    ):
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_offloaded_step_equals_the_gpus(tiny_model: Path, batches: list[list[Sample]], dtype: Any) -> None:
    on_gpu = replace(PLAIN, device="cuda", shard=True, dtype=dtype)
    kept, moved = (metrics(tiny_model, replace(on_gpu, offload=offload), batches) for offload in (False, True))
    assert_same(moved, kept, rel=1e-3, atol=1e-4)
    with (
        pytest.raises(ValueError, match="offload: is of shards"),
        Trainer(tiny_model, replace(on_gpu, shard=False, offload=True)),
    ):
        pass


def test_only_the_named_layers_have_an_adapter(tiny_model: Path) -> None:
    with Trainer(tiny_model, replace(PLAIN, lora_targets=("q_proj", "down_proj"))) as trainer:
        adapter = trainer.adapter()
    assert {name.split(".")[-3] for name in adapter.tensors} == {"q_proj", "down_proj"}
    assert adapter.config["target_modules"] == ["down_proj", "q_proj"]


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (
            ("q_proj", "qproj"),
            "qproj matches no linear layer of this model; choose from down_proj, .*v_proj, or use only",
        ),
        (("all-linear", "q_proj"), "q_proj matches no linear layer of this model that all-linear leaves out; use only"),
    ],
)
def test_a_target_that_is_not_a_decoder_layer_is_refused(tiny_model: Path, targets: tuple[str, ...], said: str) -> None:
    with (
        pytest.raises(ValueError, match=f"^lora_targets: {said} all-linear$"),
        Trainer(tiny_model, replace(PLAIN, lora_targets=targets)),
    ):
        pass


def test_an_adapter_without_targets_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^lora_targets: must have at least 1 item, got \(\)"):
        replace(PLAIN, lora_targets=())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own
@pytest.mark.parametrize("change", [{"rslora": True}, {"dora": True}, {"rslora": True, "dora": True}])
def test_every_kind_of_adapter_is_read_by_peft_and_merged_by_the_embedded_engine(
    tiny_model: Path, batches: list[list[Sample]], tmp_path: Path, change: dict[str, Any]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with Trainer(tiny_model, replace(PLAIN, **change, lr=1e-2)) as trainer:
        base = trainer.score(IDS, sampling=Sampling())
        trainer.train(batches[0])
        trainer.save(tmp_path / "adapter")
        adapter, trained = trainer.adapter(), trainer.score(IDS, sampling=Sampling())
    assert np.abs(trained - base).max() > 1e-3
    assert (adapter.config["use_rslora"], adapter.config["use_dora"]) == (
        change.get("rslora", False),
        change.get("dora", False),
    )
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tiny_model)
    Merger(merged).load(adapter)
    for model in (read, merged):
        np.testing.assert_allclose(scores_of(model), trained, atol=1e-5)


def scores_of(model: Any) -> Any:
    with torch.no_grad():
        log = model(input_ids=torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    return log.gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]


def test_rank_stabilized_scaling_divides_by_the_root_of_the_rank(tiny_model: Path) -> None:
    scales = []
    for rslora in (False, True):
        with Trainer(tiny_model, replace(PLAIN, lora_rank=16, lora_alpha=32, rslora=rslora)) as trainer:
            layer = trainer._open_now.learner.policy.causal.get_decoder().layers[0].mlp.up_proj
            scales.append(layer.scaling["default"])
    assert scales == [2.0, 8.0]


def test_a_rate_falls_linearly_or_as_a_cosine_to_a_tenth() -> None:
    config = TrainConfig(lr=1.0, warmup_steps=2, decay_steps=4, decay="cosine")
    rates = [learning_rate(config, taken) for taken in range(8)]
    halfway = math.cos(math.pi / 4)
    expected = [0.5, 1, 1, 0.55 + 0.45 * halfway, 0.55, 0.55 - 0.45 * halfway, 0.1, 0.1]
    assert rates == pytest.approx(expected)
    assert [learning_rate(replace(config, decay="linear", decay_steps=None), t) for t in range(4)] == [0.5, 1, 1, 1]
    with pytest.raises(ValueError, match=r"decay, decay_steps: .*set decay_steps"):
        TrainConfig(decay="cosine")


# The guard


def report(number: int, *rollouts: str, loss: bool = True, gradient: bool = True, step: int = 0) -> Forward:
    value = 1.0 if loss else math.nan
    sums = LossSums(loss=value, tokens=1, clipped=0.0, corrected=0.0, kl=0.0, entropy=0.0, gap=0.0)
    return Forward(
        step=step,
        number=number,
        rollouts=rollouts,
        sums=sums,
        real_tokens=1,
        computed_tokens=1,
        gradient_is_finite=gradient,
    )


def test_a_nonfinite_loss_identifies_its_micro_batch() -> None:
    ranks = [report(0, "a"), report(1, "b", loss=False, gradient=False), report(0, "c"), report(1, "d", gradient=False)]
    assert nonfinite_rollouts([*ranks, report(0, "of another step", loss=False, step=1)], 0) == ["b"]


def test_a_nonfinite_gradient_is_attributed_to_the_first_micro_batch_that_had_one() -> None:
    ranks = [report(0, "a"), report(1, "b", gradient=False), report(2, "c", gradient=False)]
    ranks += [report(0, "d"), report(1, "e"), report(2, gradient=False)]
    assert nonfinite_rollouts(ranks, 0) == ["b", "e"]
    assert nonfinite_rollouts([*ranks, report(2, "f", loss=False)], 0) == ["b", "e", "f"]


def test_all_rollouts_are_named_if_only_the_norm_is_not_finite() -> None:
    assert nonfinite_rollouts([report(0, "a"), report(0, "b")], 0) == ["a", "b"]


def test_a_warning_names_some_rollouts_and_counts_the_rest(tiny_model: Path, groups_of: Groups) -> None:
    rows = [not_finite(row) for row in build_samples(groups_of(1, groups=4, size=7))]
    count = len({row.rollout_id for row in rows})
    with (
        Trainer(tiny_model, replace(PLAIN, max_tokens_per_microbatch=None)) as trainer,
        pytest.warns(RuntimeWarning, match=f"1 optimizer step.* and {count - SHOWN} more") as said,
    ):
        stats = trainer.train(rows)
    assert [Path(each.filename).name for each in said] == ["trainer.py"]
    assert (stats["train/skipped_steps"], stats["train/skipped_rollouts"]) == (1, count)
