"""Settings of one request: what a checkpoint recommends, a request asks for, a flag says.

Nothing is declared here: every field of `SampleConfig` follows from the rules of
`dlm_jax.sampling`, each of which declares its own settings.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from dlm_jax.sampling.row import RowParams
from dlm_jax.sampling.rules import BUILT_IN, RuleTable
from dlm_jax.sampling.transforms.protocol import is_greedy
from dlm_jax.settings import nearest


class RowSettings:
    """Checked settings of one row under a table of rules; every default is neutral.

    Attributes:
      table: the rules that they are the settings of.
      defaults: by name, as they are kept.
    """

    table: ClassVar[RuleTable] = BUILT_IN
    defaults: ClassVar[Mapping[str, Any]] = {}

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, **settings: Any): ...

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        values = vars(self)
        for name, setting in self.table.settings.items():
            # Most are the default itself, which has been checked.
            if values[name] is not self.defaults[name]:
                object.__setattr__(self, name, setting.checked(values[name]))
        for rule in (RowParams, *self.table.checks(self)):
            rule.check(self)

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes the argmax at every step."""
        return is_greedy(self)

    @property
    def inserts(self) -> bool:
        """Whether the row may gain tokens."""
        return self.table.edit[self.edit_scoring].inserts(self)

    @property
    def remasks(self) -> bool:
        """Whether anything is ever remasked."""
        return self.remask != "none" and self.table.remask[self.remask].is_used(self)

    @property
    def edits(self) -> bool:
        """Whether the row's length may change."""
        return self.table.edits(self) is not None

    @property
    def renoises(self) -> bool:
        """Whether anything is ever overwritten before a forward."""
        return self.table.renoises(self) is not None

    @property
    def refines(self) -> bool:
        """Whether tokens that are there may change, as those of a draft should."""
        return self.remasks or self.resample or self.edits or self.renoises


@functools.lru_cache(maxsize=64)
def settings_of(table: RuleTable) -> type[RowSettings]:
    """The settings of rows under a table: a frozen dataclass, one field for each setting.

    Raises:
      ValueError: the default of a setting is no value of it.
    """
    defaults = {name: s.checked(s.default) for name, s in table.settings.items()}
    fields = [
        (name, s.annotation, dataclasses.field(default=defaults[name], metadata={"help": s.help}))
        for name, s in table.settings.items()
    ]
    namespace = {
        "table": table,
        "defaults": defaults,
        "__doc__": "Recommended sampling settings: stored in checkpoints, defaults of requests.",
    }
    return dataclasses.make_dataclass(
        "SampleConfig", fields, bases=(RowSettings,), namespace=namespace, frozen=True, kw_only=True
    )


if TYPE_CHECKING:

    class SampleConfig(RowSettings):
        """Recommended sampling settings: stored in checkpoints, defaults of requests."""

else:
    SampleConfig = settings_of(BUILT_IN)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    # The loop of variable-length edits: edit, re-noise, forward, write every token that was not
    # given. Re-noise is a schedule of its own, off unless given: renoise_start=0.1, say.
    "variable_length": {
        "edit": True, "edit_scoring": "uncertainty", "edit_token": "space",
        "edit_schedule": "cosine", "insert_ratio_start": 0.04, "insert_ratio_end": 0.0,
        "delete_ratio_start": 0.04, "delete_ratio_end": 0.0, "insert_margin": 0.0,
        "delete_margin": 0.02, "delete_lambda": 0.3, "cooldown_distance": 1, "overflow": "trim",
        "length_target_mode": "none", "resample": True, "order": "random", "schedule": "all",
        "fill": "parallel", "remask": "none", "block_length": 0, "cache": "none",
    },
}  # fmt: skip
"""Settings by name that go with every model: keywords of `dlm_jax.generate`, ``--preset NAME``."""


def resolve(*layers: Mapping[str, Any] | None, table: RuleTable = BUILT_IN) -> SampleConfig:
    """Settings from layers of names and values, later ones winning; `None` is an empty layer.

    Pass what a checkpoint recommends first and what the user gave explicitly last: a given value
    wins also where it equals the built-in default, and a name that is absent overrides nothing.

    Raises:
      ValueError: an unknown name, with the nearest known one; or a value out of range.
    """
    known = tuple(table.settings)
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in (layer or {}).items():
            if name not in table.settings:
                raise ValueError(
                    f"{name}={value!r} is not a sampling setting; {nearest(name, known, value)}"
                )
            merged[name] = value
    return settings_of(table)(**merged)  # type: ignore[return-value]
