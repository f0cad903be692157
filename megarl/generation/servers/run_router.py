"""Runs one sglang-router. Executed by path, by the interpreter that has it, which need not have megarl.

The settings come as one line of JSON on stdin, ``{"args": {field of RouterArgs: value}}``: the key must not be seen in
the process list, in the environment or in a file.
"""

import json
import sys


def main() -> None:
    """Route until a signal comes."""
    settings = json.loads(sys.stdin.readline())
    # Not by way of its launch module, which imports half of SGLang for a load balancer that is not used.
    from sglang_router.router import Router  # type: ignore[import-not-found]
    from sglang_router.router_args import RouterArgs  # type: ignore[import-not-found]

    Router.from_args(RouterArgs(**settings["args"])).start()


if __name__ == "__main__":
    main()
