"""The characters and the length allowed in the texts of a space."""

import re
import string

from agentgym.sandboxes.protocol import cut_middle

LATIN = "".join(letter for letter in map(chr, range(0xC0, 0x180)) if letter.isalpha())
CHARSET = string.digits + string.ascii_letters + string.punctuation + " \t\n" + LATIN
"""The characters of an observation: printable ASCII, tab, newline and the Latin letters from U+00C0 to U+017F."""
_OUTSIDE = re.compile(f"[^{re.escape(CHARSET)}]")


def fitted(text: str, max_length: int) -> str:
    """Return the text with "?" for characters outside of `CHARSET`, without its middle if it exceeds `max_length`."""
    return cut_middle(_OUTSIDE.sub("?", text), max_length)
