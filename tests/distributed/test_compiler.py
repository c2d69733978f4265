"""Options of the compilers: defaults by device, those of a setting, and where they arrive."""

from __future__ import annotations

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest
import toy_model
from jax.sharding import Mesh

import dlm_jax
from dlm_jax.distributed import compiler
from dlm_jax.distributed.compiler import OPTIONS, options
from dlm_jax.distributed.mesh import CHIPS, topology_devices
from dlm_jax.settings import SettingError

needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the TPU compiler is not installed: pip install 'dlm_jax[tpu]'",
)
YNN = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}


def test_given_options_are_added_replace_a_default_or_stand_alone():
    other = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"}
    more = {"xla_cpu_enable_fast_math": "True"}
    as_text = [f"{name}={value}" for name, value in (other | more).items()]
    assert options("train", given=as_text[1:]) == YNN | more
    assert options("train", given=as_text) == other | more
    assert options("train", given=["none"]) == {}
    assert options("train", given=["none", *as_text[1:]]) == more


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("xla_foo=1", "mesh.compiler_options='xla_foo=1' is rejected by the compiler of cpu"),
        ("xla_cpu_enable_fast_math=2", "'2' is not a valid bool"),
    ],
)
def test_an_option_that_the_compiler_refuses_is_refused_in_one_line(given, message):
    with pytest.raises(SettingError, match="^[^\n]*$") as error:
        options("sample", given=[given])
    assert message in str(error.value)


# Programs for absent devices cannot be read back from the cache.
@pytest.mark.filterwarnings("ignore:Error (reading|writing) persistent compilation cache")
@needs_tpu_compiler
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v5e:2x2", "v6e:2x2"])
def test_the_compiler_of_a_chip_takes_its_defaults_for_the_uses_they_name(topology):
    devices = topology_devices(topology)
    mesh = Mesh(np.array(devices), ("data",))
    table = OPTIONS[CHIPS[devices[0].device_kind].name]
    for use in ("train", "sample"):
        assert options(use, mesh) == table[use]
    assert options("train", mesh, ["none"]) == {}
    with pytest.raises(SettingError, match="rejected by the compiler of TPU v.*'xla_foo'"):
        options("train", mesh, ["xla_foo=1"])


@pytest.mark.parametrize(
    "call",
    [
        lambda model: dlm_jax.generate(model, max_length=8),
        lambda model: dlm_jax.score(model, ["a cat"]),
    ],
    ids=["generate", "score"],
)
def test_the_options_of_a_model_reach_its_programs(call, monkeypatch):
    model = dataclasses.replace(toy_model.MODEL, compiler_options=("xla_foo=1",))
    found = []

    def refused(use, place=None, given=()):
        found.append((use, tuple(given)))
        return {"xla_bar": "1"}

    monkeypatch.setattr(compiler, "options", refused)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_bar"):
        call(model)
    assert found == [("sample", ("xla_foo=1",))]


def test_the_options_of_a_mesh_are_those_of_its_model():
    mesh = dlm_jax.MeshConfig(compiler_options=("xla_cpu_enable_fast_math=False",))
    model = dlm_jax.load(mesh=mesh)
    assert model.compiler_options == mesh.compiler_options
    sampler = dlm_jax.sampler(model)
    assert sampler.compiler_options == {"xla_cpu_enable_fast_math": "False"}
