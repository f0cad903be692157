"""What users write about conversations: settings, functions, the reward outcome, rehearsals, the docs and examples."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config.load import load_config
from megarl.config.rewards import RewardSettings
from megarl.config.scoring import ScoringSettings
from megarl.core.errors import ConfigError, DataError, MegarlError
from megarl.core.sample import Group, Prompt, Sample, Turn
from megarl.data.pack import pack
from megarl.data.plan import PackPlan
from megarl.data.record import read_groups, write_groups
from megarl.metrics.meter import Meter
from megarl.rewards.load import load_reward
from megarl.rewards.reward import Reward
from megarl.rewards.scorer import Scorer
from megarl.rollout.converse import check_converse, load_converse
from megarl.rollout.rehearsal import rehearse
from megarl.rollout.statistics import report_rollouts
from megarl.rollout.trial import try_converse
from tests.unit.one_rank import one_rank_world, reported

ROOT = Path(__file__).parents[2]
CALCULATOR = ROOT / "examples" / "calculator_tool" / "config.yaml"
GUESS = ROOT / "examples" / "guess_number" / "config.yaml"


def of_two_turns() -> Sample:
    """Prompt of 2, 3 tokens of the policy, 2 of a tool, 1 of the policy."""
    return Sample(
        token_ids=np.array([5, 6, 7, 8, 1, 9, 10, 1]),
        loss_mask=np.array([0, 0, 1, 1, 1, 0, 0, 1], dtype=np.int8),
        rollout_logprobs=np.array([0, 0, -1, -2, -3, 0, 0, -4], dtype=np.float32),
        finish="stop",
        response="ab\ncd\n",
        turns=(Turn("policy", "ab", 3), Turn("environment", "cd", 2), Turn("policy", "", 1)),
        outcome=0.5,
        failure="",
    )


def prompt(answer: str | None = None) -> Prompt:
    return Prompt("p", "x", np.array([5, 6]), answer)


# -- samples with turns, downstream


def test_turns_outcome_and_failure_are_recorded(tmp_path: Path) -> None:
    sample = of_two_turns()
    sample.failure = "MRL-2151 too slow"
    write_groups(tmp_path / "groups.jsonl", 1, [Group(prompt(), [sample])])
    ((group,),) = read_groups(tmp_path / "groups.jsonl").values()
    (read,) = group.samples
    assert (read.turns, read.outcome, read.failure) == (sample.turns, 0.5, "MRL-2151 too slow")


def test_recordings_from_before_turns_are_still_read(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    write_groups(path, 1, [Group(prompt(), [of_two_turns()])])
    text = re.sub(r'"(turns|outcome|failure)":(\[\[.*?\]\]|0.5|""),', "", path.read_text())
    assert "turns" not in text and "outcome" not in text and "failure" not in text
    path.write_text(text)
    ((group,),) = read_groups(path).values()
    assert (group.samples[0].turns, group.samples[0].outcome, group.samples[0].failure) == ((), None, "")


def test_lengths_and_turns_are_counted_with_and_without_the_tool() -> None:
    with one_rank_world() as world:
        meter = Meter()
        report_rollouts([Group(prompt(), [of_two_turns()])], 16, 16, 1, meter)
        numbers = reported(meter, world)
    assert numbers["response_length/mean"] == 6
    assert numbers["tokens/response_length/mean"] == 4
    assert numbers["rollout/num_turns/mean"] == 2
    assert numbers["rollout/num_tool_tokens/mean"] == 2


def test_a_tools_tokens_carry_no_loss() -> None:
    sample = of_two_turns()
    (batch,) = pack([Group(prompt(), [sample])], PackPlan(1, 1, 100))
    (micro,) = batch.microbatches()
    assert micro.loss_mask.tolist() == sample.loss_mask.tolist()
    assert micro.loss_weight[micro.loss_mask == 0].tolist() == [0] * 4
    assert micro.newest_mask.tolist() == sample.loss_mask.tolist()
    assert micro.rollout_logprobs.tolist() == sample.rollout_logprobs.tolist()


# -- the reward outcome


def test_the_reward_outcome_is_what_the_function_said() -> None:
    reward = load_reward("outcome", {})
    sample = of_two_turns()
    sample.scores = {"calls": 2.0}
    assert reward.function(prompt(), sample) == Reward(0.5, {"calls": 2.0})
    sample.outcome = None
    with pytest.raises(DataError, match="MRL-2183"):
        reward.function(prompt(), sample)


def scorer(**settings: Any) -> Scorer:
    return Scorer([RewardSettings(name="outcome")], ScoringSettings(**settings))


def test_a_failed_conversation_is_not_scored_and_its_group_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    failed, whole, alone = of_two_turns(), of_two_turns(), of_two_turns()
    failed.outcome, failed.failure = None, 'MRL-2151 converse "x" was busy for more than 1 s.'
    groups = [Group(prompt(), [failed, whole]), Group(prompt(), [alone])]
    own = scorer(max_failed_fraction=0.5)
    for group in groups:
        for sample in group.samples:
            own.submit(group.prompt, sample)
    assert own.finish(groups, Meter()) == groups[1:]
    assert (failed.reward, failed.failure) == (None, 'MRL-2151 converse "x" was busy for more than 1 s.')
    assert alone.reward == 0.5
    assert "failed (MRL-2151) for 1 of 3 samples" in caplog.text
    own.close()


def test_too_many_failed_conversations_end_the_run_with_the_reason() -> None:
    failed = of_two_turns()
    failed.failure = 'MRL-2150 converse "x" raised KeyError: 1 (tool.py:7) for prompt 3.'
    own = scorer(max_failed_fraction=0.5)
    with pytest.raises(DataError, match=r"(?s)MRL-2120 the conversation's function failed.*MRL-2150 .*tool.py:7"):
        own.finish([Group(prompt(), [failed])], Meter())
    own.close()


# -- settings


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(CALCULATOR, list(overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("generation.num_servers=2", "rollout.extra_prompts=4"), "rollout.extra_prompts=4"),
        (("generation.num_servers=2", "generation.colocated=false", "rollout.max_staleness=1"), "max_staleness=1"),
        (("rollout.converse.max_turn_tokens=33",), "max_turn_tokens=33 is more than a whole conversation"),
        (("rollout.converse=null",), "there is no rollout.converse"),
        (("rollout.converse.name=nothing",), "rollout.converse.name"),
        (("rollout.converse.max_turns=0",), "rollout.converse.max_turns=0"),
    ],
)
def test_contradictions_are_found_before_anything_starts(overrides: tuple[str, ...], told: str) -> None:
    assert told in problems(*overrides)


def test_a_path_alone_names_the_function() -> None:
    config = load_config(CALCULATOR, ["rollout.converse=a.b:c"])
    assert config.rollout is not None and config.rollout.converse is not None
    assert (config.rollout.converse.name, config.rollout.converse.max_turns) == ("a.b:c", 16)


# -- functions


OWN_MODULE = """
def right(prompt, generate, *, depth=1): ...
async def waits(prompt, generate): ...
def wrong(prompt): ...
def judges(prompt, generate): return float(generate().text == prompt.answer)
def fails(prompt, generate): return 1 / 0
def exits(prompt, generate): __import__("os")._exit(0)
def silent(prompt, generate): return 1.0
async def forgets(prompt, generate):
    generate()
    return 1.0
