"""How much may be read of all files that one untrusted thing names: many names of one file never become many bytes."""

from pathlib import Path

from agentgym.files.foreign.opening import MOST_BYTES, UnreadableFileError


class Allowance:
    """Counts the bytes of files before they are read, up to a total of `most` bytes; holes count, too."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most = self._left = most

    def take(self, path: Path, size: int) -> None:
        """Count what is to be read of a file; UnreadableFileError, which names it, if that is more than is left."""
        self._left -= size
        if self._left < 0:
            raise UnreadableFileError(
                f"{path}: with it, more than {self.most:,} bytes would be read for one trajectory; each file counts as "
                "often as it is named, an image as text; leave some out"
            )
