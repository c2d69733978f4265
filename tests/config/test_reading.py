import tomllib
from pathlib import Path

import pytest

import dlm_jax.config as configs
from dlm_jax.config import Config
from dlm_jax.hf import UNPUBLISHED
from dlm_jax.training.init_from import LOCAL

ROOT = Path(__file__).parents[2]


def _write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_dict_and_back_is_the_same_config():
    config = configs.load(None, {"model.depth": "3", "data.source": "a.txt,b.txt"})
    assert config.data.source == ("a.txt", "b.txt")
    assert configs.from_dict(configs.to_dict(config), where="here") == config


def test_flags_override_the_file_which_overrides_the_defaults(tmp_path):
    path = _write(tmp_path, "[train]\nsteps = 200\nseed = 7\n[optim]\nwarmup_steps = 3\n")
    config = configs.load(path, {"train.steps": "300", "model.qkv_bias": "true"})
    assert (config.train.steps, config.train.seed, config.model.qkv_bias) == (300, 7, True)
    assert config.train.batch_size == Config().train.batch_size


CAUSAL = {"model.attention_type": "causal", "sample.order": "left_to_right"}
SAMPLER, CRITIC = {"model.add_sampler_head": "true"}, {"model.add_critic_head": "true"}


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("[train]\nstep = 3", {}, "unknown key 'train.step'; did you mean 'train.steps'?"),
        ("[trian]\nsteps = 3", {}, "unknown section 'trian'; did you mean 'train'?"),
        ("steps = 3", {}, "unknown section 'steps'"),
        ("train = 3", {}, "write [train] above its keys"),
        ('[train]\nsteps = "3"', {}, "train.steps='3' is not an integer"),
        ("[train]\nsteps = 3.5", {}, "train.steps=3.5 is not an integer"),
        ('[optim]\nname = "adan"', {}, "optim.name='adan' is not one of muon, adamw"),
        ("[train]\nsteps = 0", {}, "train.steps=0 is outside [1, 2147483647]; use 1000, say"),
        ("[model]\nwidth = 30\nheads = 4", {}, "model.width=30 is not an even multiple"),
        ("[model]\nheads = 4\nkv_heads = 3", {}, "does not divide model.heads=4"),
        ("[train]\nsteps = [", {}, "is not valid TOML"),
        ("", {"train.stepz": "3"}, "unknown flag 'train.stepz'; did you mean 'train.steps'?"),
        ("", {"train.steps": "many"}, "command line: --train.steps='many' is not an integer"),
        ("", {"model.qkv_bias": "perhaps"}, "model.qkv_bias='perhaps' is not true or false"),
        ("", {"sample.temperature": "-1"},
         "temperature=-1.0 is outside [0, 1000000]; use 0.0 for greedy"),
        ("", {"optim.warmup_steps": "5000"}, "is not less than train.steps"),
        ("", {"model.compute_dtype": "float16"},
         "use 'bfloat16'; the range of float16 is too small"),
        ("", {"train.trackers": "wandb,wandb"}, "has duplicates; name each once"),
        ("", SAMPLER | CAUSAL,
         "model.add_sampler_head=True requires model.attention_type='bidirectional' or "
         "'block_causal', not 'causal'; change one of them"),
        ("", CRITIC | CAUSAL,
         "model.add_critic_head=True requires model.attention_type='bidirectional'"),
        ("", {"model.sampler_context": "0"}, "model.sampler_context=0 is outside [1, 64]"),
        ("", {"heads.sampler_reveal": "1.01"},
         "heads.sampler_reveal=1.01 is outside [0, 1]; use 0.7"),
        ("", {"heads.end_critic_iteration": "-1"}, "heads.end_critic_iteration=-1 is outside [0, "),
        ("", {"heads.clip": "0"}, "heads.clip=0.0 is outside (0, 3e+38]; use 1.0, say"),
        ("", {"heads.learning_rate": "nan"}, "heads.learning_rate=nan"),
        ("", SAMPLER | {"heads.train_main": "false"},
         "heads.train_main=False freezes an untrained model; name a trained model in "
         "train.init_from"),
        ("", {"model.attention_type": "canvas", "model.block_length": "8"},
         "model.attention_window=0 must be at least 1"),
    ],
)  # fmt: skip
def test_bad_keys_and_values_are_refused_in_one_line(tmp_path, text, overrides, message):
    with pytest.raises(ValueError, match=r".") as error:
        configs.load(_write(tmp_path, text), overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"nowhere\.toml does not exist"):
        configs.load("nowhere.toml")


def test_a_shipped_config_is_found_by_its_name_wherever_one_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert configs.load("quickstart") == configs.load(ROOT / "configs" / "quickstart.toml")
    with pytest.raises(ValueError, match="quickstrat does not exist.*; did you mean 'quickstart'"):
        configs.load("quickstrat")
    # A file of that name comes first, a folder does not.
    (tmp_path / "shakespeare").mkdir()
    assert configs.load("shakespeare").train.out_dir == "runs/shakespeare"
    (tmp_path / "quickstart").write_text("[train]\nsteps = 77\n")
    assert configs.load("quickstart").train.steps == 77


