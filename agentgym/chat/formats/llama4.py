"""Llama 4: calls as JSON, as Llama 3 writes them, or a list of calls as Python writes them."""

import re

from agentgym.chat.formats.calls import joined, raw_call
from agentgym.chat.formats.cursor import Cursor
from agentgym.chat.formats.llama import LLAMA
from agentgym.chat.formats.pythonic import read_list
from agentgym.chat.formats.response_format import Reading, ResponseFormat, Tools

PYTHON = ("<|python_start|>", "<|python_end|>")
_LIST = re.compile(r"\s*+\[\s*+([^\s()\[\]{},='\"<>:]++)\s*+\(")
"""The beginning of a list of calls, with the name of the first."""


def _read(text: str, tools: Tools) -> Reading:
    """Return the calls. A list without marks is one if it names a tool, or if it is the whole text."""
    before, mark, listed = text.partition(PYTHON[0])
    listed, _, after = listed.partition(PYTHON[1]) if mark else (text, "", "")
    before = before if mark else ""
    begins = _LIST.match(listed) if mark or tools else None
    if begins is not None:
        meant = bool(mark) or any(tool["function"]["name"] == begins[1] for tool in tools)
        cursor = Cursor(listed)
        try:
            calls = read_list(cursor, tools)
        except ValueError:  # A malformed call, or a number of too many digits.
            if meant:
                return Reading("", [raw_call(text)])
        else:
            behind = listed[cursor.at :]
            if meant or not behind.strip():
                return Reading(joined([before, behind, after]), calls)
    read = LLAMA.read(joined([before, listed, after]), tools)
    return read if read.calls or not mark else Reading(text.strip(), [])


LLAMA4 = ResponseFormat(
    name="llama4",
    marks=("<|header_start|>", "<|eot|>"),
    example=LLAMA.example,
    call_marks=(PYTHON,),
    read=_read,
)
