"""An adapter that a server would load only in part is refused before training."""

import pytest

from agentgym.engines.custom import CustomEngineConfig
from agentgym.engines.sglang.config import SGLangConfig
from agentgym.engines.sglang.model_info import served
from agentgym.engines.transformers.engine import TransformersConfig
from agentgym.run.config import RunConfig
from agentgym.train.config import TrainConfig
from agentgym.types.weights import Adapter


def test_an_adapter_of_stacked_experts_is_refused_by_name() -> None:
    config = {"r": 4, "lora_alpha": 8, "target_parameters": ["layers.0.mlp.experts.gate_up_proj"]}
    with pytest.raises(ValueError, match=r"skip the tensors of layers\.0\.mlp\.experts\.gate_up_proj"):
        served(Adapter(config=config, tensors={}))


@pytest.mark.parametrize("engine", [SGLangConfig(), TransformersConfig()])
def test_a_run_whose_server_would_skip_the_experts_is_refused_before_it_starts(
    engine: SGLangConfig | TransformersConfig,
) -> None:
    train = TrainConfig(lora_targets=("all-linear", "experts"))
    with pytest.raises(ValueError, match=r"^train\.lora_targets: only a custom engine can sample with trained experts"):
        RunConfig(recipe="one", env="chase", model="tiny", train=train, engine=engine)


def test_a_custom_engine_may_sample_from_an_adapter_of_experts() -> None:
    train = TrainConfig(lora_targets=("experts",))
    own = CustomEngineConfig(name="my_engine:Mine")
    assert RunConfig(recipe="one", env="chase", model="tiny", train=train, engine=own).engine == own
