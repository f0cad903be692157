"""The architecture, checked by `ast`: layers, vendor fences, budgets and words.

Every import counts, wherever it stands: at the top, inside a function, or as the text of an `import_module` call.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import megarl

PACKAGE = Path(megarl.__file__).parent
# fmt: off
LAYERS = {
    "core": 0, "config": 0,
    "ops": 1, "metrics": 1,
    "algorithms": 2, "checkpoint": 2, "data": 2, "rewards": 2, "trackers": 2,
    "models": 3, "generation": 3, "report": 3, "rollout": 3, "weights": 3,
    "run": 4,
    "cli": 5, "launch": 5, "__main__": 5,
}
# fmt: on
TOP_LAYER = 5
# vendor -> where in megarl it may be imported (a module, or a package with everything in it)
FENCES: dict[str, tuple[str, ...]] = {
    "megatron": ("megarl.models",),
    "transformer_engine": (),
    "apex": (),
    # Scripts that the interpreter of SGLang executes by path, in processes of their own: the trainer never loads them.
    "sglang": ("megarl.generation.servers.run_sglang",),
    "sglang_router": ("megarl.generation.servers.run_router",),
    "transformers": (),
    "ray": ("megarl.launch.on_ray",),
    "wandb": ("megarl.trackers",),
    "swanlab": ("megarl.trackers",),
    "tensorboard": ("megarl.trackers",),
    "tensorboardX": ("megarl.trackers",),
    "torch.utils.tensorboard": ("megarl.trackers",),
}
# What must answer in well under a second: no module that these load may import torch at its top.
FREE_OF_TORCH = ("megarl.config", "megarl.report", "megarl.cli", "megarl.__main__")
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 80, 8
EMPTY_WORDS = ("utils", "misc", "helper", "common", "manager")
PICKLING_MODULES = (
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib",
    "multiprocessing.reduction", "torch.multiprocessing",
)  # fmt: skip
# SGLang takes tensors as a pickle only. This file may write one; reading, which is what executes, it may not either.
PICKLE_WRITER = "megarl.weights.sglang_payload"
PICKLE_WRITER_NEEDS = ("multiprocessing.reduction", "torch.multiprocessing")
PICKLE_READERS = ("load", "loads", "Unpickler")
UNSAFE_ATTRIBUTES = {
    "yaml": ("load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all", "Loader"),
    "torch": ("load",),
    "np": ("load",),
    "numpy": ("load",),
}
# torch.distributed's calls for objects, which pickle them
OBJECT_COLLECTIVES = (
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list",
)  # fmt: skip
# The one list that may name trust_remote_code: what `generation.sglang` must not set.
REFUSED_OPTIONS = ("megarl.config.sglang_fields", "DECIDED_BY")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Import:
    """One import statement's target, with the line and whether it runs when the module is loaded."""

    target: str
    line: int
    at_load: bool


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    source: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    def place(self, line: int) -> str:
        return f"{self.name}:{line}"


def read_modules(package: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path, source, ast.parse(source, str(path)))
    return modules


def imports_of(module: Module, modules: dict[str, Module]) -> Iterator[Import]:
    """Fully qualified targets; ``from package import module`` is an import of the module."""

    def visit(node: ast.AST, at_load: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_load)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.name.split(".")
                kept = parts[: len(parts) - node.level + module.is_package]
                base = ".".join([*kept, *([base] if base else [])])
            for alias in node.names:
                deeper = f"{base}.{alias.name}"
                yield Import(deeper if deeper in modules or deeper in FENCES else base, node.lineno, at_load)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from (Import(name, node.lineno, at_load) for name in names[:1] if isinstance(name, str))
        inner = at_load and not isinstance(node, FUNCTIONS) and not _is_type_checking(node)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inner)

    return visit(module.tree, True)


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def inside(name: str, *places: str) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


def unit_of(name: str) -> str:
    """``megarl.models.build`` -> ``models``; the root package itself is ``""``."""
    return name.split(".")[1] if "." in name else ""


# -- the rules: each takes all modules and yields violations


