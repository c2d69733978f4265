"""How devices are arranged."""

from __future__ import annotations

import dataclasses

from dlm_jax.config.fields import field, require, require_fit


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How devices are arranged: the product of the axes is the number of devices."""

    data: int = field(-1, "devices that split the batch; -1: all that the other axes leave")
    fsdp: int = field(
        0,
        "devices that also split parameters and optimiser state; 0: as few as leave three quarters "
        "of an accelerator's memory free",
    )
    tensor: int = field(1, "devices that split the matrices of one layer")
    expert: int = field(1, "devices that split experts, and the batch where there are none")
    context: int = field(1, "devices that split the positions of a row, for very long rows")

    def __post_init__(self) -> None:
        require_fit("mesh", self)
        require(
            self.data == -1 or self.data >= 1, f"mesh.data={self.data} must be -1 or at least 1"
        )
        require(self.fsdp >= 0, f"mesh.fsdp={self.fsdp} must be at least 0")
        for name in ("tensor", "expert", "context"):
            value = getattr(self, name)
            require(value >= 1, f"mesh.{name}={value} must be at least 1")
