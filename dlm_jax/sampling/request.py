"""One row to denoise, checked before anything is traced."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlm_jax.sampling.candidates import HostSampler


@dataclass(frozen=True)
class Request:
    """One row to denoise.

    Attributes:
      tokens: int ``[n]``, the whole canvas: given tokens, a draft's, and MASK at the holes.
      steps: denoising steps allowed, at least 1, and at least one for each block with holes.
      seed: of the row's randomness, in [0, 2**32).
      is_draft: True at tokens that stand there to be refined; None is nowhere.
      block_length: positions of a block; 0 is all in one.
      guidance: scale of classifier-free guidance, at least 0; 0 is none.
      stop_at_eos: whether the row is done when a finished block holds EOS.
      host_sampler: chooses the row's tokens among the candidates that its chain leaves.
      read_back: whether it is kept how each token came about.
      resample: whether all its unfrozen tokens are open at every step.
      capacity: tokens that edits may grow it to; 0, or less than it has, is as many as it has.
      max_new_tokens: unfrozen tokens that edits may nudge it towards; 0 is as many as it has.
    """

    tokens: np.ndarray
    steps: int
    seed: int
    is_draft: np.ndarray | None = None
    block_length: int = 0
    guidance: float = 0.0
    stop_at_eos: bool = False
    host_sampler: HostSampler | None = None
    read_back: bool = False
    resample: bool = False
    capacity: int = 0
    max_new_tokens: int = 0

    @property
    def room(self) -> int:
        """Positions that the row may come to fill."""
        return max(self.tokens.size, self.capacity)

    @property
    def needs_host(self) -> bool:
        """Whether the row must be looked at from Python at every step."""
        return self.read_back or self.host_sampler is not None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} is outside [0, 2**32); use a smaller one")
        if self.tokens.ndim != 1 or self.tokens.size == 0:
            raise ValueError(
                f"tokens have shape {self.tokens.shape}; give one row that is not empty"
            )
        if self.is_draft is not None and self.is_draft.shape != self.tokens.shape:
            raise ValueError(
                f"is_draft has shape {self.is_draft.shape} and tokens {self.tokens.shape}; give "
                "one value for each token"
            )
        if self.block_length < 0:
            raise ValueError(f"block_length={self.block_length} must be at least 0")
        if not 0 <= self.guidance < np.inf:
            raise ValueError(f"guidance={self.guidance} must be at least 0 and finite")
        if self.host_sampler is not None and not callable(self.host_sampler):
            raise ValueError(
                f"host_sampler={self.host_sampler!r} is not callable; give a function that takes "
                "Candidates and returns one of their ids"
            )
        for name in ("read_back", "resample"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r} is not a bool; use True or False")
        for name in ("capacity", "max_new_tokens"):
            value = getattr(self, name)
            if not 0 <= value < 2**31:
                raise ValueError(f"{name}={value} must be at least 0; use 0 for as many as it has")

    def check_steps(self, *, mask_id: int) -> None:
        """Raises ValueError if there are fewer steps than blocks with holes or drafts."""
        is_work = self.tokens == mask_id
        if self.is_draft is not None:
            is_work |= self.is_draft
        (places,) = np.nonzero(is_work)
        if self.block_length == 0 or not places.size:
            return
        busy = np.unique((places - places[0]) // self.block_length).size
        if self.steps < busy:
            raise ValueError(
                f"steps={self.steps} is less than the {busy} blocks of block_length="
                f"{self.block_length} that have something to fill; use steps={busy} or more"
            )
