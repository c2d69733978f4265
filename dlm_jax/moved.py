"""Names that `dlm_jax.contrib` provides, for the error messages about them."""

from __future__ import annotations

_NAMES = {
    "decoders": """
        order=credit credit_weight credit_decay credit_power
        order=dawn induced_threshold apart_threshold dependence sink
        order=dilated dilated_base
        order=frechet frechet_margin
        order=hierarchical hierarchy_floor
        order=klass klass_divergence klass_steps
        order=local_leap leap_threshold leap_radius
        order=position_aware position_decay information_limit common_ids
        order=prophet prophet_gap
        order=slow_fast slow_threshold slow_steps slow_spread
        remask=wino verify_threshold
    """,
    "edits": "edit_scoring=lead",
    "speculative": "fill=speculative",
    "constrained_waves": "fill=constrained_waves",
}
_PROGRAM = ("calibration", "fit", "labelled")
"""Flags of ``python -m dlm_jax.contrib.decide``."""

_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def moved(name: str) -> str:
    """Advice for a setting, flag or ``setting=value`` of `dlm_jax.contrib`; empty for others."""
    name = name.lstrip("-").replace("-", "_")
    if name in _PROGRAM:
        return "it is a flag of python -m dlm_jax.contrib.decide"
    home = _HOMES.get(name)
    if home is None:
        return ""
    module = f"dlm_jax.contrib.{home}"
    return f"it is in {module}: pass --rules {module}, or in Python rules={module}"
