"""The documentation tells the truth: links, commands, shown output, error codes, exit codes and versions."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl import cli
from megarl.cli import main
from megarl.config.load import load_config
from megarl.config.preflight import require_inputs
from megarl.core import errors
from megarl.core.sample import Prompt, Sample
from megarl.run.evaluation_plan import config_to_evaluate

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMANDS = ("check", "train", "launch", "eval", "doctor", "report", "samples", "export", "track")


@dataclass(frozen=True)
class Command:
    """A command line of a page. ``output`` is what the page shows below it, None where it shows nothing."""

    page: Path
    words: tuple[str, ...]
    output: str | None

    def __str__(self) -> str:
        return f"{self.page.name}: {' '.join(self.words)}"


def commands() -> Iterator[Command]:
    """All lines of bash blocks, and the lines after ``$`` of console blocks with the output below them."""
    for page in PAGES:
        for language, block in FENCE.findall(page.read_text(encoding="utf-8").replace("\\\n", "")):
            if language == "bash":
                for line in block.splitlines():
                    yield from (Command(page, words, None) for words in _simple_commands(line))
            elif language == "console":
                for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                    line, _, output = part.partition("\n")
                    yield from (Command(page, words, output) for words in _simple_commands(line))


def _simple_commands(line: str) -> Iterator[tuple[str, ...]]:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # PYTHONPATH=…
        words = words[1:]
    if words and "|" not in words:
        yield tuple(words)


def megarl_arguments(command: Command) -> list[str] | None:
    """What follows ``megarl`` in a command, however it is started; None if it starts something else."""
    words = list(command.words)
    if words[:3] == ["ray", "job", "submit"]:
        words = words[words.index("--") + 1 :]
    if words[0].removeprefix(".venv/bin/") == "megarl":
        return words[1:]
    if "-m" in words[:-1] and words[words.index("-m") + 1] == "megarl":
        return words[words.index("-m") + 2 :]
    return None


ALL_COMMANDS = list(commands())
MEGARL_COMMANDS = [command for command in ALL_COMMANDS if megarl_arguments(command) is not None]
MAKE_COMMANDS = [command for command in ALL_COMMANDS if command.words[0] == "make"]


def slugs(page: Path) -> set[str]:
    """The anchors that headings get on a rendered page."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in slugs(linked), f"{page.name} links to {target}; headings: {sorted(slugs(linked))}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    found = {ROOT / "README.md"}
    queue = list(found)
    while queue:
        page = queue.pop()
        targets = (target.partition("#")[0] for target in LINK.findall(page.read_text(encoding="utf-8")))
        linked = {(page.parent / target).resolve() for target in targets if target.endswith(".md")}
        new = {path for path in linked if path.is_file()} - found
        found |= new
        queue += new
    assert found >= {page for page in PAGES if "docs" in page.parts}


def test_there_are_commands_to_check() -> None:
    shown = {megarl_arguments(command)[0] for command in MEGARL_COMMANDS}  # type: ignore[index]
    assert shown == set(COMMANDS)
    assert {"quickstart", "test"} <= {word for command in MAKE_COMMANDS for word in command.words}


