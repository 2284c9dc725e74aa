"""A resumed evaluation belongs to one model: another model under the same name is refused, with the difference."""

import asyncio
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import agentgym as ag
from agentgym.engines import read_adapter
from agentgym.engines.base import model_name
from agentgym.engines.fingerprint import WHOLE, digest_of, fingerprint, model_files
from agentgym.engines.scripted import Scripted, say
from agentgym.engines.sglang.config import SGLangConfig
from agentgym.engines.sglang.fleet import Fleet
from agentgym.evals.fingerprints import hold_models
from agentgym.evals.opening import name_of
from agentgym.hub import find_model
from agentgym.train import Trainer
from agentgym.types.weights import Adapter, ModelWeights
from tests.engines.endpoint.chat_server import Request, Sent, chat_server, said


class Even(ag.ToolEnv[ag.Task]):
    """Rewards answers with an even number of letters."""

    limits = ag.Limits(turns=1, turn_tokens=4)

    @classmethod
    def tasks(cls, split: ag.Split) -> list[ag.Task]:
        return [ag.Task(id=i, prompt=f"{i}?") for i in range(4)]

    @ag.reward
    def even(self) -> float:
        return float(len(self.answer or "") % 2 == 0)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an adapter of the tiny model that leaves the base's weights unchanged."""

    async def made(folder: Path) -> Path:
        async with Trainer("tiny", ag.TrainConfig()) as trainer:
            trainer.save(folder)
        return folder

    return asyncio.run(made(tmp_path_factory.mktemp("made") / "adapter"))


async def begun(model: Any, folder: Path, **settings: Any) -> ag.Evaluation:
    return await ag.evaluate(Even, model, n=2, output_dir=folder, **settings)


async def resumed(model: Any, folder: Path, n: int = 2, **settings: Any) -> ag.Evaluation:
    return await ag.evaluate(Even, model, n=n, output_dir=folder, resume=True, **settings)


async def test_an_engine_with_an_adapter_is_another_model(tmp_path: Path, adapter: Path) -> None:
    read = read_adapter(adapter)
    async with ag.TransformersEngine("tiny") as engine:
        await begun(engine, tmp_path)
        await engine.load_adapter(read, version=7)
        with pytest.raises(ValueError, match=r"^model: the engine's adapter .* changed since .*\(none then, \w+ now\)"):
            await resumed(engine, tmp_path, n=4)
        changed = {name: tensor + 1e-3 for name, tensor in read.tensors.items()}
        await begun(engine, tmp_path / "adapted")
        await engine.load_adapter(Adapter(config=read.config, tensors=changed), version=7)
        with pytest.raises(ValueError, match=r"^model: the engine's adapter "):
            await resumed(engine, tmp_path / "adapted")
        await engine.load_adapter(None, version=8)
        assert (await resumed(engine, tmp_path, n=4)).resumed == 2
    async with ag.TransformersEngine("tiny") as engine:  # as in another process: the fingerprint is the same
        await engine.load_adapter(read_adapter(adapter), version=1)
        assert (await resumed(engine, tmp_path / "adapted", n=4)).resumed == 2


