"""The tokenizer of a run that begins with a trained model, and new characters in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dlm_jax.checkpoint import Checkpoints, load_meta
from dlm_jax.checkpoint.shipped import located
from dlm_jax.config import Config
from dlm_jax.config.data import INIT
from dlm_jax.data import CharacterTokenizer, Tokenizer, from_json
from dlm_jax.data.loading import MakeTokenizer
from dlm_jax.distributed.processes import on_first_process
from dlm_jax.training.files import checkpoints_of
from dlm_jax.types import Params

_SHOWN = 8
# The parameters with an axis of the vocabulary, and which it is.
_AXES = {"embedding": 0, "head/kernel": 1}


def tokenizer_of(
    config: Config, *, report: Callable[[str], None]
) -> str | Tokenizer | MakeTokenizer:
    """What ``data.tokenizer`` asks for, as `load_corpus` takes it.

    With ``init`` that is the tokenizer of ``train.init_from``, or of the run that is continued. A
    character tokenizer gets the corpus's characters that it lacks, and they are reported.

    Raises:
      ValueError: there is no such model; or, while the tokenizer is made, characters are new that
        ``data.new_characters`` refuses, or that nothing would train.
    """
    if config.data.tokenizer != INIT:
        return config.data.tokenizer
    with Checkpoints(checkpoints_of(config), keep=1) as saved:
        if on_first_process(saved.steps):
            return from_json(saved.read_meta(report=lambda line: None)["tokenizer"])
    theirs = from_json(load_meta(located(config.train.init_from), report=report)["tokenizer"])
    if not isinstance(theirs, CharacterTokenizer):
        return theirs
    return lambda text: _extended(theirs, text, config, report)


def _extended(
    theirs: CharacterTokenizer, text: str, config: Config, report: Callable[[str], None]
) -> CharacterTokenizer:
    known = set(theirs.characters)
    new = {character: count for character, count in Counter(text).items() if character not in known}
    if not new:
        return theirs
    often = sorted(new, key=lambda character: (-new[character], character))
    shown = ", ".join(f"{c!a} (U+{ord(c):04X}, {new[c]:,} times)" for c in often[:_SHOWN])
    more = f" and {len(new) - _SHOWN} more" if len(new) > _SHOWN else ""
    what = (
        f"{len(new)} characters of the text are" if len(new) > 1 else "1 character of the text is"
    )
    line = f"{what} new to train.init_from={config.train.init_from}: {shown}{more}"
    if config.data.new_characters == "refuse":
        raise ValueError(f"{line}; remove them, or use data.new_characters=add")
    if not config.heads.train_main:
        raise ValueError(
            f"{line}; heads.train_main=False would never train them: remove them, or set it to true"
        )
    report(f"{line}; added, with fresh embeddings")
    return CharacterTokenizer("".join(sorted(known | set(new))))


def places_of(theirs: Tokenizer, ours: Tokenizer) -> np.ndarray | None:
    """For each of their ids the id that stands for the same here, int32 ``[V]``.

    None if that is no tokenizer of characters, or some of its characters are missing here.
    """
    if not isinstance(theirs, CharacterTokenizer) or not isinstance(ours, CharacterTokenizer):
        return None
    if not set(theirs.characters) <= set(ours.characters):
        return None
    here = {character: id_ for id_, character in enumerate(ours.characters)}
    # The specials follow the characters in one order, see `dlm_jax.data.tokenizers`.
    text = [here[character] for character in theirs.characters]
    specials = [ours.num_text_ids + i for i in range(theirs.vocab_size - theirs.num_text_ids)]
    return np.array([*text, *specials], np.int32)


def moved(params: Params, fresh: Params, places: np.ndarray) -> Params:
    """Trained parameters with their vectors of tokens at other ids, and fresh ones at new ids.

    Args:
      params: trained.
      fresh: those of the new run, whose rows at new ids are kept.
      places: from `places_of`.
    """

    def move(path: Any, given: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        own: Any = fresh
        for part in name.split("/") if name in _AXES else ():
            own = own.get(part) if isinstance(own, dict) else None
        if name not in _AXES or own is None:
            return given
        axis = _AXES[name]
        fits = given.shape[axis] == places.size and given.shape[1 - axis] == own.shape[1 - axis]
        if not fits:
            return given  # whoever takes it refuses it
        if not own.is_fully_addressable:
            own = multihost_utils.process_allgather(own, tiled=True)
        whole = np.array(own, np.float32)
        whole[(slice(None),) * axis + (places,)] = np.asarray(given, np.float32)
        return whole

    return jax.tree_util.tree_map_with_path(move, params)
