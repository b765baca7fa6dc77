"""`python -m agentrl`, which is also what torchrun starts: `torchrun -m agentrl train ...`."""

import sys

from agentrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