def test_every_config_of_the_checkout_is_shipped():
    assert {path.name for path in configs.shipped().values()} == {
        path.name for path in ROOT.glob("configs/*.toml")
    }


def test_an_error_names_the_command_line_where_a_flag_is_at_fault_and_not_the_file(tmp_path):
    path = _write(tmp_path, "[train]\nsteps = 200\n[optim]\nwarmup_steps = 3\n")
    with pytest.raises(ValueError, match=r"^command line: optim\.warmup_steps=3 is not less"):
        configs.load(path, {"train.steps": "2"})


def test_an_error_of_the_file_names_the_file_though_there_are_flags(tmp_path):
    path = _write(tmp_path, "[train]\nsteps = 2\n[optim]\nwarmup_steps = 3\n")
    with pytest.raises(ValueError, match=r"run\.toml: optim\.warmup_steps=3 is not less than"):
        configs.load(path, {"model.depth": "1"})


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.toml")), ids=lambda path: path.name)
def test_every_shipped_config_loads_and_says_what_it_costs(path):
    configs.load(path)
    text = path.read_text()
    header = text[: text.index("[")]
    for word in ("Command:", "Hardware:", "Time:", "Result:"):
        assert word in header
    assert set(tomllib.loads(text)) <= set(configs.SECTIONS)


def test_every_default_of_a_section_is_a_value_of_its_setting():
    for key, setting in configs.SETTINGS.items():
        assert setting.checked(setting.default) == setting.default, key


def test_a_resumed_run_may_change_what_leaves_its_result_alone():
    fixed = {key for key in configs.SETTINGS if key.startswith("train.")} - configs.FREE
    assert fixed == {"train.batch_size", "train.accumulate", "train.seed"}
    assert {key for key in configs.FREE if key.startswith(("model.", "data.", "optim."))} == {
        "model.remat", "data.source", "data.cache_dir",
    }  # fmt: skip


def test_sets_of_settings_name_settings():
    for keys in (LOCAL, {f"model.{key}" for key in UNPUBLISHED}):
        assert keys <= set(configs.SETTINGS)


NUMBERS = [
    (key, setting.annotation)
    for key, setting in configs.SETTINGS.items()
    if setting.annotation in (int, float) and not key.startswith("sample.")
]
"""The numbers of a run; those of `sample.` have tests of their own, as settings of a request."""


@pytest.mark.parametrize(("key", "kind"), NUMBERS, ids=[key for key, _ in NUMBERS])
def test_every_number_of_a_run_is_bounded_before_anything_is_made_of_it(key, kind):
    huge = ["inf", "-inf", "nan", "1e39", "-1e39"] if kind is float else []
    for text in (*huge, str(10**20), str(-(10**20)), str(2**63), str(2**40)):
        is_taken = kind is float and abs(float(text)) <= 3e38 and float(text) > 0
        if is_taken:
            continue
        with pytest.raises(ValueError) as error:
            configs.load(None, {key: text})
        assert key in str(error.value), text
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("toml", "advice"),
    [
        ('[rl]\nreward = "a:b"', "policy optimisation is in dlm_jax.contrib.rl"),
        ('[model]\nmode = "sequence_scorer"', "every model is a language model"),
        ("[objective]\nsdtt_share = 0.5", "python -m dlm_jax.contrib.distillation"),
        ('[objective]\nteacher = "x"', "python -m dlm_jax.contrib.distillation"),
        ('[train]\nlocal_checkpoint_dir = "x"', "use train.checkpoint_dir"),
        ("[sample]\nsampler_top_p = 0.9", "use top_p"),
        ('[sample]\nrenoise_schedule = "linear"', "the schedule is cosine"),
        ('[sample]\ncache = "prefix"', "use cache=dual"),
        ('[sample]\norder = "factor"', "use order=threshold"),
        ('[sample]\nlength_target_mode = "exact"', "use length_target_mode=to_max_new"),
    ],
)
def test_a_key_that_left_the_config_says_what_replaces_it(tmp_path, toml, advice):
    path = tmp_path / "old.toml"
    path.write_text(toml)
    with pytest.raises(ValueError, match=advice):
        configs.load(path)


@pytest.mark.parametrize(
    ("flag", "advice"),
    [
        ("rl.loss", "policy optimisation is in dlm_jax.contrib.rl"),
        ("sample.draw", "it was removed"),
        ("data.new_characters", "each new character is refused"),
    ],
)
def test_a_flag_that_left_the_config_says_what_replaces_it(flag, advice):
    with pytest.raises(ValueError, match=f"'{flag}'; .*{advice}"):
        configs.load(None, {flag: "1"})
