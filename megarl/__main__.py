"""``python -m megarl`` is the same as ``megarl``."""

import sys

from megarl.cli import main

if __name__ == "__main__":
    sys.exit(main())
