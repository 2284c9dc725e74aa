"""Warns of tools that the model isn't shown by its chat template, or refuses them, before anything is sampled."""

import logging
from typing import Any
from weakref import WeakSet

_LOG = logging.getLogger(__name__)
TO_DO = (
    "set tools='prompt' (--tools prompt), which lists them in the system prompt and reads calls in the Hermes format, "
    "or pass a chat template that shows them and writes calls in a known format (--chat-template)"
)
"""What to do if the chat template alone doesn't make tools usable."""
_warned: "WeakSet[Any]" = WeakSet()
"""The tokenizers that were warned of."""


def check_tools(tokenizer: Any) -> None:
    """Log one warning per tokenizer if the chat template shows no tools, or if calls can't be read.

    A tokenizer that doesn't declare what shows the tools (`tools_shown_by`) isn't checked.

    Args:
        tokenizer: The chat tokenizer of a conversation that has tools.

    Raises:
        ValueError: If the tokenizer's setting `tools` is refuse. The message says what to do.
    """
    if not hasattr(tokenizer, "tools_shown_by") or tokenizer in _warned:
        return
    problem, setting = why_not_template(tokenizer), tokenizer.tools
    if problem is None or setting == "prompt":
        return
    if setting == "refuse":
        raise ValueError(f"tools: {problem}; {TO_DO}")
    _warned.add(tokenizer)
    if setting == "template":
        _LOG.warning("tools: %s; %s", problem, TO_DO)
    else:
        _LOG.warning(
            "tools: %s, so the tools are listed in the system prompt, and calls are read in %s (docs/templates.md)",
            problem,
            "the Hermes format" if tokenizer.template_input.calls_as_text else "the template's own format",
        )


def why_not_template(tokenizer: Any) -> str | None:
    """Return why the chat template alone doesn't make tools usable, or None if it does."""
    if not tokenizer.template_input.facts.tools:
        return "the chat template shows no tools to the model"
    if not tokenizer.reads_calls:
        return "the chat template writes calls in no known format, so that a call would be read as text"
    return None
