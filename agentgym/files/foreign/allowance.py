"""Limit on the total bytes read from the files that an untrusted object names, even if it repeats a name."""

from pathlib import Path

from agentgym.files.foreign.opening import MOST_BYTES, UnreadableFileError


class Allowance:
    """Counts the bytes of files, including holes of sparse files, before they are read: at most `most` in total."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.most = self._left = most

    def take(self, path: Path, size: int) -> None:
        """Count the bytes to be read from a file.

        Raises:
            UnreadableFileError: If that exceeds the bytes left; the message names the file.
        """
        self._left -= size
        if self._left < 0:
            raise UnreadableFileError(
                f"{path}: with this file, more than {self.most:,} bytes would be read for one trajectory; each file "
                "counts each time it is named, and an image by its size as text; leave some out"
            )