@pytest.mark.parametrize("command", MEGARL_COMMANDS, ids=str)
def test_megarl_commands_are_right(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``check`` and ``launch slurm`` are run, must print what the page shows, and submit nothing; ``train`` and
    ``doctor`` are checked up to where they would start, and ``eval``, ``report``, ``samples``, ``export`` and ``track``
    up to where they would look for the run or model.
    """
    monkeypatch.chdir(ROOT)
    arguments = megarl_arguments(command)
    assert arguments is not None
    assert arguments[0] in COMMANDS
    if arguments[0] == "eval":
        parsed = cli._parser().parse_args(arguments)
        config = config_to_evaluate(load_config(parsed.config, parsed.overrides), parsed.set)
        require_inputs(config, trains=False)
        return
    if arguments[0] in ("report", "samples", "export", "track"):
        parsed = cli._parser().parse_args(arguments)
        assert parsed.run.parts[0] == "runs"
        load_config(ROOT / "configs" / f"{parsed.run.name}.yaml", getattr(parsed, "overrides", ()))
        return
    if arguments[:2] == ["launch", "slurm"]:
        arguments = without_effects(arguments)
    elif arguments[0] == "launch":
        parsed, rest = cli._parser().parse_known_args(arguments)
        require_inputs(load_config(parsed.config, [*parsed.overrides, *rest]))
        return
    if arguments[0] in ("train", "doctor"):
        words = [word for word in arguments[1:] if word != "--fresh"]
        config = load_config(Path(words[0]), words[1:])
        require_inputs(config)
        options = dict(word.split("=", 1) for word in command.words if word.startswith("--") and "=" in word)
        if "--nproc-per-node" in options:
            started = int(options["--nproc-per-node"]) * int(options.get("--nnodes", 1))
            assert started == config.run.num_ranks
        return
    code = main(arguments)
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    assert code == (0 if command.output is None or "MRL-" not in command.output else 64), printed
    if command.output is not None:
        pieces = [piece.strip("\n") for piece in re.split(r"^\.\.\.$", command.output, flags=re.MULTILINE)]
        position = 0
        for piece in pieces:
            position = printed.find(piece, position)
            assert position >= 0, f"{command} does not print\n{piece}\nbut\n{printed}"
            position += len(piece)


def without_effects(words: list[str]) -> list[str]:
    """``launch slurm`` that only prints the file."""
    if "--out" in words:
        place = words.index("--out")
        words = words[:place] + words[place + 2 :]
    return [word for word in words if word != "--submit"]


@pytest.mark.parametrize("command", MAKE_COMMANDS, ids=str)
def test_make_targets_exist(command: Command) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(command.words[1:]) <= targets


def test_scripts_in_commands_exist() -> None:
    for command in ALL_COMMANDS:
        for word in command.words:
            if word.startswith(("tools/", "configs/", "examples/", ".ci/")):
                assert (ROOT / word).exists(), command


def test_every_error_code_is_explained_and_no_other() -> None:
    raised: set[str] = set()
    for path in (ROOT / "megarl").rglob("*.py"):
        raised |= set(re.findall(r"MRL-\d{4}", path.read_text(encoding="utf-8")))
    rows = re.findall(r"^\| (MRL-\d{4}) \| (.+?) \| (.+?) \|$", read("docs/debugging.md"), re.MULTILINE)
    explained = [code for code, _, _ in rows]
    assert explained == sorted(set(explained)), "codes in order, each once"
    assert raised - set(explained) == set(), "add these to docs/debugging.md"
    assert set(explained) - raised == set(), "remove these from docs/debugging.md"


def test_every_exit_code_is_explained_and_no_other() -> None:
    own = [errors.MegarlError, *errors.MegarlError.__subclasses__(), *errors.Preempted.__subclasses__()]
    shell = {130, 141, 143}  # Ctrl-C, a closed pipe and SIGTERM, as shells report them
    used = {errors.EXIT_OK, errors.EXIT_INTERNAL, *(kind.exit_code for kind in own), *shell}
    section = read("docs/debugging.md").partition("## Exit codes")[2].partition("\n## ")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)} == used


def test_design_documents_are_numbered_without_gaps() -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "design").iterdir())
    assert [name[:5] for name in names] == [f"{number:04d}-" for number in range(1, len(names) + 1)]
    for name in names:
        assert read(f"docs/design/{name}").startswith(f"# {name[:4]}: ")


def test_the_dependencies_are_those_of_the_matrix() -> None:
    pins = dict(re.findall(r"^([\w.\-]+)==(\S+)$", read("constraints.txt"), re.MULTILINE))
    asked_for = set()
    for call in re.findall(r"pinned\(([^)]*)\)", read("setup.py").partition("\nsetup(")[2]):
        asked_for |= {name.partition("[")[0] for name in re.findall(r'"([^"]+)"', call)}
    rows = re.findall(r"^\| ([\w.\-]+) \| (\d\S*) \|", read("docs/design/0003-dependencies.md"), re.MULTILINE)
    assert dict(rows) == {name: pins[name] for name in asked_for}


def test_ci_and_hooks_name_what_exists() -> None:
    assert ".ci/run" in read(".github/workflows/ci.yml")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert "repo: local" in read(".pre-commit-config.yaml")


def test_the_changelog_starts_with_this_version() -> None:
    version = importlib.import_module("megarl").__version__
    assert re.findall(r"^## \[(.+?)\]", read("CHANGELOG.md"), re.MULTILINE)[0] == version


def test_the_example_reward_gives_partial_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.rewards.load import load_reward

    monkeypatch.syspath_prepend(str(ROOT))
    config = load_config(ROOT / "examples" / "custom_reward" / "config.yaml", [])
    (settings,) = config.reward
    reward = load_reward(settings.name, settings.options)

    def score(response: str) -> float:
        return float(reward.function(_prompt("1033"), _sample(response), **reward.options))

    assert score("6+7=13:1033") == 1.0
    assert score("6+7=13:923") == 0.5 * 1 / 4  # only the last digit is right
    assert score("6+7=13:1034") == 0.5 * 3 / 4
    assert score("1033") == 0.0
    assert score("6+7=13:") == 0.0


def _prompt(answer: str) -> Prompt:
    import numpy as np

    return Prompt("p", "556+477=", np.zeros(1, dtype=np.int64), answer=answer)


def _sample(response: str) -> Sample:
    import numpy as np

    return Sample(
        np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int8), np.zeros(1, dtype=np.float32), "stop", response
    )


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
