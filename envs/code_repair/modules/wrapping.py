"""Text in lines of a given width."""


def wrap(text: str, width: int = 20) -> list[str]:
    """Lines of at most `width` characters, broken between words; a longer word is cut."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        while len(word) > width:
            if line:
                lines.append(line)
                line = ""
            lines.append(word[:width])
            word = word[width:]
        if not word:
            continue
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = line + " " + word if line else word
    if line:
        lines.append(line)
    return lines


def center(line: str, width: int = 20, fill: str = " ") -> str:
    """The line in the middle; the odd character goes to the right."""
    room = max(width - len(line), 0)
    left = room // 2
    return fill * left + line + fill * (room - left)


def indent(text: str, by: int = 4) -> str:
    """Every line moved to the right, but for empty ones."""
    return "\n".join(" " * by + line if line else line for line in text.split("\n"))
