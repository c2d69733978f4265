"""Samples texts while the denoising is shown in a terminal or recorded for a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from dlm_jax import Model, Row, Texts, stream
from dlm_jax.inference.results import texts_of
from dlm_jax.viewing.frames import Frame, frame_of
from dlm_jax.viewing.trace import write_trace
from dlm_jax.viewing.watch import Watch


class View:
    """The view of one call of `dlm_jax.stream`.

    Args:
      model: the model to sample from.
      terminal: stream for the canvases.
      is_watched: whether the canvases are shown while they are denoised.
      is_page: whether the frames are recorded for `write_page`.

    Attributes:
      waited: seconds spent waiting between drawings.
    """

    def __init__(self, model: Model, terminal: TextIO, *, is_watched: bool, is_page: bool):
        self._model, self._terminal = model, terminal
        self._is_watched, self._is_page = is_watched, is_page
        tokenizer, names = model.tokenizer, ("mask", "pad", "bos", "eos")
        ids = {getattr(tokenizer, f"{name}_id"): name for name in names}
        self._names = {id_: f"⟨{name}⟩" for id_, name in ids.items() if id_ is not None}
        self._frames: dict[int, list[Frame]] = {}
        self.waited = 0.0

    def sample(self, prompt: Mapping[str, Any], settings: Mapping[str, Any]) -> Texts:
        """Samples the texts of a prompt, with the arguments of `dlm_jax.generate`."""
        model, rows = self._model, dict[int, Row]()
        steps = settings.get("steps", model.sample.steps)
        pace = min(0.15, 12.0 / max(steps, 1))  # slow enough to follow, at most 12 s in total
        watch = Watch(model.tokenizer.decode, self._terminal, names=self._names, pace=pace)
        for canvases in stream(model, [prompt], **settings):
            rows |= canvases
            frames = [
                frame_of(i, row, mask_id=model.tokenizer.mask_id, steps=steps)
                for i, row in sorted(canvases.items())
            ]
            if self._is_page:
                for frame in frames:
                    self._frames.setdefault(frame.row, []).append(frame)
            if self._is_watched:
                watch.show(frames)
        self.waited = watch.waited
        return texts_of(model, rows)

    def write_page(self, path: str, title: str) -> None:
        """Writes the page that replays the denoising; OSError if it cannot be written."""
        rows = [self._frames[i] for i in sorted(self._frames)]
        write_trace(path, rows, self._model.tokenizer.decode, title=title, names=self._names)
