"""Loading: parents, the command line, every kind of mistake with its line, and writing it down again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megarl.config.algorithms import CustomAlgorithm, GrpoSettings, PpoSettings, SftSettings
from megarl.config.load import load_config
from megarl.config.resolved import dump_resolved
from megarl.core.errors import ConfigError, MissingInputError
from tests.unit.config_files import CONFIGS, MINIMAL, QUICKSTART, load_text, refusal


# -- what is right


def test_defaults_fill_the_minimal_configuration(tmp_path: Path) -> None:
    config = load_text(tmp_path, MINIMAL)
    assert config.run.seed == 0
    assert config.actor.optimizer.lr == 1e-6
    assert config.critic.optimizer.lr == 1e-5
    assert isinstance(config.algorithm, GrpoSettings)
    assert config.reward.name == "exact_match"
    assert config.warmup is None
    assert (config.uses_critic, config.uses_reference, config.dp_size, config.samples_per_step) == (
        False,
        False,
        1,
        256,
    )


def test_the_quickstart_is_the_recipe() -> None:
    config = load_config(QUICKSTART)
    assert config.rollout is not None
    assert config.warmup is not None
    assert (config.run.num_ranks, config.run.num_steps, config.run.seed) == (2, 30, 0)
    assert (config.rollout.prompts_per_step, config.rollout.group_size, config.rollout.max_new_tokens) == (32, 8, 44)
    assert (config.actor.optimizer.lr, config.actor.optimizer.min_lr_ratio) == (6e-4, 0.1)
    assert (config.warmup.num_steps, config.warmup.batch_size, config.warmup.optimizer.lr) == (200, 64, 5e-3)
    assert config.num_minibatches == 2
    assert config.reward.options == {"after": ":"}


def test_the_ppo_quickstart_overrides_its_parent() -> None:
    config = load_config(CONFIGS / "quickstart_ppo.yaml")
    assert isinstance(config.algorithm, PpoSettings)
    assert config.uses_critic
    assert config.uses_reference
    assert config.algorithm.num_minibatches == 2  # the parent's
    assert config.actor.optimizer.lr == 5e-4
    assert config.critic.optimizer.lr == 1e-3


def test_the_coin_flip_takes_no_options_from_its_parent() -> None:
    reward = load_config(CONFIGS / "quickstart_coin_flip.yaml").reward
    assert (reward.name, reward.options) == ("coin_flip", {})


def test_an_algorithm_by_import_path_has_options(tmp_path: Path) -> None:
    text = MINIMAL.replace("name: grpo", "name: my.own:Algorithm\n  options: {alpha: 1, beta: [1, 2]}")
    algorithm = load_text(tmp_path, text).algorithm
    assert isinstance(algorithm, CustomAlgorithm)
    assert algorithm.options == {"alpha": 1, "beta": [1, 2]}


def test_sft_needs_no_rollout(tmp_path: Path) -> None:
    text = MINIMAL.replace("name: grpo", "name: sft").replace("rollout:\n  max_new_tokens: 44\n", "")
    config = load_text(tmp_path, text)
    assert isinstance(config.algorithm, SftSettings)
    assert config.samples_per_step == 64


def test_a_configuration_is_frozen() -> None:
    config = load_config(QUICKSTART)
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 1  # type: ignore[misc]


# -- parents


def write(directory: Path, **files: str) -> None:
    for name, text in files.items():
        (directory / f"{name}.yaml").write_text(text, encoding="utf-8")


def test_a_child_wins_key_by_key_over_parent_and_grandparent(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    write(tmp_path / "base", old=MINIMAL + "actor: {optimizer: {lr: 1e-3, beta1: 0.8, beta2: 0.9}}\n")
    write(tmp_path, middle="extends: base/old.yaml\nactor: {optimizer: {lr: 1e-4, beta1: 0.7}}\n")
    write(tmp_path, young="extends: middle.yaml\nactor: {optimizer: {lr: 1e-5}}\nrun: {seed: 3}\n")
    config = load_config(tmp_path / "young.yaml")
    optimizer = config.actor.optimizer
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2) == (1e-5, 0.7, 0.9)
    assert (config.run.seed, config.run.name) == (3, "small")


def test_null_in_a_child_switches_off(tmp_path: Path) -> None:
    write(tmp_path, base=MINIMAL + "warmup: {num_steps: 5}\n", child="extends: base.yaml\nwarmup: null\n")
    assert load_config(tmp_path / "child.yaml").warmup is None


def test_lists_are_replaced(tmp_path: Path) -> None:
    base = MINIMAL.replace("name: grpo", "name: a:B\n  options: {x: [1, 2, 3]}")
    write(tmp_path, base=base, child="extends: base.yaml\nalgorithm: {options: {x: [9]}}\n")
    algorithm = load_config(tmp_path / "child.yaml").algorithm
    assert isinstance(algorithm, CustomAlgorithm)
    assert algorithm.options == {"x": [9]}


def test_a_mistake_in_the_parent_is_located_in_the_parent(tmp_path: Path) -> None:
    write(tmp_path, base=MINIMAL + "actor:\n  optimizer:\n    lr: high\n")
    assert "MRL-1003 base.yaml:" in refusal(tmp_path, "extends: base.yaml\nrun: {seed: 1}\n")
    line = MINIMAL.count("\n") + 3
    assert f'base.yaml:{line} actor.optimizer.lr="high"' in refusal(tmp_path, "extends: base.yaml\n")


def test_circles_are_refused(tmp_path: Path) -> None:
    write(tmp_path, a="extends: b.yaml\n", b="run: {}\nextends: c.yaml\n", c="extends: ./a.yaml\n")
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "a.yaml")
    message = str(error.value).replace(f"{tmp_path}/", "")
    assert message.startswith("MRL-1009 c.yaml:1 extends goes in a circle: a.yaml -> b.yaml -> c.yaml -> a.yaml.")


def test_a_file_that_extends_itself_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, "extends: run.yaml\n").startswith("MRL-1009 run.yaml:1 extends goes in a circle")


@pytest.mark.parametrize("value", ["[a.yaml, b.yaml]", "3", "null", "{a: b}", "''"])
def test_extends_takes_one_path(tmp_path: Path, value: str) -> None:
    assert refusal(tmp_path, f"{MINIMAL}extends: {value}\n").startswith("MRL-1009 run.yaml:21 extends must be")


def test_missing_files_have_their_own_exit_code(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError) as error:
        load_config(tmp_path / "absent.yaml")
    assert (error.value.code, error.value.exit_code) == ("MRL-4010", 66)
    with pytest.raises(MissingInputError) as error:
        load_text(tmp_path, "extends: absent.yaml\n")
    assert error.value.code == "MRL-4011"
    with pytest.raises(MissingInputError):
        load_config(tmp_path)
    with pytest.raises(MissingInputError):
        load_config(Path("a\0b"))
    with pytest.raises(MissingInputError):
        load_config(Path("x" * 5000))


# -- the command line


def test_overrides_are_read_by_the_same_rules(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        MINIMAL,
        "actor.optimizer.lr=1e-3",
        "data.shuffle=false",
        "eval.sets.test={data: builtin:sort, temperature: .5}",
        "eval.sets.test.num_samples=4",
        "warmup.num_steps=7",
        "rollout.group_size=3",
        "rollout.group_size=4",
        "run.dir=a=b",
        "algorithm.dual_clip=",
    )
    assert config.actor.optimizer.lr == 1e-3
    assert config.data.shuffle is False
    assert (config.eval.sets["test"].data, config.eval.sets["test"].num_samples) == ("builtin:sort", 4)
    assert config.warmup is not None
    assert config.warmup.num_steps == 7
    assert config.rollout is not None
    assert config.rollout.group_size == 4
    assert config.run.dir == "a=b"


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("actor.optimizer.lerning_rate=1", "MRL-1001 command line actor.optimizer.lerning_rate is not a setting. Did you "
         "mean actor.optimizer.lr?"),
        ("run.seed=yes", 'MRL-1003 command line run.seed="yes" is not allowed.'),
        ("run.seed.x=1", "MRL-1003 command line run.seed=a mapping with 1 keys is not allowed."),
        ("seed", 'MRL-1010 command line "seed" is not of the form key=value.'),
        ("=3", 'MRL-1010 command line "=3" is not'),
        ("run..seed=3", 'MRL-1010 command line "run..seed=3" is not'),
        ("run.seed=[1", 'MRL-1010 command line run.seed="[1" has a value that is not YAML.'),
        ("run.seed=*x", 'MRL-1008 command line uses the YAML alias "x".'),
        ("run.seed=\udcff", "MRL-1010 command line run.seed="),
        ("eval.sets={a: {data: x, data: y}}", "MRL-1007 command line both set a.data"),
        ("extends=x.yaml", "MRL-1001 command line extends is not a setting."),
        ("model.config.vocab_size=0", "MRL-1203 run.yaml:6 model.config: vocab_size must be given"),
    ],
)  # fmt: skip
def test_mistakes_on_the_command_line_say_so(tmp_path: Path, override: str, start: str) -> None:
    assert refusal(tmp_path, MINIMAL, override).startswith(start)


# -- mistakes, with their line in the file


@pytest.mark.parametrize(
    ("old", "new", "start"),
    [
        ("num_steps: 10", "num_step: 10", "MRL-1001 run.yaml:3 run.num_step is not a setting. Did you mean run.num_steps?"),
        ("num_steps: 10", "max_steps: 10", "MRL-1001 run.yaml:3 run.max_steps is not a setting. Did you mean run.num_steps?"),
        ("rollout:", "roll_out:", "MRL-1001 run.yaml:17 roll_out is not a setting. Did you mean rollout?"),
        ("rollout:", "zzz:", "MRL-1001 run.yaml:17 zzz is not a setting.\n    Sections: run, model, actor"),
        ("max_new_tokens: 44", "max_tokens: 44", "MRL-1001 run.yaml:18 rollout.max_tokens is not a setting. Did you mean "
         "rollout.max_new_tokens?"),
        ("name: grpo", "name: grpo\n  gae_lambda: 1", "MRL-1001 run.yaml:17 algorithm.gae_lambda is not a setting of grpo; it "
         "belongs to ppo."),
        ("name: grpo", "name: grpo\n  options: {}", "MRL-1001 run.yaml:17 algorithm.options is not a setting of grpo; it "
         "belongs to algorithms by import path."),
        ("name: grpo", "name: a:B\n  num_epochs: 2", "MRL-1001 run.yaml:17 algorithm.num_epochs is not a setting of custom; it "
         "belongs to grpo and ppo."),
        ("  num_steps: 10\n", "", "MRL-1002 run.yaml:1 run.num_steps is required but not given."),
        ("data:\n  train: builtin:carry\n", "", "MRL-1002 run.yaml:1 data is required but not given.\n    It needs at least: "
         "train."),
        ("rollout:\n  max_new_tokens: 44\n", "", "MRL-1002 run.yaml:15 rollout is required but not given."),
        ("  name: grpo", "  clip_low: 0.1", "MRL-1002 run.yaml:15 algorithm.name is required but not given."),
        ("num_steps: 10", "num_steps: 10.0", "MRL-1003 run.yaml:3 run.num_steps=10.0 is not allowed. It must be a whole "
         "number >= 1 and <= 1000000000.\n    Write num_steps: 10"),
        ("num_steps: 10", "num_steps: '10'", "MRL-1003 run.yaml:3 run.num_steps=\"10\" is not allowed. It must be a whole "
         "number >= 1 and <= 1000000000.\n    Remove the quotes: num_steps: 10"),
        ("num_steps: 10", "num_steps: true", "MRL-1003 run.yaml:3 run.num_steps=true is not"),
        ("num_steps: 10", "num_steps: [10]", "MRL-1003 run.yaml:3 run.num_steps=a list of 1 is not"),
        ("name: small", "name: 3", "MRL-1003 run.yaml:2 run.name=3 is not allowed."),
        ("  train: builtin:carry", "  train: builtin:carry\n  shuffle: yes", 'MRL-1003 run.yaml:21 data.shuffle="yes" is not '
         "allowed. It must be true or false.\n    Write shuffle: true"),
        ("data:\n", "critic:\ndata:\n", "MRL-1003 run.yaml:19 critic=null is not allowed. It must be a mapping.\n    critic: has "
         "nothing under it."),
        ("algorithm:\n  name: grpo", "algorithm: grpo", 'MRL-1003 run.yaml:15 algorithm="grpo" must be a mapping.\n    Write '
         'algorithm: {name: "grpo"}.'),
        ("num_steps: 10", "num_steps: 0", "MRL-1004 run.yaml:3 run.num_steps=0 is not allowed. It must be a whole number >= 1"),
        ("name: small", "name: a b", 'MRL-1004 run.yaml:2 run.name="a b" is not allowed. It must be text of at most 100'),
        ("name: small", "name: ../up", 'MRL-1004 run.yaml:2 run.name="../up" is not'),
        ("name: grpo", "name: gpro", 'MRL-1004 run.yaml:16 algorithm.name="gpro" is not known. Did you mean grpo?'),
        ("name: grpo", "name: 'a b:c'", 'MRL-1004 run.yaml:16 algorithm.name="a b:c" is not allowed.'),
        ("name: grpo", "name: grpo\n  kl: {coef: .nan}", "MRL-1004 run.yaml:17 algorithm.kl.coef=NaN is not allowed."),
        ("name: grpo", "name: grpo\n  kl: {coef: .inf}", "MRL-1004 run.yaml:17 algorithm.kl.coef=Infinity is not allowed."),
        ("name: grpo", "name: grpo\n  kl: {estimator: k4}", 'MRL-1004 run.yaml:17 algorithm.kl.estimator="k4" is not allowed. '
         "It must be one of k1, k2, k3."),
        ("builtin:carry", "builtin:cary", 'MRL-1004 run.yaml:20 data.train="builtin:cary" is not allowed. It must be a JSONL '
         "file or a built-in task: builtin:carry, builtin:carry_held_out, builtin:sort, builtin:sort_held_out. Did you mean "
         "builtin:carry?"),
        ("data:\n", "reward: exactmatch\ndata:\n", 'MRL-1004 run.yaml:19 reward="exactmatch" is not allowed. It must be '
         'exact_match, coin_flip, or the import path of a function: "package.module:function". Did you mean exact_match?'),
        ("data:\n", "eval: {sets: {a b: {data: builtin:sort}}}\ndata:\n", 'MRL-1004 run.yaml:19 "a b" cannot be the name of a '
         "set in eval.sets."),
        ("data:\n", "eval: {sets: {a: {data: builtin:sort, num_samples: 2}}}\ndata:\n", "MRL-1005 run.yaml:19 "
         "eval.sets.a.num_samples=2 at temperature 0"),
        ("data:\n", "eval: {every: 2}\ndata:\n", "MRL-1005 run.yaml:19 eval.every=2 has nothing to evaluate"),
        ("data:\n", "reward: {name: exact_match, options: {afer: x}}\ndata:\n", "MRL-1001 run.yaml:19 reward.options.afer is "
         "not an option of exact_match. Did you mean reward.options.after?"),
        ("data:\n", "reward: {name: exact_match, options: {after: 3}}\ndata:\n", "MRL-1003 run.yaml:19 reward.options.after=3"),
        ("max_new_tokens: 44", "max_new_tokens: 44\n  group_size: 1", "MRL-1005 run.yaml:19 rollout.group_size=1 is too small "
         "for grpo"),
        ("name: grpo", "name: ppo\n  critic_warmup_steps: 10", "MRL-1005 run.yaml:17 algorithm.critic_warmup_steps=10 leaves "
         "the actor nothing: run.num_steps=10."),
        ("data:\n", "actor: {optimizer: {schedule: linear}}\ndata:\n", "MRL-1005 run.yaml:19 actor.optimizer.schedule=linear "
         "with min_lr_ratio=1 never lowers lr."),
        ("  tokenizer: builtin:characters\n", "", "MRL-1002 run.yaml:5 model.tokenizer is required"),
        ("  config:\n", "  path: somewhere\n  config:\n", "MRL-1005 run.yaml:7 model.path and model.config are both given."),
        ("vocab_size: 64", "vocab_size: many", "MRL-1203 run.yaml:6 model.config: vocab_size must be given"),
        ("Qwen3ForCausalLM", "Gemma3ForCausalLM", "MRL-1201 run.yaml:6 model.config: architecture"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line_and_its_remedy(tmp_path: Path, old: str, new: str, start: str) -> None:
    assert old in MINIMAL
    message = refusal(tmp_path, MINIMAL.replace(old, new))
    assert message.startswith(start), message


def test_all_problems_are_reported_at_once_the_most_fundamental_first(tmp_path: Path) -> None:
    text = MINIMAL.replace("num_steps: 10", "num_steps: 10\n  num_ranks: 3\n  sed: 1\n  sed: 2")
    text += "actor: {parallel: {tp_size: 2}, offload: sometimes, optimizer: {lr: -1}}\n"
    codes = [line.split(" ")[0] for line in refusal(tmp_path, text).splitlines() if line.startswith("MRL-")]
    assert codes == ["MRL-1007", "MRL-1001", "MRL-1003", "MRL-1004", "MRL-1101"]


def test_a_problem_that_may_follow_from_another_is_left_out(tmp_path: Path) -> None:
    # 3 ranks do not divide by the default tp_size either way; what the user meant by "two" is unknown
    text = (
        MINIMAL.replace("num_steps: 10", "num_steps: 10\n  num_ranks: 3")
        + "actor: {parallel: {tp_size: two, pp_size: 2}}\n"
    )
    message = refusal(tmp_path, text)
    assert "MRL-1003" in message
    assert "MRL-1101" not in message


def test_at_most_ten_problems_are_shown(tmp_path: Path) -> None:
    text = MINIMAL + "actor:\n" + "".join(f"  strange{i}: 1\n" for i in range(14))
    message = refusal(tmp_path, text)
    assert message.count("MRL-1001") == 10
    assert message.endswith("... and 4 more.\n14 problems. Nothing was started.")


def test_foreign_text_is_cut_and_escaped(tmp_path: Path) -> None:
    text = MINIMAL + f'actor: {{offload: "\\e[31m{"x" * 500}", "\\e]0;{"y" * 500}": 1}}\n'
    message = refusal(tmp_path, text)
    assert "\x1b" not in message
    assert "x" * 81 not in message
    assert "y" * 81 not in message


# -- writing it down


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_resolved_text_gives_the_same_configuration(tmp_path: Path, path: Path) -> None:
    config = load_config(path)
    text = dump_resolved(config)
    again = load_text(tmp_path, text)
    assert again == config
    assert dump_resolved(again) == text
    assert "extends" not in text


scalars = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(max_size=20)
trees = st.dictionaries(
    st.text(max_size=10).filter(lambda key: key != "<<"),
    st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_size=4,
)


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=trees)
def test_options_of_any_kind_survive_being_written_down(tmp_path: Path, options: dict[str, object]) -> None:
    config = load_text(tmp_path, MINIMAL.replace("name: grpo", "name: my.own:Algorithm"))
    assert isinstance(config.algorithm, CustomAlgorithm)
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"options": options})})
    assert load_text(tmp_path, dump_resolved(config)) == config