def hangs(prompt, generate):
    while True: pass
def goes_on(prompt, generate):
    generate()
    while True: generate("more")
def looks_up(prompt, generate):
    generate()
    return prompt.metadata["level"] + len(prompt.messages[0]["content"]) + len(prompt.token_ids)
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_tool.py").write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.delitem(sys.modules, "own_tool", raising=False)
    return "own_tool"


def test_a_function_is_checked_before_it_is_called(own_module: str) -> None:
    check_converse(f"{own_module}:right", {"depth": 2})
    assert not load_converse(f"{own_module}:right", {}).is_async
    assert load_converse(f"{own_module}:waits", {}).is_async
    with pytest.raises(ConfigError, match=r"MRL-1450 .*cannot be called: too many positional.*\n.*prompt, generate"):
        check_converse(f"{own_module}:wrong", {})
    with pytest.raises(ConfigError, match=r"MRL-1450 .*unexpected keyword argument 'width'"):
        check_converse(f"{own_module}:right", {"width": 2})
    with pytest.raises(ConfigError, match=r"MRL-1303 rollout.converse: .* has no function 'nobody'"):
        check_converse(f"{own_module}:nobody", {})


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("judges", r": 1 when the policy answers '7' to 'x'"),
        ("goes_on", "no outcome"),
        ("fails", r"MRL-2150 .*ZeroDivisionError.*own_tool.py:6.*\n.*tried before the start"),
        ("hangs", "MRL-2151 .*did not end within 0.2 s"),
        ("exits", "MRL-2150 .*ended its process"),
        ("silent", "MRL-2153 .*without a turn of the policy"),
        ("forgets", "MRL-2153 .*without a turn of the policy"),
    ],
)
def test_a_function_is_tried_in_a_process_of_its_own(own_module: str, function: str, told: str) -> None:
    try:
        result = try_converse(f"{own_module}:{function}", {}, prompt("7"), 0.2 if function == "hangs" else 5.0)
    except MegarlError as error:
        result = str(error)
    assert re.search(told, result), result


