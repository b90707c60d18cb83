"""Run the command line as `python -m timm_ortho` or `torchrun -m timm_ortho`."""
import sys

from .cli import main

# spawned worker processes import this module under another name
if __name__ == "__main__":
    sys.exit(main())
