"""What is passed through to SGLang: against small packages written here, and against a real one if there is one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from megarl.config.sglang_fields import DECIDED_BY, installed_sglang_fields
from megarl.generation.servers.sglang_args import SglangModel, sglang_args
from tests.unit.config_files import MINIMAL, load_text, refusal

REAL = os.environ.get("MEGARL_SGLANG_PYTHON", "")

ONE_CLASS = '''
from typing import ClassVar, Dict, List, Literal, Optional, Union
import torch  # not installed there: the file must not be run

class PortArgs:
    rpc_port: int = 1

@dataclasses.dataclass
class ServerArgs:
    """Settings."""
    model_path: str
    trust_remote_code: bool = False
    mem_fraction_static: Optional[float] = None
    enable_torch_compile: bool = False
    schedule_policy: Literal["fcfs", "lpm"] = "fcfs"
    chunked_prefill_size: "Optional[int]" = None
    cuda_graph_bs: List[int] | None = None
    preferred_sampling_params: Optional[Union[str, Dict[str, int]]] = None
    hook: Optional[Callable] = None
    LIMIT: ClassVar[int] = 3
    _explicit: bool = False

    def validate(self):
        inner: int = 3
'''
MANY_CLASSES = {
    "srt/server_args.py": "class ServerArgs:\n    '''Its fields are elsewhere.'''\n",
    "srt/arg_groups/fields/__init__.py": "",
    "srt/arg_groups/fields/schedule.py": """
class Schedule(msgspec.Struct):
    _NS_PATH = "schedule"
    mem_fraction_static: A[Optional[float], "The fraction of the memory."] = None
    schedule_policy: A[Literal["fcfs", "lpm"], Arg(help="In which order.")] = "fcfs"
    gpu_id = Derived(default=None)
""",
    "srt/arg_groups/fields/model.py": """
class Model(msgspec.Struct):
    model_path: A[str, "The path."]
    enable_torch_compile: A[bool, "Compile."] = False
""",
}


@pytest.fixture(params=["one class", "many classes"])
def python(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The interpreter of an environment that has SGLang. It is no program: nobody may run it."""
    files = {"srt/server_args.py": ONE_CLASS} if request.param == "one class" else MANY_CLASSES
    for name, text in files.items():
        file = tmp_path / "environment/lib/python3.12/site-packages/sglang" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    interpreter = tmp_path / "environment/bin/python"
    interpreter.parent.mkdir()
    interpreter.write_text("#!/bin/false\n")
    interpreter.chmod(0o755)
    return str(interpreter)


def overrides(python: str, *options: str) -> list[str]:
    return [
        "generation.engine=sglang",
        f"generation.python={python}",
        *(f"generation.sglang.{option}" for option in options),
    ]


@pytest.mark.parametrize(
    ("option", "code", "words"),
    [
        ("mem_fraction_statik=0.8", "MRL-1001", "Did you mean generation.sglang.mem_fraction_static?"),
        ("nonsense=1", "MRL-1001", "is not an option of the installed SGLang."),
        ("gpu_id=1", "MRL-1001", "is not an option"),
        ("inner=1", "MRL-1001", "is not an option"),
        ("rpc_port=1", "MRL-1001", "is not an option"),
        ("LIMIT=1", "MRL-1001", "is not an option"),
        ("_explicit=true", "MRL-1001", "is not an option"),
        ("mem_fraction_static=much", "MRL-1003", 'static="much" is not allowed. It must be Optional[float].'),
        ("mem_fraction_static=true", "MRL-1003", "It must be Optional[float]."),
        ("enable_torch_compile=1", "MRL-1003", "It must be bool."),
        ("schedule_policy=random", "MRL-1003", "It must be Literal['fcfs', 'lpm']."),
        ("model_path=elsewhere", "MRL-1012", "Use model.path instead."),
        ("tp_size=2", "MRL-1012", "Use generation.tp_size instead."),
        ("trust_remote_code=true", "MRL-1012", "it is fixed"),
        ("load_format=auto", "MRL-1012", "it is fixed"),
    ],
)
def test_options_are_checked(python: str, tmp_path: Path, option: str, code: str, words: str) -> None:
    message = refusal(tmp_path, MINIMAL, *overrides(python, option))
    assert message.startswith(f"{code} command line generation.sglang.{option.partition('=')[0]}")
    assert words in message


def test_options_that_fit_are_accepted(python: str, tmp_path: Path) -> None:
    fitting = ("mem_fraction_static=1", "enable_torch_compile=true", "schedule_policy=lpm")
    config = load_text(tmp_path, MINIMAL, *overrides(python, *fitting))
    assert config.generation.sglang == {
        "mem_fraction_static": 1,
        "enable_torch_compile": True,
        "schedule_policy": "lpm",
    }
    assert load_text(tmp_path, MINIMAL, *overrides(python, "mem_fraction_static=null"))


@pytest.mark.parametrize("python", ["one class"], indirect=True)
@pytest.mark.parametrize(
    ("option", "fits"),
    [
        ("chunked_prefill_size=512", True),
        ("chunked_prefill_size=some", False),
        ("cuda_graph_bs=[1,2]", True),
        ("cuda_graph_bs=1", False),
        ("preferred_sampling_params={a: 1}", True),
        ("preferred_sampling_params=3", False),
        ("hook=3", True),  # what it means only SGLang knows
    ],
)
def test_compound_types(python: str, tmp_path: Path, option: str, fits: bool) -> None:
    if fits:
        load_text(tmp_path, MINIMAL, *overrides(python, option))
    else:
        assert "MRL-1003" in refusal(tmp_path, MINIMAL, *overrides(python, option))


def test_without_sglang_only_our_own_options_are_refused(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent" / "bin" / "python")
    assert installed_sglang_fields(absent) is None
    assert load_text(tmp_path, MINIMAL, *overrides(absent, "anything=1")).generation.sglang == {"anything": 1}
    assert "MRL-1012" in refusal(tmp_path, MINIMAL, *overrides(absent, "port=1"))


def test_a_package_that_cannot_be_read_counts_as_absent(python: str) -> None:
    package = Path(python).parents[1] / "lib/python3.12/site-packages/sglang"
    (package / "srt/server_args.py").write_text("class ServerArgs(:")
    assert installed_sglang_fields(python) is None


def test_everything_that_megarl_gives_is_decided_or_open(tmp_path: Path) -> None:
    """What the user sets wins, but for what is decided."""
    model = SglangModel(tmp_path, "float32", 64, 4)
    own = sglang_args(model, {})
    for name in own.keys() - DECIDED_BY.keys():
        assert sglang_args(model, {name: "mine"})[name] == "mine"
    assert own["trust_remote_code"] is False


@pytest.mark.skipif(not REAL, reason="MEGARL_SGLANG_PYTHON names no interpreter with SGLang")
def test_the_fields_are_those_of_the_real_class(tmp_path: Path) -> None:
    program = (
        "import dataclasses, json; from sglang.srt.server_args import ServerArgs as A; print(); "
        "print(json.dumps(list(getattr(A, '__struct_fields__', None) or [f.name for f in dataclasses.fields(A)])))"
    )
    done = subprocess.run([REAL, "-c", program], capture_output=True, text=True, check=True)
    real = {name for name in json.loads(done.stdout.splitlines()[-1]) if not name.startswith("_")}
    read = installed_sglang_fields(REAL)
    assert read is not None
    assert read.keys() == real
    assert real >= DECIDED_BY.keys()
    for device in ("cpu", "cuda"):
        assert real >= sglang_args(SglangModel(tmp_path, "float32", 64, 4, 1, device, True), {}).keys()
