"""The report of `agentgym doctor --model`: a prompt as the model reads it, and how its chat template behaves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentgym.chat.template_input import ToolsIn
from agentgym.cli.finding import Finding
from agentgym.errors import EngineError, boundary
from agentgym.errors.extras import needs_extra
from agentgym.types.messages import Message

MESSAGES = [
    Message(role="system", content="You are a careful assistant."),
    Message(role="user", content="What is two and two? Take a note of it."),
]
"""The messages of the prompt that is shown. The tool is the one of the template's checks."""


def opened_tokenizer(model: str, chat_template: str | None, tools: ToolsIn) -> Any:
    """Return the chat tokenizer of a model, or of an adapter's base model with the adapter's chat template.

    Raises:
        EngineError: If it can't be opened; the message says what to do.
    """
    with needs_extra():
        import transformers  # noqa: F401  before anything is looked up
    from agentgym.chat.tokenizer import chat_tokenizer
    from agentgym.evals.opening import adapter_folder, base_of
    from agentgym.files.foreign.adapter import adapter_template
    from agentgym.files.foreign.opening import regular_file
    from agentgym.hub import find_model, refuse_missing

    with boundary(EngineError, f"model {model!r}"):
        try:
            adapter = adapter_folder(Path(model))
            if adapter is not None:
                chat_template = adapter_template(adapter) if chat_template is None else chat_template
                model = base_of(adapter)
            refuse_missing(model)
            found = find_model(model)
            for file in Path(found).iterdir() if Path(found).is_dir() else ():
                if not file.is_dir():
                    regular_file(file, within=None)  # the hub's cache links to its files
            return chat_tokenizer(found, template=chat_template, tools=tools)
        except ValueError as error:  # It says what to do.
            raise EngineError(str(error)) from error


def prompt_lines(tokenizer: Any) -> Iterator[str]:
    """Yield the lines of a prompt as the model reads it, with its special tokens."""
    from agentgym.chat.template_report import TOOLS

    ids = tokenizer.encode(tokenizer.render(MESSAGES, TOOLS, generation=True))
    yield f"the prompt of a system text, a question and the tool {TOOLS[0]['function']['name']!r}, {len(ids)} tokens:"
    yield from (f"    {line}" for line in tokenizer.decode(ids).split("\n"))


def model_findings(tokenizer: Any) -> Iterator[Finding]:
    """Yield one finding per property of a chat tokenizer."""
    from agentgym.chat.template_report import check_template

    yield _shows_tools(tokenizer)
    yield _response_format(tokenizer)
    yield from _stop_marks(tokenizer)
    for check in check_template(tokenizer):
        yield Finding(name=check.name, ok=check.ok, detail=check.detail, otherwise="no")


def _shows_tools(tokenizer: Any) -> Finding:
    shown = {
        "template": "yes",
        "prompt": "no, so agentgym lists them in the system prompt; with --tools refuse, this is an error",
        None: "no; set --tools prompt, or give a chat template that shows them with --chat-template",
    }
    by = tokenizer.tools_shown_by
    if by == "prompt" and tokenizer.template_input.facts.tools:
        why = "--tools prompt is set" if tokenizer.tools == "prompt" else "calls in its format can't be read"
        shown["prompt"] = f"yes, but {why}, so agentgym lists them in the system prompt"
    return Finding(name="shows tools", ok=by == "template", detail=shown[by], otherwise="no")


def _response_format(tokenizer: Any) -> Finding:
    known = tokenizer.response_format
    if tokenizer.template_input.calls_as_text:
        detail = "calls are read in the Hermes format, which the system prompt describes"
    elif tokenizer.response_template is not None:
        detail = "its own response_template"
    elif known is not None:
        detail = f"read as {known.name}"
    else:
        detail = "unknown, so tool calls are read as text"
    ok = tokenizer.reads_calls or tokenizer.template_input.calls_as_text
    return Finding(name="response format", ok=ok, detail=detail, otherwise="no")


def _stop_marks(tokenizer: Any) -> Iterator[Finding]:
    """Yield a finding for each token that ends a turn, or that should."""
    from agentgym.chat.template_report import end_of_turn

    stops = {tokenizer.decode([i]): i for i in sorted(tokenizer.stop_ids)}
    for mark, i in stops.items():
        yield Finding(name="stop token", ok=True, detail=f"{mark} (id {i})")
    end = end_of_turn(tokenizer)
    if end is not None and end not in stops:
        said = f"the chat template ends a turn with {end!r}, which is not a stop token, so turns end only at a limit"
        yield Finding(name="stop token", ok=False, detail=said, otherwise="no")


def report_model(model: str, chat_template: str | None, tools: ToolsIn) -> Iterator[str | Finding]:
    """Yield the lines and the findings about a model's chat template.

    Raises:
        EngineError: If the tokenizer can't be opened, or if the template rejects the prompt; the message says what to
            do.
    """
    from agentgym.chat.template_report import TOOLS
    from agentgym.chat.tools_check import check_tools

    tokenizer = opened_tokenizer(model, chat_template, tools)
    try:
        if tools == "refuse":
            check_tools(tokenizer)
    except ValueError as error:
        raise EngineError(str(error)) from error
    with boundary(EngineError, f"model {model!r}: the chat template rejects a prompt with {len(TOOLS)} tool"):
        prompt = list(prompt_lines(tokenizer))
    yield from prompt
    yield from model_findings(tokenizer)
