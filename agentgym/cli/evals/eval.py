"""The command `agentgym eval`: runs a model on an environment and prints its scores. Also `agentgym compare`."""

import asyncio
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import tyro

from agentgym.cli.envs.names import NONE, Parameters, find, own_name
from agentgym.cli.evals.models import ModelFlags, opened_models
from agentgym.cli.evals.outcome import exit_status, resuming
from agentgym.cli.output import flush, say
from agentgym.environments.env import Env, Split
from agentgym.errors import AgentGymError
from agentgym.files.held import place_now
from agentgym.files.names import command, drop_unused, new_folder, shown, whole_path
from agentgym.run.cluster_config import OFF
from agentgym.store.run_settings import is_run

if TYPE_CHECKING:
    from agentgym.evals.evaluation import Evaluation

Variables: TypeAlias = Mapping[str, bool | int | float | str]
"""Variables of a chat template by name."""
NO_VARIABLES: Variables = MappingProxyType({})


def evaluate_env(
    env: tyro.conf.Positional[str],
    model: str | None = None,
    url: str | None = None,
    n: int | None = None,
    k: int = 1,
    tasks: tuple[str, ...] = (),
    split: Split = "test",
    temperature: float = 1.0,
    max_tokens: int | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Variables = NO_VARIABLES,
    seed: int = 0,
    solved: float = 1.0,
    output_dir: Path | None = None,
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    retry_failed: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    concurrency: int = 64,
    api_key_env: str | None = None,
    tools: Literal["api", "auto", "template", "prompt", "refuse"] | None = None,
    prompt_price: float = 0.0,
    cached_price: float | None = None,
    completion_price: float = 0.0,
    rows: int = 20,
    ray: str = "off",
    workers: int | None = None,
    models: Annotated[Mapping[str, ModelFlags] | None, tyro.conf.Fixed, tyro.conf.Suppress] = None,
    parameters: Parameters = NONE,
) -> int:
    """Evaluate a model on an environment's held-out tasks, and print its scores with intervals and costs.

    The exit status is 0 if at least nine tenths of the rollouts have a reward and all are saved in the folder. It is
    3 if more are missing; the scores are then those of the other rollouts. It is 1 if no rollout has a reward, and for
    all other errors. A line on stderr reports what is missing, and how to run it again.
    --env.NAME VALUE sets a parameter of the environment. A model that the env queries by name (a model role),
    such as a judge, a simulated user or an opponent, has its own flags: --models.NAME.model or --models.NAME.url, and
    also api-key-env, tools, concurrency, prompt-price, cached-price and completion-price, like the flags below.

    For example:
    $ agentgym eval hello --model tiny
    $ agentgym eval nim --model tiny --env.skill 1
    $ agentgym eval my_env:Pointers --model tiny --n 64 --k 4
    $ agentgym eval my_env:Pointers --model runs/pointers/20260801-101500/adapter --temperature 0.7
    $ agentgym eval my_env:Pointers --url http://localhost:8000/v1 --output-dir runs/eval --resume
    $ agentgym eval my_env:Pointers --url https://api.openai.com/v1 --model gpt-5-mini --api-key-env OPENAI_API_KEY
    $ agentgym eval judge_essay --model my_model --models.judge.url http://localhost:8000/v1
    $ agentgym eval my_env:Pointers --model Qwen/Qwen3-0.6B --n 1000 --ray auto --workers 4

    Args:
        env: A registered name, the folder of an env.py, module:Class, or path/env.py:Class.
        model: The folder or hub name of a model, the folder of an adapter or of a run that has one, or "tiny". With
            --url, the model's name at the endpoint, which is optional if the endpoint serves only one model.
        url: A chat endpoint with OpenAI's API, including the API's path, instead of a model in this process.
        n: Run this many tasks, from the start of the split; by default 128. Not allowed with --tasks.
        k: Run each task this many times, for pass@k and pass^k.
        tasks: Run only the tasks with these ids.
        split: The split to take the tasks from.
        temperature: The sampling temperature.
        max_tokens: The maximum tokens of one turn, in addition to the environment's limits.
        chat_template: A chat template that replaces the model's: a Jinja file or its text. By default, the one that
            the adapter was trained with, if --model is an adapter, or else the model's.
        chat_template_kwargs: Variables of the chat template, as in `--chat-template-kwargs enable_thinking False`.
        seed: The seed for everything random.
        solved: The minimum reward of an attempt that solves its task, for pass@k, pass^k and the table.
        output_dir: The folder for the rollouts and the summary; by default runs/eval-ENV/TIME.
        resume: Resume the evaluation in --output-dir without repeating the rollouts that it already has.
        retry_failed: With --resume, repeat rollouts without a reward.
        concurrency: The maximum number of concurrent rollouts, and of requests to an endpoint.
        api_key_env: The environment variable with the endpoint's API key.
        tools: How the model is told about tools. At an endpoint: api, through the tools API (the default), or prompt,
            through text in its prompt. For another model: template, by its chat template, or prompt; auto, the default,
            uses the template if it shows tools and the format of its calls is known, and refuse stops otherwise.
        prompt_price: The endpoint's price per million prompt tokens.
        cached_price: The price per million cached prompt tokens; by default the price of other prompt tokens.
        completion_price: The price per million sampled tokens.
        rows: The number of tasks in the table, which lists those with the lowest rewards.
        ray: Run on a Ray cluster: auto joins a running one or starts one on this machine, HOST:PORT joins that one.
        workers: With --ray, the number of worker processes, each with its own model; by default one per node, or one
            per unit of the resource "sandbox".
    """
    from agentgym.engines.endpoint.endpoint import Endpoint
    from agentgym.evals.report import score_lines, task_lines
    from agentgym.types.completion import Sampling

    if model is None and url is None:
        raise AgentGymError("--model, --url: give a model, such as --model tiny, or an endpoint, such as --url URL/v1")
    if n is not None and tasks:
        raise AgentGymError("--n, --tasks: give only one of them; --tasks runs every task that it lists")
    if resume and output_dir is None:
        raise AgentGymError("--resume: give the folder to resume with --output-dir")
    _refuse_negative(rows)
    told = _tools(tools, at_endpoint=url is not None)
    cls, signals = find(env, parameters), list[signal.Signals]()
    try:
        folder = new_folder(Path("runs") / f"eval-{own_name(cls)}") if output_dir is None else whole_path(output_dir)
    except ValueError as error:
        raise AgentGymError(str(error)) from error
    try:
        chosen = _tasks(cls, split, tasks)
        settings = {
            "n": n if chosen is None else len(chosen),
            "k": k,
            "tasks": chosen,
            "split": split,
            "sampling": Sampling(temperature=temperature, max_tokens=max_tokens),
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            **({} if url is not None else {"tools": told}),
            "seed": seed,
            "solved": solved,
            "output_dir": folder,
            "resume": resume,
            "retry_failed": retry_failed,
            "concurrency": concurrency,
            "ray": ray,
            "workers": workers,
        }
        endpoint = {"api_key_env": api_key_env, "tools": told, "concurrency": concurrency}
        prices = {"prompt_price": prompt_price, "cached_price": cached_price, "completion_price": completion_price}
        asked = model if url is None else Endpoint(url, model=model, **endpoint, **prices)  # type: ignore[arg-type]
        rollout = asyncio.run(_played(cls, asked, models or {}, settings, signals))
    except ValueError as error:
        raise AgentGymError(str(error)) from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write(f"agentgym: stopped; to resume: {resuming(place_now(folder))}\n")
        return 128 + (signals or [signal.SIGINT])[0]
    finally:
        drop_unused(folder)  # if the evaluation was refused
    folder = place_now(folder)
    for line in (*score_lines(rollout), f"{'folder':<10}{shown(folder)}", "", *task_lines(rollout, rows)):
        say(line)
    flush()
    return exit_status(rollout, folder)


