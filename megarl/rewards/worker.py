"""``python -m megarl.rewards.worker``: a fresh interpreter that scores samples with one reward function.

It imports little before it has divided itself into a guard and a worker, and never torch.
"""

from __future__ import annotations

import json
import sys

from megarl.rewards.guard import Isolation, Terms, guard


def main() -> None:
    """The driver's terms are the only argument."""
    terms = Terms(**json.loads(sys.argv[1]))

    def work(isolation: Isolation) -> None:
        from megarl.rewards.serve import Worker

        Worker(terms.requests, terms.replies).work(isolation)

    guard(terms, work)


if __name__ == "__main__":
    main()