async def test_weights_of_different_full_and_loaded_models_are_distinguished(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    async with ag.TransformersEngine("tiny") as engine:
        first = await fingerprint(engine)
        loaded = AutoModelForCausalLM.from_pretrained(find_model("tiny"))
        tensors = {name: weight.detach() * 1.01 for name, weight in loaded.named_parameters()}
        await engine.load_weights(ModelWeights(tensors=tensors, files=tensors), version=1)
        given = await fingerprint(engine)
        tokenizer = engine.tokenizer
    assert (given["weights"], given["adapter"] != first["adapter"]) == (first["weights"], True)
    with torch.no_grad():
        next(iter(loaded.parameters())).mul_(1.01)
    async with ag.TransformersEngine(loaded, tokenizer=tokenizer) as engine:
        assert (await fingerprint(engine))["weights"] != first["weights"]
    assert await fingerprint(engine) != {}
    assert await fingerprint(ag.TransformersEngine("tiny")) == {}


async def test_another_chat_template_or_context_is_another_model(tmp_path: Path) -> None:
    from agentgym.chat.tokenizer import chat_tokenizer

    own = chat_tokenizer("tiny")
    other = chat_tokenizer("tiny", template=f"{own.tokenizer.get_chat_template()} ")
    async with ag.TransformersEngine("tiny", tokenizer=own) as engine:
        await begun(engine, tmp_path)
    async with ag.TransformersEngine("tiny", tokenizer=other) as engine:
        with pytest.raises(ValueError, match=r"^model: the chat template changed since"):
            await resumed(engine, tmp_path)
    async with ag.TransformersEngine("tiny", ag.TransformersConfig(context_tokens=99)) as engine:
        with pytest.raises(ValueError, match=r"^model: the engine's context_tokens .* 99 now"):
            await resumed(engine, tmp_path)


@pytest.mark.parametrize("run", [False, True])
async def test_a_changed_adapter_is_refused_even_if_nothing_is_left_to_run(
    run: bool, tmp_path: Path, adapter: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "run/adapter"
    shutil.copytree(adapter, folder)
    model = folder.parent if run else folder
    await begun(model, tmp_path / "eval")
    assert (await resumed(model, tmp_path / "eval")).resumed == 2
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: of + 1e-3 for name, of in tensors.items()}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"^model: the content of the adapter's files changed"):
        await resumed(model, tmp_path / "eval")


async def test_a_model_folder_with_changed_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(find_model("tiny"), folder)
    await begun(folder, tmp_path / "eval")
    (folder / "README.md").write_text("What it is.")
    assert (await resumed(folder, tmp_path / "eval")).resumed == 2
    with (folder / "chat_template.jinja").open("a") as file:
        file.write(" ")
    with pytest.raises(ValueError, match=r"^model: the content of the model's files changed since"):
        await resumed(folder, tmp_path / "eval")


