r"""Hostile answers to math_answer: nothing in them is run, all of them are wrong, and none changes what comes after.

They run in a process of their own, under an audit hook that sees everything that Python compiles, executes or opens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CANARY = "CANARY"
TOUCH = f"open('{CANARY}','w').write('x')"
HOSTILE = [
    # Python, in every dress
    TOUCH,
    f"__import__('os').system('touch {CANARY}')",
    f"os.system('touch {CANARY}')",
    f'exec("{TOUCH}")',
    f'eval("{TOUCH}")',
    f"(lambda: {TOUCH})()",
    f"[{TOUCH} for i in (1,)]",
    f"5 if {TOUCH} else 5",
    f"5 or {TOUCH}",
    f"{{**{{'a': {TOUCH}}}}}",
    "().__class__.__mro__[1].__subclasses__()",
    "''.__class__.__mro__[1].__subclasses__()[0].__init__.__globals__",
    "x.__class__.__base__.__subclasses__()",
    f'sympify("{TOUCH}")',
    f'parse_expr("{TOUCH}")',
    f'S("{TOUCH}")',
    "open(chr(67)+chr(65)+chr(78)+chr(65)+chr(82)+chr(89),chr(119))",
    "exec(bytes((111,112,101,110)).decode())",
    "getattr(__builtins__,chr(101)+chr(118)+chr(97)+chr(108))",
    "breakpoint()",
    "exit()",
    "import os; os._exit(0)",
    "f'{__import__(\"os\")}'",
    "1\n__import__('os')",
    "1;__import__('os')",
    # a forged reward: patch the grader, so that everything after it is right (the chain of CVE-2026-6878)
    "__import__('sys').modules['math_verify'].__dict__.update(verify=lambda *a, **k: True)",
    "[c for c in ().__class__.__base__.__subclasses__() if c.__name__=='Integer'][0].__eq__.__set__(lambda a,b:True)",
    "setattr(__import__('megarl.rewards.math_equal'),'are_equal',lambda g,a:True)",
    "sympy.Basic.__eq__",
    # LaTeX with effects
    r"\input{/etc/passwd}",
    r"\include{/etc/passwd}",
    rf"\immediate\write18{{touch {CANARY}}}",
    rf"\openout5={CANARY} \write5{{x}}",
    r"\def\x{\x\x}\x",
    r"\newcommand{\x}{\x}\x",
    r"\text{__import__('os')}",
    rf"\operatorname{{{TOUCH}}}",
    r"\mathrm{eval}(1)",
    r"x_{__import__('os')}",
    # numbers too large to write down
    "9^{9^{9^9}}",
    "9^{9^{9^{9^{9^9}}}}",
    "(9^9)^{9^9}",
    "10^{100000000}",
    "10^{-1000000000}",
    "0.1^{1000000000}",
    "(10^9)!",
    "9!!!!",
    r"\prod_{i=1}^{10000000} i",
    r"\sum_{i=1}^{10^{10}} i!",
    "(x+1)^{100000}",
    "(x+y+z)^{12345}",
    "1e999999999",
    "1E999999999",
    r"\operatorname{zeros}(100000,100000)",
    r"\variable{__import__('os')}",
    "9" * 5000,
    # shapes
    "(" * 300 + "1" + ")" * 300,
    "{" * 300 + "1" + "}" * 300,
    r"\frac{" * 100 + "1" + "}{2}" * 100,
    r"\sqrt{" * 100 + "2" + "}" * 100,
    "-" * 100_000 + "1",
    "1+" * 100_000 + "1",
    "{}" * 500_000,
    "|" * 1000,
    # text that is not what it looks like
    "\u0665",
    "\u202e5\u202c",
    "\uff15",
    "5\u0000",
    "\ud800",
    "\U0001d7d3",
    "5\u0301",
]
AUDIT = Path(__file__).with_name("math_audit.py")


def test_hostile_answers_have_no_effect(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, AUDIT],
        input=json.dumps(HOSTILE),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(AUDIT.parents[2])},
        timeout=60,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    result = json.loads(process.stdout)
    for answer, rewards in zip(HOSTILE, result["rewards"], strict=True):
        assert rewards == [0.0] * 3, answer[:100]
    assert result["seen"] == ["open"]
    assert list(tmp_path.iterdir()) == [], "something was written"


def test_the_corpus_is_large_enough() -> None:
    assert len(HOSTILE) >= 40
