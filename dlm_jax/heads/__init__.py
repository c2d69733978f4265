"""The heads of a model, with one file per head.

The file of a built-in head has three functions: ``layers`` and ``function`` make its module, and
``make_head`` its training. ``model.add_NAME_head`` adds the head NAME, and
``heads.start_NAME_iteration`` is the first step at which it is trained.
"""

from __future__ import annotations

from types import ModuleType

from dlm_jax.heads import critic, sampler
from dlm_jax.heads.critic import CRITIC
from dlm_jax.heads.sampler import SAMPLER
from dlm_jax.objectives.objective import MAIN, Head

HEADS: dict[str, ModuleType] = {"sampler": sampler, "critic": critic}
"""The files of the built-in heads, in the order in which they are initialised and their losses are
summed."""

__all__ = ["CRITIC", "HEADS", "MAIN", "SAMPLER", "Head"]
