"""The reward "code": what counts as passed, and what hostile answers cannot do."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.core.errors import DataError
from megarl.rewards.code import code, last_python_block
from megarl.rewards.code_run import Check, passes
from megarl.rewards.reward import Reward
from tests.unit.reward_samples import make_prompt, make_sample

ROOT = Path(__file__).parents[2]
ADD = "def add(a, b):\n    return a + b\n"


def run(text: str, tests: Any, **options: Any) -> Reward:
    return code(make_prompt(tests=tests), make_sample(f"Here:\n```python\n{text}\n```\n"), **options)


def is_passed(text: str, test: str, seconds: float = 5) -> bool:
    return passes(text, Check.from_statements(test), seconds, 1 << 30)


@pytest.mark.parametrize(
    ("text", "tests", "share"),
    [
        (ADD, ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"], 1),
        (ADD, "assert add(1, 2) == 3\nassert add('a', 'b') == 'ab'", 1),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0.5),
        (ADD, ["assert add(1, 2) > 4", "assert add(1, 2) > 2"], 0.5),
        (ADD, ["def check(f):\n    assert f(1, 2) == 3\ncheck(add)"], 1),
        ("f = lambda: {1: [2, (3, 'x')], None: {4}}", ["assert f() == {1: [2, (3, 'x')], None: {4}}"], 1),
        ("from collections import Counter as f", ["assert f('aab') == {'a': 2, 'b': 1}"], 1),
        ("def f(): return [1]", ["assert f() == (1,)"], 0),
        ("a, b = map(int, input().split())\nprint(a + b)", [{"input": "1 2\n", "output": "3"}], 1),
        ("print(int(input()) + 1)", {"inputs": ["1", "2", "3"], "outputs": ["2\n", "3 \n\n", "5"]}, 2 / 3),
        ("if __name__ == '__main__':\n    print('x')", [{"input": "", "output": "x"}], 1),
        ("syntax error", ["assert 1 == 1"], 0),
    ],
)
def test_the_share_of_passed_tests(text: str, tests: Any, share: float) -> None:
    assert run(text, tests, partial=True).value == share
    assert run(text, tests).value == float(share == 1)


def test_the_last_block_of_python_counts() -> None:
    text = "```python\nfirst\n```\n```bash\nls\n```\n```py\nsecond\n```\n```json\n{}\n```"
    assert last_python_block(text) == "second\n"
    assert last_python_block("```\nplain\n```") == "plain\n"
    assert last_python_block("no fence; ```python inline```") == ""
    assert code(make_prompt(tests=["assert 1 == 1"]), make_sample("assert True")) == Reward(0, {"has_code": 0})


@pytest.mark.parametrize(
    "tests", [None, [], "", [1], {"inputs": ["1"], "outputs": []}, [{"input": "1"}], [" "], {"inputs": 1, "outputs": 1}]
)
def test_rows_without_usable_tests_are_told(tests: Any) -> None:
    with pytest.raises(DataError, match=r"MRL-2182 .*'train.jsonl:3' has no tests under 'tests'"):
        run(ADD, tests)


FORGERIES = {
    "exit": "import sys; sys.exit(0)",
    "exit in the function": "import os\ndef add(a, b): os._exit(0)",
    "printing": "print('passed', 3)\nprint(True)",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))",
    "no asserts": "import sys\nsys.flags\n__debug__\ndef add(a, b): raise SystemExit(0)",
    "every descriptor": "import os\nfor fd in range(64):\n    try: os.write(fd, b'3\\nTrue\\n')\n"
    "    except OSError: pass\nos._exit(0)",
    "always equal": "class All:\n    def __eq__(self, other): return True\ndef add(a, b): return All()",
    "patched builtins": "import builtins\nbuiltins.repr = lambda x: 'True'\nbuiltins.AssertionError = int\n"
    "def add(a, b): return 4",
    "reading the test": "import os\ndef add(a, b): return int(open('test.py').read().split('==')[1])",
    "excepthook": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\ndef add(a, b): raise ValueError",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_pass_is_not_forged_by(name: str) -> None:
    assert not is_passed(FORGERIES[name], "assert add(1, 2) == 3")


@pytest.mark.parametrize(
    "name", ["exit", "exit in the function", "printing", "atexit", "every descriptor", "excepthook"]
)
def test_a_pass_of_statements_is_not_forged_by(name: str) -> None:
    assert not is_passed(FORGERIES[name], "assert add(1, 2) in (3, 3.0)")


def inspect_from_inside(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the statements, which assert what must not be possible, hold inside."""
    monkeypatch.setenv("MEGARL_TEST_SECRET", "hunter2")
    return is_passed(text.replace("OUTSIDE", str(tmp_path)), "assert 1 in (1, 2)")


