"""Parameters are laid out for a cache once, and the layout is read as it is."""

import canvases
import jax
import numpy as np
import toy
import toy_model

from dlm_jax.inference.model import Model
from dlm_jax.model.transformer import build
from dlm_jax.sampling.forward import ready
from dlm_jax.sampling.kv_cache import CacheState


def _model(**changes):
    network = build(toy.config(**changes))
    return Model(network, toy.random_params(network), toy_model.TOKENIZER, max_length=8)


def test_the_layers_are_views_of_parameters_on_one_cpu_device_and_nothing_else_is_held_twice():
    model = _model()
    layout, params = model.params_for_cache, model.params
    assert model.params_for_cache is layout
    assert {name for name in layout if layout[name] is not params.get(name)} == {"layers"}
    for number, layer in enumerate(layout["layers"]):
        ours, theirs = jax.tree.leaves(layer), jax.tree.leaves(params["blocks"])
        assert len(ours) == len(theirs)
        for leaf, stacked in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(leaf, stacked[number])
    stacked = params["blocks"]["mlp"]["up"]["kernel"]
    size = stacked.nbytes // stacked.shape[0]
    for number, layer in enumerate(layout["layers"]):
        pointer = layer["mlp"]["up"]["kernel"].unsafe_buffer_pointer()
        assert pointer == stacked.unsafe_buffer_pointer() + number * size
    deep = _model(depth=49)
    made = deep.params_for_cache
    assert all(made[name] is deep.params[name] for name in made | deep.params)


def test_the_loop_takes_parameters_that_are_laid_out_as_they_are():
    model = _model()
    cache = CacheState((), (), np.zeros(canvases.ROWS, np.int32))
    state = canvases.make_state(canvases.mixed_rows())._replace(cache=cache)
    program = canvases.program(model.network)
    assert ready(program, model.params_for_cache, state) is model.params_for_cache