async def _played(
    env: type[Env[Any]],
    model: Any,
    models: Mapping[str, ModelFlags],
    settings: Mapping[str, Any],
    signals: list[signal.Signals],
) -> "Evaluation":
    """Run the evaluation, with an endpoint and the model roles open.

    The first SIGINT or SIGTERM is added to `signals` and stops the evaluation, closing sandboxes and engines. The
    next one ends the process.
    """
    from agentgym.launch.evaluate import evaluate

    if threading.current_thread() is threading.main_thread():
        _stop_at_signals(signals)
    opening = nullcontext(model) if isinstance(model, str) else model
    opening_models = opened_models(models, elsewhere=settings["ray"] != OFF)
    async with opening as engine, opening_models as named:
        return await evaluate(env, engine, models=named, progress=True, **settings)


def _stop_at_signals(signals: list[signal.Signals]) -> None:
    """Cancel the running task at the first signal to stop, and print that at once."""
    running, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert running is not None
    ending = (signal.SIGINT, signal.SIGTERM)

    def stop(number: signal.Signals) -> None:
        signals.append(number)
        for each in ending:
            loop.remove_signal_handler(each)
        sys.stderr.write(
            "\nagentgym: stopping after the current loading or writing; the next Ctrl-C or SIGTERM exits at once\n"
        )
        running.cancel()

    for number in ending:
        loop.add_signal_handler(number, stop, number)


