"""Runs one SGLang server. Executed by path, by the interpreter that has SGLang, which need not have megarl.

The settings come as one line of JSON on stdin, ``{"args": {field of ServerArgs: value}}``: keys must not be seen in the
process list, in the environment or in a file. SGLang spawns processes that read this file again, hence the guard.
"""

import json
import os
import sys


def main() -> None:
    """Serve until a signal comes."""
    settings = json.loads(sys.stdin.readline())
    from sglang.launch_server import run_server  # type: ignore[import-not-found]
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found]
    from sglang.srt.utils import kill_process_tree  # type: ignore[import-not-found]

    try:
        run_server(ServerArgs(**settings["args"]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