def test_a_function_is_tried_with_the_whole_row(own_module: str) -> None:
    row = replace(prompt("7"), metadata={"level": 40}, messages=({"role": "user", "content": "?"},))
    expected = 40 + 1 + len(row.token_ids)
    assert f": {expected} when the policy" in try_converse(f"{own_module}:looks_up", {}, row, 10.0)


def test_checking_a_function_needs_no_torch() -> None:
    """`megarl check` answers in a second."""
    code = "import sys; import megarl.rollout.trial; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- what the documentation and the examples show


def test_the_walk_through_works(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "tools.md").read_text(), re.MULTILINE | re.DOTALL)
    tool, trial = blocks
    (tmp_path / "my_tool.py").write_text(tool)
    (tmp_path / "trial.py").write_text(trial)
    ran = subprocess.run(
        [sys.executable, "trial.py"], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr.decode()


def test_the_calculator_answers_calls_and_judges_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from examples.calculator_tool.calculator import converse

    called = rehearse(converse, "47*86=", ["47*86?", "4042"], answer="4042")
    assert (called.replies, called.result) == (["4042 "], Reward(1.0, {"num_calls": 1}))
    wrong = rehearse(converse, "47*86=", ["47*86=?", "47*68?", "4042"], answer="4042")
    assert (wrong.replies, wrong.result.scores) == (["error ", "3196 "], {"num_calls": 2})
    assert rehearse(converse, "47*86=", ["3000"], answer="4042").result.value == 0.0


@pytest.mark.parametrize(
    ("script", "files"),
    [
        ("examples.calculator_tool.make_problems", ["train.jsonl", "held_out.jsonl"]),
        ("examples.guess_number.make_games", ["games.jsonl"]),
    ],
)
def test_the_examples_data_is_what_their_scripts_write(
    script: str, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module(script)
    assert module.__file__ is not None
    own = Path(module.__file__).parent
    monkeypatch.setattr(module, "__file__", str(tmp_path / "script.py"))
    module.main()
    for name in files:
        assert (tmp_path / name).read_text() == (own / name).read_text()


def test_the_game_says_where_to_go_on_and_pays_for_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from examples.guess_number.environment import converse

    config = load_config(GUESS, [])
    assert config.rollout is not None and config.rollout.converse is not None
    options = config.rollout.converse.options
    won = rehearse(converse, "", ["5.", "9.", "x.", "7."], answer="7", **options)
    assert won.replies == ["higher ", "lower ", "number? "]
    assert won.result == Reward(1 - 0.5 * 3 / 4, {"is_won": 1.0, "num_guesses": 4})
    assert rehearse(converse, "", ["7."], answer="7", **options).result.value == 1.0
    assert rehearse(converse, "", ["1.", "2.", "3.", "4.", "7."], answer="7", **options).result.value == 0.0