async def test_a_folder_is_the_same_model_by_any_path_or_as_an_open_engine(
    tmp_path: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(find_model("tiny"))
    monkeypatch.chdir(folder.parent)
    await begun(folder.name, tmp_path / "eval")
    monkeypatch.chdir(tmp_path)
    assert (await resumed(folder, tmp_path / "eval")).resumed == 2
    async with ag.TransformersEngine(folder) as engine:
        assert (await resumed(engine, tmp_path / "eval", n=3)).resumed == 2
        await engine.load_adapter(read_adapter(adapter), version=1)
        with pytest.raises(ValueError, match=r"^model: the engine's adapter .* changed since .*\(none then, \w+ now\)"):
            await resumed(engine, tmp_path / "eval", n=4)


def test_models_without_comparable_fingerprints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{}")
    hold_models(tmp_path, {"": {"files": "a"}})
    with pytest.raises(
        ValueError,
        match=r"^model: can't tell whether this is the model .* fingerprint has files, this model's weights;",
    ):
        hold_models(tmp_path, {"": {"weights": "a"}})


def test_a_large_file_is_fingerprinted_by_samples(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as made:
        made.truncate(WHOLE + 5)
    first = model_files(tmp_path)
    with file.open("r+b") as made:
        made.seek(-1, 2)
        made.write(b"x")
    assert model_files(tmp_path) not in ("", first)
    assert model_files("nobody/nothing") == model_files("no name") == ""


async def test_a_changed_model_role_is_refused_too(tmp_path: Path) -> None:
    judge: Any = Scripted([say("1")], model_name="judge")
    await begun(Scripted(lambda text: say("ab")), tmp_path, models={"judge": judge})
    judge.version = 2
    with pytest.raises(ValueError, match=r"^models\['judge'\]: the version of the engine's policy .*\(0 then, 2 now\)"):
        await resumed(Scripted(lambda text: say("ab")), tmp_path, models={"judge": judge})


async def test_a_user_defined_engine_may_provide_its_fingerprint(tmp_path: Path) -> None:
    class Own(Scripted):
        rules = "first"

        async def fingerprint(self) -> Mapping[str, str]:
            return {"rules": self.rules}

    engine = Own(lambda text: say("ab"))
    await begun(engine, tmp_path)
    engine.rules = "second"
    with pytest.raises(ValueError, match=r"^model: rules changed since .*\(first then, second now\)"):
        await resumed(engine, tmp_path)


async def test_a_folder_without_a_fingerprint_is_resumed_and_gets_one(tmp_path: Path) -> None:
    await begun("tiny", tmp_path)
    settings = json.loads((tmp_path / "settings.json").read_text())
    kept = settings.pop("fingerprints")
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    await resumed("tiny", tmp_path, n=4)
    assert (
        json.loads((tmp_path / "settings.json").read_text())["fingerprints"]
        == kept
        == {"": {"files": kept[""]["files"], "weights": kept[""]["weights"], "adapter": ""}}
    )


CHANGES: list[dict[str, Any]] = [
    {"tools": "prompt"},
    {"extra_body": {"reasoning_effort": "high"}},
    {"extra_body": {"reasoning_effort": "low"}},
    {"extra_body": {"logit_bias": {str(i): i for i in range(99)}}},
    {"send_reasoning": True},
    {"leave_out": ("seed",)},
    {"context_tokens": 4096},
]


def test_an_endpoints_name_has_exactly_the_settings_that_change_its_output() -> None:
    def named(**settings: Any) -> str:
        return name_of(ag.Endpoint("http://x/v1", model="m", **settings))

    assert named() == named(concurrency=1, timeout_s=1.0, retries=0, prompt_price=1.0) == "http://x/v1 m"
    names = [named(**settings) for settings in CHANGES]
    assert len({*names, named()}) == len(CHANGES) + 1
    assert max(map(len, names)) < 100
    assert names[1] == 'http://x/v1 m extra_body={"reasoning_effort": "high"}'
    judge = ag.Endpoint("http://x/v1", model="m", tools="prompt")
    assert model_name(judge) == named(tools="prompt")  # a judge's replies are stored under this name


async def test_an_endpoint_with_other_settings_or_another_model_is_refused(tmp_path: Path) -> None:
    served = ["first"]

    def answers(request: Request, number: int) -> Sent:
        listed = {"object": "list", "data": [{"id": name, "object": "model"} for name in served]}
        return said("ab") if request else Sent(listed)

    async with chat_server(answers) as server:
        await begun(server.url, tmp_path)
        async with ag.Endpoint(server.url) as endpoint:
            await begun(endpoint, tmp_path / "opened")
        served[:] = ["second"]
        with pytest.raises(
            ValueError, match=r"^model: the model that the endpoint serves .*\(first then, second now\)"
        ):
            await resumed(server.url, tmp_path, n=4)
        async with ag.Endpoint(server.url) as endpoint:
            with pytest.raises(ValueError, match=r"^model: the model that the endpoint serves"):
                await resumed(endpoint, tmp_path / "opened")
        async with ag.Endpoint(server.url, extra_body={"top_k": 1}) as endpoint:
            with pytest.raises(ValueError, match=r"^model: .* was started with 'http.*', but this is .*extra_body={"):
                await resumed(endpoint, tmp_path / "opened")


async def test_adapters_on_servers_are_fingerprinted_by_content(adapter: Path) -> None:
    fleet = Fleet([], SGLangConfig(adapters="tensors"), Path())
    read = read_adapter(adapter)
    policies = [(await fleet._packed(given, 1))[0] for given in (None, read, read_adapter(adapter))]
    assert [policy.digest for policy in policies] == ["", digest_of(read), digest_of(read)]
    assert digest_of(Adapter(config={**read.config, "lora_alpha": 3}, tensors=read.tensors)) != digest_of(read)
