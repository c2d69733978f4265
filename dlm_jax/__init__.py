"""dlm_jax: masked diffusion language models in JAX.

The public names, which docs/api.md lists, are imported on first use, so that a subpackage can be
imported without the dependencies of the model and of checkpoints. Rules and what they are written
with are public in their subpackages, such as `dlm_jax.sampling.commit`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlm_jax.config import MeshConfig as MeshConfig
    from dlm_jax.config import SamplingParams as SamplingParams
    from dlm_jax.inference.engine import AsyncEngine as AsyncEngine
    from dlm_jax.inference.engine import Engine as Engine
    from dlm_jax.inference.generate import Sampled as Sampled
    from dlm_jax.inference.generate import Sampler as Sampler
    from dlm_jax.inference.generate import chain_report as chain_report
    from dlm_jax.inference.generate import generate as generate
    from dlm_jax.inference.generate import replay as replay
    from dlm_jax.inference.generate import sampler as sampler
    from dlm_jax.inference.generate import stream as stream
    from dlm_jax.inference.host import Candidates as Candidates
    from dlm_jax.inference.model import Model as Model
    from dlm_jax.inference.model import export as export
    from dlm_jax.inference.model import load as load
    from dlm_jax.inference.request import Request as Request
    from dlm_jax.inference.request import make_requests as make_requests
    from dlm_jax.inference.results import Row as Row
    from dlm_jax.inference.results import Texts as Texts
    from dlm_jax.inference.scoring import Score as Score
    from dlm_jax.inference.scoring import score as score
    from dlm_jax.sampling.commit import CommitRule as CommitRule
    from dlm_jax.sampling.commit import Threshold as Threshold
    from dlm_jax.sampling.commit import certain as certain
    from dlm_jax.sampling.commit import most as most
    from dlm_jax.sampling.commit import most_confident as most_confident
    from dlm_jax.sampling.edits import EditRule as EditRule
    from dlm_jax.sampling.edits import delete_at as delete_at
    from dlm_jax.sampling.edits import deletion_scores as deletion_scores
    from dlm_jax.sampling.edits import gap_scores as gap_scores
    from dlm_jax.sampling.edits import insert_at as insert_at
    from dlm_jax.sampling.edits import token_uncertainty as token_uncertainty
    from dlm_jax.sampling.kv_cache import KVCache as KVCache
    from dlm_jax.sampling.loop import advance as advance
    from dlm_jax.sampling.noise import NoiseRule as NoiseRule
    from dlm_jax.sampling.program import Counters as Counters
    from dlm_jax.sampling.propose import FillRule as FillRule
    from dlm_jax.sampling.propose import Wavefront as Wavefront
    from dlm_jax.sampling.propose import wavefront_fill as wavefront_fill
    from dlm_jax.sampling.remask import RemaskRule as RemaskRule
    from dlm_jax.sampling.remask import Renoise as Renoise
    from dlm_jax.sampling.replay import Trace as Trace
    from dlm_jax.sampling.transforms import LogitTransform as LogitTransform
    from dlm_jax.sampling.transforms import MinP as MinP
    from dlm_jax.sampling.transforms import Temperature as Temperature
    from dlm_jax.sampling.transforms import TopK as TopK
    from dlm_jax.sampling.transforms import TopP as TopP
    from dlm_jax.sampling.transforms import chain as chain
    from dlm_jax.sampling.transforms import sample_logits as sample_logits
    from dlm_jax.settings import ABOVE_ZERO as ABOVE_ZERO
    from dlm_jax.settings import BELOW_ONE as BELOW_ONE
    from dlm_jax.settings import Setting as Setting
    from dlm_jax.settings import fact as fact
    from dlm_jax.settings import per_row as per_row
    from dlm_jax.settings import rule as rule
    from dlm_jax.settings import static as static
    from dlm_jax.training import train as train
    from dlm_jax.types import Axes as Axes
    from dlm_jax.types import CachedTrunk as CachedTrunk
    from dlm_jax.types import Inside as Inside
    from dlm_jax.types import Network as Network
    from dlm_jax.types import Status as Status
    from dlm_jax.types import Window as Window

__version__ = "0.3.0"

_NAMES = {
    "config": "MeshConfig SamplingParams",
    "inference.host": "Candidates",
    "inference.engine": "AsyncEngine Engine",
    "inference.generate": "Sampled Sampler chain_report generate replay sampler stream",
    "inference.model": "Model export load",
    "inference.request": "Request make_requests",
    "inference.results": "Row Texts",
    "inference.scoring": "Score score",
    "sampling.kv_cache": "KVCache",
    "sampling.commit": "CommitRule Threshold certain most most_confident",
    "sampling.edits": "EditRule delete_at deletion_scores gap_scores insert_at token_uncertainty",
    "sampling.noise": "NoiseRule",
    "sampling.propose": "FillRule Wavefront wavefront_fill",
    "sampling.remask": "RemaskRule Renoise",
    "sampling.transforms": "LogitTransform MinP Temperature TopK TopP chain sample_logits",
    "sampling.loop": "advance",
    "sampling.replay": "Trace",
    "sampling.program": "Counters",
    "settings": "ABOVE_ZERO BELOW_ONE Setting fact per_row rule static",
    "training": "train",
    "types": "Axes CachedTrunk Inside Network Status Window",
}
_HOME_OF = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name not in _HOME_OF:
        raise AttributeError(f"module 'dlm_jax' has no attribute {name!r}{_advice(name)}")
    return getattr(importlib.import_module(f"dlm_jax.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME_OF)


def _advice(name: str) -> str:
    """Where a name is that this package does not have."""
    if name.startswith("_"):
        return ""
    moved = importlib.import_module("dlm_jax.moved")
    if name in moved.NAMES:
        return f"; {moved.NAMES[name]}"
    for kind in ("commit", "edits", "kv_cache", "noise", "propose", "remask", "transforms"):
        if hasattr(importlib.import_module(f"dlm_jax.sampling.{kind}"), name):
            return f"; it is in dlm_jax.sampling.{kind}"
    return ""
