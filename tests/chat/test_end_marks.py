"""The token with which a chat template ends a turn stops it, whatever the model's files name as the stop token."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import GenerationConfig

import agentgym as ag
from agentgym.chat import chat_tokenizer
from agentgym.chat.tokenizer import HuggingFaceTokenizer
from agentgym.cli import main as cli
from agentgym.engines.sglang.model_info import model_facts
from agentgym.hub import find_model
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Sampling
from tests.support.family_tokenizers import family_tokenizer, trl_template

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BASE_END = "<|endoftext|>"
"""The stop token of many base models."""


def stops(made: HuggingFaceTokenizer) -> set[str]:
    return {mark for mark, token_id in made.special_token_ids.items() if token_id in made.stop_ids}


@pytest.mark.parametrize(
    ("template", "marks", "added"),
    [
        ("qwen3", ["<|im_start|>", "<|im_end|>"], ["<|im_end|>"]),
        ("gemma3", ["<start_of_turn>", "<end_of_turn>"], ["<end_of_turn>"]),
        ("llama3_1", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], ["<|eot_id|>"]),
        ("phi3", ["<|user|>", "<|assistant|>", "<|end|>"], ["<|end|>"]),
        ("glm4moe", ["<|user|>", "<|assistant|>", "<|observation|>"], ["<|user|>", "<|observation|>"]),
        (
            "gptoss",
            ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"],
            ["<|return|>", "<|call|>"],
        ),
    ],
)
def test_the_end_mark_of_a_real_template_is_made_a_stop_token_and_said(
    template: str, marks: list[str], added: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    made = family_tokenizer(trl_template(template), BASE_END, marks)
    assert stops(made) == {BASE_END, *added}
    (told,) = [message for message in caplog.messages if message.startswith("stop tokens:")]
    assert f"ends a turn with {' or '.join(added)}, which is no stop token" in told


@pytest.mark.parametrize(
    ("template", "end", "marks"),
    [
        ("qwen3", "<|im_end|>", ["<|im_start|>"]),
        ("cohere2", "<|END_OF_TURN_TOKEN|>", ["<|END_RESPONSE|>", "<|START_RESPONSE|>"]),
    ],
)
def test_a_template_whose_turns_end_already_gives_no_warning(
    template: str, end: str, marks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    made = family_tokenizer(trl_template(template), end, marks)
    assert stops(made) == {end}
    assert not caplog.records


def test_a_mark_that_is_no_token_of_its_own_stops_nothing() -> None:
    assert stops(family_tokenizer(CHATML, BASE_END)) == {BASE_END}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return the tiny model with another stop token, as a base model with ChatML has it."""
    folder = tmp_path / "base"
    shutil.copytree(str(find_model("tiny")), folder)
    for name, changes in (
        ("tokenizer_config.json", {"eos_token": "<|im_start|>"}),
        ("generation_config.json", {"eos_token_id": 1}),
        ("config.json", {"eos_token_id": 1}),
    ):
        path = folder / name
        kept = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(kept | changes))
    assert chat_tokenizer("tiny").special_token_ids["<|im_start|>"] == 1
    return folder


async def test_both_engines_stop_at_the_end_mark_of_the_template(base: Path) -> None:
    end = chat_tokenizer(base).special_token_ids["<|im_end|>"]
    assert end in model_facts(base, None).stop_ids
    prompt = chat_tokenizer(base).encode("<|im_start|>user\nStart at key 10.<|im_end|>\n<|im_start|>assistant\n")
    async with ag.TransformersEngine(base) as engine:
        for seed in range(4):
            made = await engine.generate(
                prompt, session=f"{seed}", max_tokens=200, sampling=Sampling(temperature=1.0), seed=seed
            )
            assert end not in made.token_ids[:-1]
            assert made.finish_reason == "length" or made.token_ids[-1] in (end, 1)


def test_a_merged_model_names_the_end_mark_for_other_servers(base: Path, tmp_path: Path) -> None:
    with Trainer(base, TrainConfig(device="cpu")) as trainer:
        trainer.save(tmp_path / "adapter")
    assert cli.main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    end = chat_tokenizer(base).special_token_ids["<|im_end|>"]
    assert GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id == [1, end]


def test_stop_tokens_of_the_generation_config_need_no_warning(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    end = chat_tokenizer(base).special_token_ids["<|im_end|>"]
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    caplog.clear()
    assert end in chat_tokenizer(base).stop_ids
    assert not caplog.records
