"""`python -m timm_ortho`, and `torchrun -m timm_ortho`."""
import sys

from .cli import main

# guarded: worker processes that are started anew import this module under another name
if __name__ == "__main__":
    sys.exit(main())
