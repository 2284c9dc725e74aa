"""A model that a layout would compute wrongly is refused when it is opened."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agentgym.causal_lm.logit_map import LogitMap
from agentgym.samples import build_samples
from agentgym.train.config import TrainConfig
from agentgym.train.loss.logprobs import token_logprobs
from agentgym.train.policy import fsdp
from agentgym.train.policy.adapter_io import export_adapter, layer_names
from agentgym.train.policy.model import PolicyModel, load_policy
from agentgym.train.policy.opening import attend_in_rows, check_padded, logit_map_of
from agentgym.train.trainer import Trainer
from tests.support.model_families import build

CPU = torch.device("cpu")


def load(folder: Path, **settings: Any) -> PolicyModel:
    return load_policy(folder, dtype=torch.float32, rank=2, alpha=4, seed=0, **settings)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a family's name to a folder with a random model of it, created once."""
    root = tmp_path_factory.mktemp("families")

    def folder(name: str) -> Path:
        path = root / name
        if not path.exists():
            build(name).save_pretrained(path)
        return path

    return folder


class Smear(nn.Module):
    """An embedding that adds each token's predecessor, even across samples."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.weight = embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        states: Tensor = self.embedding(ids)
        return states + 0.1 * states.roll(1, 1)


@pytest.mark.parametrize("layout", ["packed", "tree"])
def test_a_model_that_mixes_samples_outside_its_layers_is_refused(layout: Any) -> None:
    model = build("llama")
    model.model.embed_tokens = Smear(model.model.embed_tokens)
    with pytest.raises(
        ValueError, match=rf"^layout: llama gives wrong results in layout {layout} \(its hidden states are"
    ):
        attend_in_rows(model, (layout,))


def test_a_model_whose_results_change_with_padding_is_refused() -> None:
    model = build("llama")
    model.model.embed_tokens = Smear(model.model.embed_tokens)
    with pytest.raises(ValueError, match=r"^layout: llama gives wrong results in padded rows .*train another model"):
        check_padded(model)


def test_rotary_positions_that_depend_on_earlier_sequences_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(num_attention_heads=2, rope_parameters=rope, **size)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^model: llama has dynamic rotary positions, .*set rope_type to yarn"):
        load(tmp_path)


def test_a_model_without_causal_attention_is_refused() -> None:
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    with pytest.raises(ValueError, match=r"^layout: bert gives wrong results in"):
        attend_in_rows(BertLMHeadModel(config).eval())


def test_logits_that_are_more_than_scaled_and_capped_are_refused_by_name() -> None:
    model = build("llama")
    forward = model.forward

    def squared(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits.square()
        return out

    model.forward = squared
    with pytest.raises(ValueError, match=r"^model: llama changes its logits after the output layer"):
        logit_map_of(model)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("llama", LogitMap()), ("cohere", LogitMap(scale=0.0625)), ("gemma2", LogitMap(cap=30.0))],
)
def test_a_models_logit_map_is_found_from_its_own_forward(name: str, expected: LogitMap) -> None:
    model = build(name)
    assert logit_map_of(model) == expected
    for weight in model.parameters():
        weight.data *= 0.01 if weight.ndim > 1 else 1.0
    assert logit_map_of(model) == expected  # also if no logit comes near the cap


@pytest.mark.parametrize("logits", [LogitMap(scale=0.5), LogitMap(cap=1.5), LogitMap(scale=3.0, cap=2.0)])
@pytest.mark.parametrize("linear", [True, False])
def test_scaled_and_capped_logits_match_their_formula(logits: LogitMap, linear: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 5000)  # three tiles
    states, targets = torch.randn(9, 8).mul(3).requires_grad_(), torch.randint(5000, (9,))
    head = layer if linear else lambda x: layer(x)
    got, entropy = token_logprobs(states, head, targets, temperature=0.7, logits=logits)
    scaled = logits.scale * layer(states)
    mapped = scaled if logits.cap is None else logits.cap * torch.tanh(scaled / logits.cap)
    log = torch.log_softmax(mapped / 0.7, -1)
    expected = log.gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(entropy, -(log.exp() * log).sum(-1).detach())
    weight, of = torch.linspace(-1, 1, 9), (states, layer.weight, layer.bias)
    for mine, theirs in zip(
        torch.autograd.grad((got * weight).sum(), of), torch.autograd.grad((expected * weight).sum(), of), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


# Which layers get an adapter


def test_routers_and_experts_have_no_adapter_unless_they_are_named(families: Any) -> None:
    found = load(families("qwen3_moe")).coverage
    assert found.adapted == ("self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj")
    assert found.bare == ("experts.down_proj", "experts.gate_up_proj", "mlp.gate")
    assert 0 < found.share < 0.5
    whole = load(families("qwen3_moe"), targets=("all-linear", "experts")).coverage
    assert whole.bare == ("mlp.gate",)
    assert whole.share > 0.9


def test_a_linear_router_is_not_among_all_linear_layers(families: Any) -> None:
    assert "feed_forward.router" in load(families("jamba")).coverage.bare


def test_an_adapter_of_a_multimodal_model_names_no_vision_layer(families: Any) -> None:
    policy = load(families("gemma3"))
    assert all("language_model" in name for name in export_adapter(policy).tensors)
    assert all(name.count(".") for name in layer_names(policy.causal) if name.endswith("q_proj"))
    assert layer_names(load(families("llama")).causal) == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


def test_experts_are_refused_by_name_if_the_model_has_none(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="lora_targets: experts matches nothing in this model"):
        load(tiny_model, targets=("experts",))


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("lm_head",), "lm_head is the output layer"),
        (("all-linear", "lm_head"), "lm_head is the output layer"),
        (("q_proj", "embed_tokens"), "embed_tokens is an embedding"),
    ],
)
def test_the_output_layer_and_embeddings_are_refused_with_the_reason(
    tiny_model: Path, targets: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=f"^lora_targets: {said}, which can't have an adapter; leave it out"):
        load(tiny_model, targets=targets)


def test_adapter_coverage_is_a_metric_and_layers_without_an_adapter_are_logged(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, grown: Any
) -> None:
    with Trainer(tiny_model, TrainConfig(lora_targets=("q_proj",))) as trainer:
        metrics = trainer.train(build_samples(grown(1)))
    assert 0 < metrics["train/adapter_coverage"] < 1
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "self_attn.q_proj; layers without an adapter: mlp.down_proj" in said


# Types and devices


def test_weights_have_the_type_that_the_device_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert fsdp.weight_type(TrainConfig(), CPU) == torch.float32
    for supported, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, _=supported: _)
        assert fsdp.weight_type(TrainConfig(), gpu) == expected
    assert fsdp.weight_type(TrainConfig(dtype="bfloat16"), CPU) == torch.bfloat16


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_a_correct_model_in_bfloat16_is_accepted(families: Any, layout: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = load_policy(families("gemma2"), dtype=torch.bfloat16, rank=2, alpha=4, seed=0, layout=layout)
    assert policy.way.logits == LogitMap(cap=30.0)
