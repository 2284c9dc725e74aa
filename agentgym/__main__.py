"""The `agentgym` command as `python -m agentgym`."""

import sys

from agentgym.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