@pytest.mark.parametrize(
    "text",
    [
        "import os\nassert not any('hunter2' in value for value in os.environ.values())",
        "import os\nfor pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try: assert b'hunter2' not in open(f'/proc/{pid}/environ', 'rb').read()\n"
        "    except OSError: pass",
        "try: open('OUTSIDE/canary', 'w')\nexcept OSError: pass\nelse: raise SystemError",
        "try: bytearray(10 << 30)\nexcept MemoryError: pass\nelse: raise SystemError",
        "open('scratch', 'w').write('x')",
        "import os\nassert len(os.listdir('/proc/self/fd')) < 7",
    ],
)
def test_inside(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert inspect_from_inside(text, tmp_path, monkeypatch)
    assert list(tmp_path.iterdir()) == []


def needs_namespaces() -> None:
    if subprocess.run(["unshare", "--user", "--net", "true"], capture_output=True).returncode != 0:
        pytest.skip("this system does not allow namespaces")


def test_there_is_no_network() -> None:
    needs_namespaces()
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        text = f"import socket\ntry: socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)\n"
        assert is_passed(text + "except OSError: pass\nelse: raise SystemError", "assert 1 in (1, 2)")


HANGING = {
    "loop": "while True: pass",
    "sleep": "import time\ntime.sleep(100)",
    "session": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\ntime.sleep(100)",
    "forks": "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)",
    "output": "while True: print('x' * 1000)",
    "ignored signals": "import signal, time\nfor n in range(1, 64):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
}


@pytest.mark.parametrize("name", HANGING)
def test_nothing_is_left_of(name: str) -> None:
    needs_namespaces()
    before = {process.pid for process in psutil.process_iter() if _is_box(process)}
    assert not is_passed(HANGING[name], "assert 1 in (1, 2)", seconds=0.7)
    left = {process.pid for process in psutil.process_iter() if _is_box(process)} - before
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in left if psutil.pid_exists(pid)], timeout=5)
    assert not alive


def _is_box(process: psutil.Process) -> bool:
    try:
        return any(word.endswith("code_box.py") for word in process.cmdline()) and process.status() != "zombie"
    except psutil.Error:
        return False


def test_a_slow_test_does_not_take_the_time_of_the_others() -> None:
    text = "def f(x):\n    while x == 1: pass\n    return x"
    tests = ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"]
    assert run(text, tests, partial=True, timeout_seconds=4).value == 2 / 3


def test_the_isolation_is_told(caplog: pytest.LogCaptureFixture) -> None:
    from megarl.rewards import code_run

    code_run._tell_isolation.cache_clear()
    with caplog.at_level(logging.INFO):
        is_passed("", "assert 1 in (1, 2)")
        is_passed("", "assert 1 in (1, 2)")
    assert [record.message.partition(": ")[0] for record in caplog.records] == ['reward "code"']


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="becomes another user")
@pytest.mark.parametrize("with_namespaces", [True, False])
def test_it_works_without_privileges(with_namespaces: bool) -> None:
    """By the system's own Python, which every user may start."""
    script = (
        "import logging; logging.basicConfig()\nfrom megarl.rewards.code_run import Check, passes\n"
        "text = 'def f(): return 3'\nfor value in (3, 4):\n"
        "    print(passes(text, Check.from_statements(f'assert f() == {value}'), 5, 1 << 30))"
    )
    python = "/usr/bin/python3"
    version = subprocess.run([python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True)
    if version.stdout.strip() != b"True":
        pytest.skip("no Python 3.11 for all users")
    if with_namespaces:
        needs_namespaces()
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-c", script]
    else:
        drop = "setpriv --bounding-set=-all --inh-caps=-all --securebits=+noroot,+noroot_locked"
        forbid = "echo 0 > /proc/sys/user/max_user_namespaces"
        command = ["unshare", "-Ur", "sh", "-c", f'{forbid} && exec {drop} {python} -c "$0"', script]
    ran = subprocess.run(command, capture_output=True, text=True, cwd="/", env={"PYTHONPATH": str(ROOT)}, timeout=30)
    assert ran.stdout == "True\nFalse\n", ran.stderr
    assert ("namespaces of a user" if with_namespaces else "limits only") in ran.stderr