def _tasks(env: type[Env[Any]], split: Split, ids: Sequence[str]) -> list[Any] | None:
    """Return the tasks with these ids, in the same order, or None if there are no ids."""
    if not ids:
        return None
    from agentgym.environments.task_rows import split_tasks

    found: dict[str, Any] = {}
    every = split_tasks(env, split)
    for index in range(len(every)):
        if every[index].id in ids:
            found[every[index].id] = every[index]
        if len(found) == len(set(ids)):
            break
    if missing := [name for name in ids if name not in found]:
        raise AgentGymError(f"--tasks: {env.__name__} has no {split} task with the id {', '.join(missing)}")
    return [found[name] for name in dict.fromkeys(ids)]


def compare_runs(
    one: tyro.conf.Positional[Path],
    other: tyro.conf.Positional[Path],
    phase: tuple[str, ...] = ("after",),
    common: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    rows: int = 20,
) -> int:
    """Compare two evaluations of the same tasks: how much the rewards differ, and whether that could be chance.

    For example:
    $ agentgym compare runs/eval-pointers/before runs/eval-pointers/after
    $ agentgym compare runs/pointers/20260801-101500 runs/pointers/20260801-101500 --phase before after

    Args:
        one: The folder of an evaluation or a training run, which contains rollouts.sqlite.
        other: The folder of the second one; a positive difference means that this one earned more.
        phase: Which evaluation of a training run to use: after, before, or the number of steps done before it; or two
            of these, for the first and the second folder.
        common: Compare the tasks that both have run, even if one has run others too.
        rows: The number of rows in the table of the tasks that differ most.
    """
    from agentgym.evals.comparison import compare
    from agentgym.evals.report import comparison_lines

    _refuse_negative(rows)
    _refuse_phase(one, other, phase)
    try:
        found = compare(one, other, phase=phase, common=common)
    except ValueError as error:
        raise AgentGymError(str(error)) from error
    for line in comparison_lines(found, rows):
        say(line)
    flush()
    return 0


def _refuse_negative(rows: int) -> None:
    if rows < 0:
        raise AgentGymError(f"--rows: must not be negative, got {rows}")


def _tools(given: str | None, *, at_endpoint: bool) -> Any:
    """Return how the model is told about tools: the default if nothing is given."""
    possible = ("api", "prompt") if at_endpoint else ("auto", "template", "prompt", "refuse")
    if given is not None and given not in possible:
        which = "an endpoint" if at_endpoint else "a model without --url"
        raise AgentGymError(f"--tools: for {which}, it is one of {', '.join(possible)}, got {given}")
    return given or possible[0]


def _refuse_phase(run: Path, other: Path, phase: tuple[str, ...]) -> None:
    """Raise AgentGymError if `other` isn't a folder but names an evaluation of the training run in the first folder."""
    from agentgym.evals.comparison import AFTER, BEFORE, evaluations_in

    named = str(other) in (BEFORE, AFTER) or str(other).isdecimal()
    if other.exists() or not named or not is_run(run):
        return
    if not (held := evaluations_in(run)):
        return  # `compare` says so
    asked = phase if len(phase) > 1 else (*phase, str(other))
    two = asked if len(set(asked)) == 2 else (BEFORE, AFTER)
    if len({held[name] for name in two if name in held}) == 2:
        again = command("compare", run, run, "--phase", *two)
        what_to_do = f"to compare two evaluations of one run, give its folder twice: {again}"
    else:
        what_to_do = f"{run} has the evaluations {', '.join(held)}; give its folder twice, and two of them with --phase"
    raise AgentGymError(f"other: there is no folder {other}; {what_to_do}")
