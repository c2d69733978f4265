"""Parameters are laid out for a cache once, and shared by all that read them."""

import canvases
import jax
import numpy as np
import toy

from dlm_jax.inference.slots import Weights
from dlm_jax.model.transformer import build
from dlm_jax.sampling.forward import ready
from dlm_jax.sampling.kv_cache import CacheState


def test_one_layout_is_shared_by_all_who_read_the_same_parameters():
    network = build(toy.config())
    program, params = canvases.program(network), toy.random_params(network)
    weights = Weights(params)
    layout = weights.for_cache(program)
    assert weights.for_cache(canvases.program(network)) is layout
    for number, layer in enumerate(layout["layers"]):
        ours, theirs = jax.tree.leaves(layer), jax.tree.leaves(params["blocks"])
        assert len(ours) == len(theirs)
        for leaf, stacked in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(leaf, stacked[number])


def test_the_layers_are_views_of_parameters_on_one_cpu_device():
    network = build(toy.config())
    program, params = canvases.program(network), toy.random_params(network)
    stacked = params["blocks"]["mlp"]["up"]["kernel"]
    size = stacked.nbytes // stacked.shape[0]
    for number, layer in enumerate(Weights(params).for_cache(program)["layers"]):
        pointer = layer["mlp"]["up"]["kernel"].unsafe_buffer_pointer()
        assert pointer == stacked.unsafe_buffer_pointer() + number * size


def test_nothing_but_the_layers_is_held_twice():
    network = build(toy.config())
    program, params = canvases.program(network), toy.random_params(network)
    made = Weights(params).for_cache(program)
    assert {name for name in made if made[name] is not params.get(name)} == {"layers"}
    deep = build(toy.config(depth=49))
    params = toy.random_params(deep)
    made = Weights(params).for_cache(canvases.program(deep))
    assert all(made[name] is params[name] for name in made | params)


def test_the_loop_takes_parameters_that_are_laid_out_as_they_are():
    network = build(toy.config())
    program, params = canvases.program(network), toy.random_params(network)
    laid_out = Weights(params).for_cache(program)
    cache = CacheState((), (), np.zeros(canvases.ROWS, np.int32))
    state = canvases.make_state(canvases.mixed_rows())._replace(cache=cache)
    assert ready(program, laid_out, state) is laid_out