def wrong_layers(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        unit = unit_of(module.name)
        if unit and unit not in LAYERS:
            yield f"{module.name}: {unit} has no layer"
            continue
        for found in imports_of(module, modules):
            target = unit_of(found.target)
            if not inside(found.target, "megarl") or not target or target == unit:
                continue
            if target not in LAYERS:
                yield f"{module.place(found.line)}: {found.target} has no layer"
            elif not unit or not may_import(unit, target, found.target):
                ours, theirs = LAYERS.get(unit, 0), LAYERS[target]
                yield f"{module.place(found.line)}: layer {ours} imports {found.target} (layer {theirs})"


def may_import(unit: str, target: str, target_name: str) -> bool:
    if unit == "config":
        return inside(target_name, "megarl.core.errors", "megarl.core.secret")
    if LAYERS[unit] == LAYERS[target] == TOP_LAYER:
        return target != "__main__"
    return LAYERS[target] < LAYERS[unit]


def broken_fences(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        for found in imports_of(module, modules):
            for vendor, places in FENCES.items():
                if inside(found.target, vendor) and not inside(module.name, *places):
                    allowed = ", ".join(places) or "nowhere"
                    yield f"{module.place(found.line)}: imports {found.target}; allowed in: {allowed}"


def torch_where_it_is_slow(modules: dict[str, Module]) -> Iterator[str]:
    for start in modules:
        if not inside(start, *FREE_OF_TORCH):
            continue
        chains = {start: start}
        queue = [start]
        while queue:
            name = queue.pop()
            for found in imports_of(modules[name], modules):
                if inside(found.target, "torch") and (found.at_load or name == start):
                    yield f"{modules[name].place(found.line)}: torch is imported by way of {chains[name]}"
                for loaded in _loaded_with(found.target, modules) if found.at_load else ():
                    if loaded not in chains:
                        chains[loaded] = f"{chains[name]} -> {loaded}"
                        queue.append(loaded)


def _loaded_with(target: str, modules: dict[str, Module]) -> list[str]:
    """Importing a module runs its packages too."""
    parts = target.split(".")
    prefixes = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return [prefix for prefix in prefixes if prefix in modules]


def import_cycles(modules: dict[str, Module]) -> Iterator[str]:
    """Strongly connected modules, by repeatedly taking away those that import nothing that is left."""
    edges = {
        name: {found.target for found in imports_of(module, modules)} & modules.keys() - {name}
        for name, module in modules.items()
    }
    for reverse in (False, True):
        while True:
            pointed_at = {target for targets in edges.values() for target in targets}
            loose = [name for name in edges if (name not in pointed_at if reverse else not edges[name])]
            if not loose:
                break
            edges = {name: targets - set(loose) for name, targets in edges.items() if name not in loose}
    for name, targets in edges.items():
        yield f"{name} is in an import cycle with {', '.join(sorted(targets))}"


def exceeded_budgets(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        num_lines = len(module.source.splitlines())
        if num_lines > MAX_FILE_LINES:
            yield f"{module.name}: {num_lines} lines (at most {MAX_FILE_LINES})"
        for node in ast.walk(module.tree):
            if isinstance(node, FUNCTIONS):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    yield f"{module.place(node.lineno)}: {node.name} has {length} lines (at most {MAX_FUNCTION_LINES})"
                count = _num_parameters(node.args)
                if count > MAX_PARAMETERS:
                    yield f"{module.place(node.lineno)}: {node.name} has {count} parameters (at most {MAX_PARAMETERS})"


def _num_parameters(arguments: ast.arguments) -> int:
    positional = [*arguments.posonlyargs, *arguments.args]
    receiver = bool(positional) and positional[0].arg in ("self", "cls")
    extra = (arguments.vararg is not None) + (arguments.kwarg is not None)
    return len(positional) - receiver + len(arguments.kwonlyargs) + extra


def empty_words(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        names = [(part, 1) for part in module.name.split(".")]
        names += [(n.name, n.lineno) for n in ast.walk(module.tree) if isinstance(n, (*FUNCTIONS, ast.ClassDef))]
        for name, line in names:
            if any(word in name.lower() for word in EMPTY_WORDS):
                yield f"{module.place(line)}: {name!r} says nothing about what it does"


def unsafe_code(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        for found in imports_of(module, modules):
            may_write = module.name == PICKLE_WRITER and inside(found.target, *PICKLE_WRITER_NEEDS)
            if inside(found.target, *PICKLING_MODULES) and not may_write:
                yield f"{module.place(found.line)}: imports {found.target}"
        for node in ast.walk(module.tree):
            line = getattr(node, "lineno", 0)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                yield f"{module.place(line)}: calls {node.func.id}"
            elif module.name == PICKLE_WRITER and _name_of(node) in PICKLE_READERS:
                yield f"{module.place(line)}: {_name_of(node)} reads a pickle"
            elif isinstance(node, ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                if node.attr in UNSAFE_ATTRIBUTES.get(owner, ()) or node.attr in OBJECT_COLLECTIVES:
                    yield f"{module.place(line)}: {ast.unparse(node)} executes what it reads"
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                yield f"{module.place(line)}: {node.arg}"
        yield from pickles(module)
        yield from trusted_code(module)


def pickles(module: Module) -> Iterator[str]:
    """torch's and multiprocessing's picklers, which no import of pickle shows."""
    for node in ast.walk(module.tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name.endswith("Unpickler") or (name.endswith("Pickler") and module.name != PICKLE_WRITER):
            yield f"{module.place(node.lineno)}: {name}"  # type: ignore[attr-defined]
        elif isinstance(node, ast.Attribute) and name in ("loads", "load") and "Pickler" in ast.unparse(node.value):
            yield f"{module.place(node.lineno)}: {ast.unparse(node)} executes what it reads"


def trusted_code(module: Module) -> Iterator[str]:
    """trust_remote_code anywhere but in ``"trust_remote_code": False`` and in the list of refused options."""
    off: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            off |= {id(key) for key, value in pairs if isinstance(value, ast.Constant) and value.value is False}
        elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant) and node.value.value is False:
            off.add(id(node))
        elif isinstance(node, ast.AnnAssign) and (module.name, ast.unparse(node.target)) == REFUSED_OPTIONS:
            off |= {id(part) for part in ast.walk(node)}
    for node in ast.walk(module.tree):
        named = node.arg if isinstance(node, ast.keyword) else node.value if isinstance(node, ast.Constant) else None
        attribute = isinstance(node, ast.Attribute) and node.attr == "trust_remote_code"
        if attribute or (named == "trust_remote_code" and id(node) not in off):
            yield f"{module.place(node.lineno)}: trust_remote_code"  # type: ignore[attr-defined]


def _name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.alias):
        return node.name
    return node.id if isinstance(node, ast.Name) else ""


def prints(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield f"{module.place(node.lineno)}: print("


Rule = Callable[[dict[str, Module]], Iterator[str]]
RULES: tuple[Rule, ...] = (
    wrong_layers, broken_fences, torch_where_it_is_slow, import_cycles,
    exceeded_budgets, empty_words, unsafe_code, prints,
)  # fmt: skip


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return read_modules(PACKAGE)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_megarl_keeps_the_rule(rule: Rule, modules: dict[str, Module]) -> None:
    violations = sorted(set(rule(modules)))
    assert not violations, f"{len(violations)} violations of {rule.__name__}:\n" + "\n".join(violations)


def test_the_checker_reads_the_whole_package(modules: dict[str, Module]) -> None:
    """The rules above could not fail on an empty tree."""
    assert len(modules) > 80
    assert {unit_of(name) for name in modules} - {""} <= LAYERS.keys()
    assert any(found.target == "megatron.core" for found in imports_of(modules["megarl.models.setup"], modules))
    lazy = [found for found in imports_of(modules["megarl.cli"], modules) if not found.at_load]
    assert "megarl.launch.start" in {found.target for found in lazy}


PLANTED: list[tuple[Rule, str, str, str]] = [
    (wrong_layers, "data/x.py", "import megarl.models", "imports megarl.models"),
    (wrong_layers, "data/x.py", "def f():\n    from megarl.models import build", "megarl.data.x:2"),
    (wrong_layers, "data/x.py", "from ..rewards import score", "imports megarl.rewards"),
    (wrong_layers, "models/x.py", "from megarl.generation.fleet import Fleet", "(layer 3)"),
    (wrong_layers, "ops/x.py", "from megarl.metrics import meter", "(layer 1)"),
    (wrong_layers, "core/x.py", "from megarl.config import schema", "layer 0 imports"),
    (wrong_layers, "config/x.py", "from megarl.core import batch", "megarl.core"),
    (wrong_layers, "config/x.py", "from megarl.core.batch import MicroBatch", "megarl.core.batch"),
    (wrong_layers, "run/x.py", "import importlib\nimportlib.import_module('megarl.launch')", "imports megarl.launch"),
    (wrong_layers, "__init__.py", "from megarl.core import batch", "imports megarl.core"),
    (wrong_layers, "extras/x.py", "", "extras has no layer"),
    (broken_fences, "run/x.py", "from megatron.core import parallel_state", "allowed in: megarl.models"),
    (broken_fences, "run/x.py", "import importlib\nimportlib.import_module('megatron.core')", "megatron"),
    (broken_fences, "models/x.py", "def f():\n    import transformer_engine.pytorch as te", "nowhere"),
    (broken_fences, "models/x.py", "import apex", "nowhere"),
    (broken_fences, "generation/x.py", "import sglang", "megarl.generation.servers.run_sglang"),
    (broken_fences, "generation/servers/processes.py", "import sglang.srt", "megarl.generation.servers.run_sglang"),
    (broken_fences, "generation/servers/run_sglang.py", "import sglang_router", "megarl.generation.servers.run_router"),
    (broken_fences, "data/x.py", "from transformers import AutoTokenizer", "nowhere"),
    (broken_fences, "launch/x.py", "import ray", "megarl.launch.on_ray"),
    (broken_fences, "run/x.py", "import wandb", "megarl.trackers"),
    (broken_fences, "run/x.py", "import swanlab", "megarl.trackers"),
    (broken_fences, "run/x.py", "from torch.utils.tensorboard import SummaryWriter", "megarl.trackers"),
    (torch_where_it_is_slow, "config/x.py", "def f():\n    import torch", "torch is imported"),
    (torch_where_it_is_slow, "cli.py", "from megarl.core import batch", "megarl.cli -> megarl.core"),
    (import_cycles, "core/batch.py", "import torch\ndef f():\n    import megarl.core.other", "import cycle with"),
    (exceeded_budgets, "core/x.py", "x = 1\n" * 401, "401 lines"),
    (exceeded_budgets, "core/x.py", "def f():\n" + "    x = 1\n" * 80, "f has 81 lines"),
    (exceeded_budgets, "core/x.py", "def f(a, b, /, c, d, *e, g, h, i, **j): ...", "f has 9 parameters"),
    (empty_words, "core/math_utils.py", "", "'math_utils'"),
    (empty_words, "common/x.py", "", "'common'"),
    (empty_words, "core/x.py", "class RunManager: ...", "'RunManager'"),
    (empty_words, "core/x.py", "class A:\n    async def load_helper(self): ...", "megarl.core.x:2"),
    (unsafe_code, "core/x.py", "def f():\n    from pickle import loads", "imports pickle"),
    (unsafe_code, "weights/x.py", "from multiprocessing.reduction import ForkingPickler", "multiprocessing.reduction"),
    (unsafe_code, "weights/x.py", "import torch.multiprocessing as shared", "imports torch.multiprocessing"),
    (unsafe_code, "weights/sglang_payload.py", "from pickle import loads", "loads reads a pickle"),
    (unsafe_code, "weights/sglang_payload.py", "import pickle\npickle.Unpickler(f)", "Unpickler reads a pickle"),
    (unsafe_code, "core/x.py", "eval('1')", "calls eval"),
    (unsafe_code, "core/x.py", "exec('1')", "calls exec"),
    (unsafe_code, "core/x.py", "import yaml\nyaml.load('')", "yaml.load"),
    (unsafe_code, "core/x.py", "import torch\ntorch.load('x')", "torch.load"),
    (unsafe_code, "core/x.py", "import numpy as np\nnp.load('x', allow_pickle=True)", "allow_pickle"),
    (unsafe_code, "core/x.py", "import torch.distributed as dist\ndist.all_gather_object([], 1)", "all_gather_object"),
    (unsafe_code, "core/x.py", "f(trust_remote_code=True)", "trust_remote_code"),
    (unsafe_code, "core/x.py", "f(trust_remote_code=user)", "trust_remote_code"),
    (unsafe_code, "core/x.py", "x = {'trust_remote_code': True}", "trust_remote_code"),
    (unsafe_code, "core/x.py", "x = {'trust_remote_code': 0}", "trust_remote_code"),
    (unsafe_code, "core/x.py", "x['trust_remote_code'] = False", "trust_remote_code"),
    (unsafe_code, "core/x.py", "x.trust_remote_code = True", "trust_remote_code"),
    (unsafe_code, "config/x.py", "DECIDED_BY: dict = {'trust_remote_code': ''}", "trust_remote_code"),
    (
        unsafe_code,
        "weights/x.py",
        "from torch.multiprocessing.reductions import ForkingPickler\nForkingPickler(x)",
        "Pick",
    ),
    (unsafe_code, "weights/sglang_payload.py", "import pickle", "imports pickle"),
    (unsafe_code, "weights/sglang_payload.py", "reductions.ForkingPickler.loads(b'')", "executes what it reads"),
    (prints, "core/x.py", "def f():\n    print('x')", "megarl.core.x:2: print("),
]


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """A package that keeps every rule, with the exceptions that the rules allow."""
    files = {
        "__init__.py": "__version__ = '1'",
        "__main__.py": "from megarl.cli import main",
        "cli.py": "from megarl import __version__\ndef f():\n    from megarl.launch import on_ray",
        "launch/on_ray.py": "import ray\nfrom megarl.run import loop",
        "run/loop.py": "from megarl.models import build\nfrom megarl.data import prompts",
        "models/build.py": "from megatron.core import parallel_state\nfrom megarl.metrics import meter",
        "rollout/single.py": "from megarl.data import prompts\nfrom megarl.rewards import score",
        "trackers/to_wandb.py": "import wandb",
        "data/prompts.py": "from megarl.core import batch\nfrom megarl.config import schema",
        "generation/servers/run_sglang.py": "from sglang.launch_server import run_server",
        "generation/servers/run_router.py": "def f():\n    import sglang_router.router",
        "generation/servers/sglang_args.py": "x = {'trust_remote_code': False}\nf(trust_remote_code=False)",
        "config/sglang_fields.py": "DECIDED_BY: dict[str, str] = {'trust_remote_code': ''}",
        "weights/sglang_payload.py": "from multiprocessing.reduction import ForkingPickler\nForkingPickler(x).dump(1)",
        "rewards/score.py": "",
        "metrics/meter.py": "",
        "config/schema.py": "from megarl.core.errors import ConfigError",
        "core/errors.py": "",
        "core/batch.py": "import torch\nclass A:\n    def f(self, a, b, c, d, e, f, g, h):\n        self.model.eval()",
        "core/other.py": "from megarl.core import batch",
    }
    root = tmp_path / "megarl"
    for name, text in files.items():
        write(root / name, text)
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (path.parent / "__init__.py").exists():
        (path.parent / "__init__.py").write_text("")
    path.write_text(text)


def test_a_tree_that_keeps_the_rules_passes(small_tree: Path) -> None:
    modules = read_modules(small_tree)
    assert [violation for rule in RULES for violation in rule(modules)] == []


@pytest.mark.parametrize(("rule", "path", "text", "told"), PLANTED)
def test_a_planted_violation_is_caught(rule: Rule, path: str, text: str, told: str, small_tree: Path) -> None:
    write(small_tree / path, text)
    violations = list(rule(read_modules(small_tree)))
    assert any(told in violation for violation in violations), violations
