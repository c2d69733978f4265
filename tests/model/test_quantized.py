"""Matrices in 8 bits: their error, their products, and models that use them."""

from __future__ import annotations

import dataclasses
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import published_cases as cases
import pytest
import saved_model
import toy
import toy_model
from jax.sharding import PartitionSpec as P
from oracles.published import Oracle

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.cli import sample
from dlm_jax.config import MeshConfig, TrainConfig
from dlm_jax.distributed.partitions import axes_of, make_mesh, shardings
from dlm_jax.inference import model as models
from dlm_jax.inference.request import make_requests
from dlm_jax.model import ops
from dlm_jax.model.lora import merged
from dlm_jax.model.quantized import (
    KINDS,
    Quantized,
    product,
    quantized,
    quantized_kernel,
    quantizer,
)
from dlm_jax.model.transformer import build
from dlm_jax.settings import SettingError
from dlm_jax.store import Checkpoints
from dlm_jax.store.weights import save_weights

NETWORK, PARAMS = toy.network(), toy.params()
AXES = axes_of(NETWORK)
TOKENS = np.random.default_rng(0).integers(0, toy.MASK, (3, 8)).astype(np.int32)
LENGTHS = np.array([8, 5, 7], np.int32)

TEXT = """ROMEO:
But, soft! what light through yonder window breaks?
It is the east, and Juliet is the sun.
Arise, fair sun, and kill the envious moon,
Who is already sick and pale with grief,
That thou her maid art far more fair than she:
Be not her maid, since she is envious;
Her vestal livery is but sick and green
And none but fools do wear it; cast it off.
It is my lady, O, it is my love!
O, that she knew she were!
"""


