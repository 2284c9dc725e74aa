"""The server, started by its folder: `python3 -I -S -B server CONFIG`."""

import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
# Last, and without the folder itself: nothing of ours stands in the way of the standard library.
sys.path[:] = [path for path in sys.path if path != FOLDER] + [os.path.dirname(FOLDER)]

from server.start import main  # type: ignore[import-not-found]

if __name__ == "__main__":
    main()
