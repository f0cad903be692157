"""Runs one SGLang server. Executed by path, by the interpreter that has SGLang, which need not have megarl.

The settings come as one line of JSON on stdin, ``{"args": {field of ServerArgs: value}}``: keys must not be seen in the
process list, in the environment or in a file. SGLang spawns processes that read this file again, hence the guard.
"""

import json
import logging
import os
import sys


def main() -> None:
    """Serve until a signal comes."""
    settings = json.loads(sys.stdin.readline())
    mask_in_logs([settings["args"][name] for name in ("api_key", "admin_api_key") if settings["args"].get(name)])
    from sglang.launch_server import run_server  # type: ignore[import-not-found]
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found]
    from sglang.srt.utils import kill_process_tree  # type: ignore[import-not-found]

    try:
        run_server(ServerArgs(**settings["args"]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def mask_in_logs(secrets: list[str]) -> None:
    """SGLang logs all of its settings, keys included, when it starts."""
    make_record = logging.getLogRecordFactory()

    def make_masked_record(*args, **kwargs) -> logging.LogRecord:  # type: ignore[no-untyped-def]
        record = make_record(*args, **kwargs)
        message = record.getMessage()
        for secret in secrets:
            message = message.replace(secret, "***")
        record.msg, record.args = message, ()
        return record

    logging.setLogRecordFactory(make_masked_record)


if __name__ == "__main__":
    main()