def _rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers in [-127, 127] and the scale of each row, in NumPy."""
    most = np.abs(x).max(axis=-1, keepdims=True)
    scale = np.where(most > 0, most / x.dtype.type(127), x.dtype.type(1))
    return np.round(x / scale), scale


def _kernel() -> np.ndarray:
    kernel = np.random.default_rng(1).standard_normal((2, 24, 6)).astype(np.float32)
    kernel[0, :, 2] = 0.0
    return kernel * np.float32([1e-30, 1e-3, 1.0, 1.0, 1e3, 1e30])


def test_each_number_is_off_by_at_most_half_the_scale_of_its_channel():
    kernel = _kernel()
    made = quantized_kernel(jnp.asarray(kernel))
    assert made.values.dtype == jnp.int8
    assert np.abs(np.asarray(made.values, int)).max() == 127
    error = np.abs(
        np.asarray(made.values) * np.asarray(made.scales)[:, None].astype(float) - kernel
    )
    most = np.abs(kernel.astype(float)).max(axis=1, keepdims=True)
    assert (error <= most / 254 * (1 + 1e-6)).all()
    assert error[0, :, 2].max() == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_those_of_the_formulas(dtype):
    rng = np.random.default_rng(2)
    x = np.asarray(jnp.asarray(rng.standard_normal((3, 5, 24)), dtype)).astype(np.float32)
    x[1, 2] = 0.0
    kernel = _kernel()[1]
    numbers, scales = _rounded(np.ascontiguousarray(kernel.T))
    whole, sizes = _rounded(x)
    found = {
        kind: product(jnp.asarray(x, dtype), quantized_kernel(jnp.asarray(kernel), kind != "int8"))
        for kind in KINDS
    }
    assert all(y.dtype == dtype for y in found.values())
    wanted = {"int8": x.astype(float) @ (numbers * scales).T.astype(float)}
    wanted["int8_dynamic"] = (whole @ numbers.T) * sizes * scales.T.astype(float)
    for kind, y in found.items():
        scale = np.abs(wanted[kind]).max(axis=(0, 1))
        error = np.abs(np.asarray(y, float) - wanted[kind]) / scale
        assert error.max() < (1e-6 if dtype == "float32" else 1e-2)


class _RoundsInputs(np.ndarray):
    """A matrix whose products with vectors round these first."""

    def __rmatmul__(self, x):
        whole, size = _rounded(x)
        return whole @ np.asarray(self) * size


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_the_oracle_with_rounded_tensors(kind, tmp_path):
    config = cases.CONFIGS["llada"]
    model = dlm_jax.load(cases.write(tmp_path / "model", "llada"), quantize=kind)
    tensors = {name: x.astype(np.float32) for name, x in cases.tensors("llada", config).items()}
    for name, x in tensors.items():
        if "blocks" in name and x.ndim == 2:
            numbers, scales = _rounded(x)
            tensors[name] = (numbers * scales).view(_RoundsInputs if kind != "int8" else np.ndarray)
    tokens = np.random.default_rng(1).integers(0, cases.NUM_TOKENS, (1, 13)).astype(np.int32)
    wanted = Oracle(config, tensors).hidden(tokens[0])
    hidden, _ = jax.jit(lambda p, t: model.network.trunk(p, t, np.array([13]), None))(
        model.params, tokens
    )
    np.testing.assert_allclose(hidden[0], wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(kind):
    params = quantized(PARAMS, kind, AXES)
    trunk = jax.jit(lambda p, t, n: NETWORK.trunk(p, t, n, None)[0])
    together = trunk(params, TOKENS, LENGTHS)
    others = (TOKENS + 1) % toy.MASK
    others[1] = TOKENS[1]
    alone = trunk(params, others, np.array([3, 5, 2]))
    np.testing.assert_array_equal(together[1, :5], alone[1, :5])


def test_every_stack_of_a_model_with_full_blocks_is_quantised():
    """The output is that of the float model with the rounded matrices."""
    network = build(toy.config(
        attention_type="canvas", block_length=8, attention_window=16, start_id=0, depth=4,
        full_every=2, activation="geglu", layer_scales=True, self_conditioning=True,
    ))  # fmt: skip
    params = toy.random_params(network)
    small = quantized(params, "int8", axes_of(network))
    for stack in ("blocks", "full_blocks"):
        kernels = [
            small[stack]["attention"]["query"]["kernel"],
            small[stack]["mlp"]["up"]["kernel"],
        ]
        assert all(isinstance(kernel, Quantized) for kernel in kernels)
    whole = jax.tree.map(
        lambda x: x.values * x.scales[..., None, :] if isinstance(x, Quantized) else x, small,
        is_leaf=lambda x: isinstance(x, Quantized),
    )  # fmt: skip
    trunk = jax.jit(lambda p: network.trunk(p, TOKENS, LENGTHS, None)[0])
    wanted, found = trunk(whole), trunk(small)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(found[row, :length], wanted[row, :length], atol=1e-4)


def test_a_float_matrix_has_the_program_of_before():
    x, kernel = jnp.ones((2, 3, 4), jnp.bfloat16), jnp.ones((4, 5))

    def before(x, kernel):
        return ops.linear(x, kernel.astype(x.dtype))

    assert str(jax.make_jaxpr(product)(x, kernel)) == str(jax.make_jaxpr(before)(x, kernel))


def test_shapes_and_parts_are_those_of_the_arrays():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2))
    split = jax.device_put(PARAMS, shardings(PARAMS, axes_of(NETWORK), mesh))
    made = quantized(split, "int8", AXES)
    query = made["blocks"]["attention"]["query"]["kernel"]
    assert (
        query.values.sharding.spec == split["blocks"]["attention"]["query"]["kernel"].sharding.spec
    )
    assert query.scales.sharding.spec == P(None, "tensor")
    shapes = jax.eval_shape(lambda: PARAMS)
    assert jax.tree.map(
        lambda x: (x.shape, x.dtype), quantized(shapes, "int8", AXES)
    ) == jax.tree.map(lambda x: (x.shape, x.dtype), made)
    np.testing.assert_array_equal(
        query.values,
        quantized(PARAMS, "int8", AXES)["blocks"]["attention"]["query"]["kernel"].values,
    )


def test_a_published_directory_is_quantised_matrix_by_matrix(tmp_path, monkeypatch):
    directory = cases.write(tmp_path / "model", "llada")
    model = dlm_jax.load(directory)
    whole = quantized(model.params, "int8", axes_of(model.network))
    alive, most = [], []

    def watched(kind, axes):
        finish = quantizer(kind, axes)

        def of_leaf(path, leaf):
            if isinstance(leaf, jax.Array) and leaf.ndim == 3:
                most.append(sum(one() is not None for one in alive))
                alive.append(weakref.ref(leaf))
            return finish(path, leaf)

        return of_leaf

    monkeypatch.setattr(models, "quantizer", watched)
    found = dlm_jax.load(directory, quantize="int8").params
    assert len(most) == 7
    assert max(most) <= 1
    jax.tree.map(np.testing.assert_array_equal, found, whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_of_the_shipped_model_is_within_half_a_percent(kind):
    usual, small = dlm_jax.load(), dlm_jax.load(quantize=kind)
    matrices = [x for x in jax.tree.leaves(usual.params["blocks"]) if x.ndim == 3]
    bytes_of = [sum(x.nbytes for x in jax.tree.leaves(m.params["blocks"])) for m in (usual, small)]
    assert bytes_of[1] < bytes_of[0] - 0.7 * sum(x.nbytes for x in matrices)
    nats = [dlm_jax.score(model, [TEXT], num_draws=8).nats[0] for model in (usual, small)]
    assert nats[1] == pytest.approx(nats[0], rel=0.005)
    assert len(dlm_jax.generate(small, max_length=16, steps=4).texts[0]) > 0


def test_adapters_are_added_before_the_matrix_is_rounded(tmp_path):
    shape = dataclasses.replace(saved_model.CONFIG.model, lora_rank=2)
    params = toy.random_params(build(shape))
    train = TrainConfig(init_from="model")
    config = dataclasses.replace(saved_model.CONFIG, model=shape, train=train)
    meta = {
        "config": configs.to_dict(config),
        "tokenizer": toy_model.TOKENIZER.to_json(),
    }
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, {"params": params}, meta)
    found = dlm_jax.load(tmp_path, quantize="int8").params
    wanted = quantized(merged(params, shape), "int8", axes_of(build(shape)))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1 if one.dtype == jnp.int8 else 1e-6)


@pytest.mark.parametrize(
    ("kind", "network", "message"),
    [
        ("int4", NETWORK, "quantize='int4' is unknown; did you mean 'int8'"),
        (
            "int8",
            build(toy.config(activation="swiglu", experts=4, experts_per_token=2, expert_width=8)),
            "quantize='int8' has no rule for the parameter 'blocks/mlp/expert_down'; "
            "remove quantize, or use a model without experts",
        ),
        (
            "int8",
            dataclasses.replace(NETWORK, init=lambda key: {"mine": jnp.ones((2, 2))}, axes=None),
            "has no rule for the parameter 'mine'; remove quantize, or use a model of [model]",
        ),
    ],
    ids=["kind", "experts", "own"],
)
def test_what_has_no_rule_is_refused_by_name(kind, network, message):
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    with pytest.raises(SettingError, match="^[^\n]*$") as error:
        quantized(shapes, kind, axes_of(network))
    assert message in str(error.value)


def test_experts_are_refused_before_anything_is_read(tmp_path, monkeypatch):
    directory = cases.write(tmp_path / "model", "llada_moe")
    monkeypatch.setattr("dlm_jax.hf.tensors.Shards.read", None)
    with pytest.raises(SettingError, match="no rule for the parameter 'blocks/mlp/expert_down'"):
        dlm_jax.load(directory, quantize="int8")


def test_a_quantised_model_is_not_written(tmp_path):
    model = dlm_jax.load(quantize="int8")
    with pytest.raises(ValueError, match="^the model is quantised, .*; load it without quantize$"):
        dlm_jax.export(model, tmp_path / "model")
    line = (
        "^parameter blocks/attention/key/kernel is quantised, .*; load the model without quantize$"
    )
    with pytest.raises(ValueError, match=line):
        save_weights(tmp_path / "model.safetensors", model.params, {})
    with (
        Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints,
        pytest.raises(ValueError, match=line.replace("parameter ", "parameter params/")),
    ):
        checkpoints.save(1, {"params": model.params}, {})
    assert not list(tmp_path.glob("model*"))


@pytest.mark.parametrize(
    ("kind", "has_experts", "message"),
    [("int4", False, "--quantize='int4' is unknown"), ("int8", True, "has no rule for the param")],
)
def test_what_is_refused_ends_the_command_with_one_line(
    tmp_path, capsys, kind, has_experts, message
):
    more = ["--checkpoint", str(cases.write(tmp_path / "model", "llada_moe"))]
    with pytest.raises(SystemExit) as exit_:
        sample.main(["--quantize", kind, *(more if has_experts else [])])
    err = capsys.readouterr().err
    assert exit_.value.code == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_an_engine_and_the_command_line_write_what_generate_writes(capsys):
    model = dlm_jax.load(quantize="int8")
    settings = {"gen_length": 16, "steps": 4, "seed": 3}
    expected = dlm_jax.generate(model, num_samples=2, **settings)
    with dlm_jax.Engine(model, sizes=(1,)) as engine:
        seeded = [make_requests(model, "", settings | {"seed": seed})[0] for seed in (3, 4)]
        rows = {row.number: row.tokens for row in engine.run(seeded)}
    for number, tokens in enumerate(expected.tokens):
        np.testing.assert_array_equal(rows[number], tokens[: len(rows[number])])
    given = [part for name, value in settings.items()
             for part in (f"--{name.replace('_', '-')}", str(value))]  # fmt: skip
    assert sample.main(["--quantize", "int8", "--num-samples", "2", *given]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in expected.texts)
