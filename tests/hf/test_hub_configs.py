"""Each config.json of the field's model cards is read with its numbers, or refused by name.

`hub_configs.json` is written after the published files; Phi-3's factors of RoPE are ones there.
The numbers of parameters are those of the model cards.
"""

import json
import math
import re
import warnings
from pathlib import Path

import jax
import pytest

from dlm_jax.hf.directory import read_model
from dlm_jax.model.transformer import build
from dlm_jax.randomness import key_of
from dlm_jax.settings import SettingError

HERE = Path(__file__).parent
CONFIGS = json.loads((HERE / "hub_configs.json").read_text())
READ = [name for name, case in CONFIGS.items() if "refused" not in case["expected"]]
REFUSED = [name for name in CONFIGS if name not in READ]


def _read(directory, config, ignore=()):
    (directory / "config.json").write_text(json.dumps(config))
    return read_model(directory, ignore)


@pytest.mark.parametrize("name", READ)
def test_a_published_config_is_read_with_the_numbers_of_its_card(name, tmp_path):
    expected = dict(CONFIGS[name]["expected"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        family, model, longest, _ = _read(tmp_path, CONFIGS[name]["config"])
    ignored = [
        re.search(r"json: (\S+) is unknown and ignored", str(one.message))[1] for one in told
    ]
    assert ignored == expected.pop("ignored", [])
    assert family.name == expected.pop("family")
    assert longest == expected.pop("max_length", longest)
    leaves = jax.tree.leaves(jax.eval_shape(build(model).init, key_of(0)))
    number = sum(math.prod(leaf.shape) for leaf in leaves)
    assert number == expected.pop("parameters", number)  # those of DiffusionGemma count its images
    expected = {"rope_scaling": "", "tied_head": False} | expected
    assert {key: getattr(model, key) for key in expected} == expected


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_config_of_another_computation_is_refused_by_name(name, tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: ") as refusal:
        _read(tmp_path, CONFIGS[name]["config"])
    assert f"config.json: {CONFIGS[name]['expected']['refused']}" in str(refusal.value)


# Fields that no program reads for the numbers of a model, or that only the tokenizer, the
# training or a generation reads.
WITHOUT_EFFECT = re.compile(
    r"_name_or_path|\w+_token_id|\w*_dropout|\w+_version|torch_dtype|use_cache|model_type"
    r"|initializer_range|init_\w+|pretraining_tp|sliding_window|max_window_layers|mlp_ratio"
    r"|unsloth_fixed|is_llama_config|output_router_logits|router_aux_loss_coef|precision"
    r"|rope_full_precision|flash_attention|alibi_bias_max|debug|ep_size|fuse_cross_entropy"
    r"|micro_forward|skip_checkpoint|use_deepep|dtype|vision_soft_tokens_per_image"
)


@pytest.mark.filterwarnings("ignore:.* is unknown and ignored")
@pytest.mark.parametrize("name", READ)
def test_no_field_of_a_published_config_is_read_without_effect(name, tmp_path):
    """Another value changes the model or is refused, unless the field names no computation."""
    config, silent = CONFIGS[name]["config"], []
    family, model, longest, *_ = _read(tmp_path, config)
    inner = config.get("text_config", {})
    for field, value in {**config, **inner}.items():
        if WITHOUT_EFFECT.fullmatch(field) or isinstance(value, dict):
            continue
        if field == "vocab_size" and "embedding_size" in config:  # the number of rows counts
            continue
        other = not value if isinstance(value, bool) else "other"
        if isinstance(value, int | float) and not isinstance(value, bool):
            other = value * 2
        elif isinstance(value, list):
            other = [0] * len(value)
        try:
            if field in inner:
                found = _read(tmp_path, config | {"text_config": inner | {field: other}})
            else:
                found = _read(tmp_path, config | {field: other})
        except ValueError:
            continue
        if (found[0].name, *found[1:3]) == (family.name, model, longest):
            silent.append(field)
    assert not silent


def test_the_remedy_for_a_field_of_an_object_is_one_that_works(tmp_path):
    config = CONFIGS["deepseek-ai/DeepSeek-R1-0528-Qwen3-8B"]["config"]
    with pytest.raises(ValueError, match="--ignore-config") as refusal:
        _read(tmp_path, config)
    (path,) = re.findall(r"--ignore-config ([\w.]+)", str(refusal.value))
    kept = {key: value for key, value in config["rope_scaling"].items() if key != "attn_factor"}
    wanted = _read(tmp_path, config | {"rope_scaling": kept})
    assert _read(tmp_path, config, [path])[1] == wanted[1]
    for name in ("rope_scaling.other", "other.factor", "vocab_size.factor"):
        with pytest.raises(SettingError, match=f"ignore_config='{name}' is not a field of"):
            _read(tmp_path, config, [name])
