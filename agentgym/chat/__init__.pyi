"""The public names of agentgym.chat, each with the module that defines it."""

from .tokenizer import chat_tokenizer as chat_tokenizer

__all__: list[str]
