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
from megarl.config.secret_names import is_secret_key
from megarl.core.errors import ConfigError, MissingInputError
from tests.unit.config_files import CONFIGS, MINIMAL, QUICKSTART, load_text, refusal

# -- what is right


def test_defaults_fill_the_minimal_configuration(tmp_path: Path) -> None:
    config = load_text(tmp_path, MINIMAL)
    assert config.run.seed == 0
    assert config.actor.optimizer.lr == 1e-6
    assert config.critic.optimizer.lr == 1e-5
    assert isinstance(config.algorithm, GrpoSettings)
    assert config.reward[0].name == "exact_match"
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
    assert (config.run.num_ranks, config.run.num_steps, config.run.seed) == (2, 40, 0)
    assert (config.rollout.prompts_per_step, config.rollout.group_size, config.rollout.max_new_tokens) == (32, 8, 44)
    assert (config.actor.optimizer.lr, config.actor.optimizer.min_lr_ratio) == (8e-4, 0.1)
    assert (config.warmup.num_steps, config.warmup.batch_size, config.warmup.optimizer.lr) == (200, 64, 5e-3)
    assert config.num_minibatches == 2
    assert config.reward[0].options == {"after": ":"}


def test_the_ppo_quickstart_overrides_its_parent() -> None:
    config = load_config(CONFIGS / "quickstart_ppo.yaml")
    assert isinstance(config.algorithm, PpoSettings)
    assert config.uses_critic
    assert config.uses_reference
    assert config.algorithm.num_minibatches == 2  # the parent's
    assert config.actor.optimizer.lr == 5e-4
    assert config.critic.optimizer.lr == 1e-3


def test_the_coin_flip_takes_no_options_from_its_parent() -> None:
    (reward,) = load_config(CONFIGS / "quickstart_coin_flip.yaml").reward
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
        (
            "actor.optimizer.lerning_rate=1",
            "MRL-1001 command line actor.optimizer.lerning_rate is not a setting. Did you mean actor.optimizer.lr?",
        ),
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
)
def test_mistakes_on_the_command_line_say_so(tmp_path: Path, override: str, start: str) -> None:
    assert refusal(tmp_path, MINIMAL, override).startswith(start)


# -- writing it down


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_resolved_text_gives_the_same_configuration(tmp_path: Path, path: Path) -> None:
    config = load_config(path)
    text = dump_resolved(config)
    again = load_text(tmp_path, text)
    assert again == config
    assert dump_resolved(again) == text
    assert "extends" not in text


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
scalars = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | texts
# what looks like the name of a secret is refused, whatever it holds
keys = texts.filter(lambda key: not is_secret_key(key))
trees = st.dictionaries(
    keys,
    st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)),
    max_size=4,
)


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=trees)
def test_options_of_any_kind_survive_being_written_down(tmp_path: Path, options: dict[str, object]) -> None:
    config = load_text(tmp_path, MINIMAL.replace("name: grpo", "name: my.own:Algorithm"))
    assert isinstance(config.algorithm, CustomAlgorithm)
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"options": options})})
    assert load_text(tmp_path, dump_resolved(config)) == config
