"""Names that left the core, for the error messages about them."""

from __future__ import annotations

import re

_CONTRIB = {
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
"""Names by module of `dlm_jax.contrib`."""
_HOMES = {name: home for home, names in _CONTRIB.items() for name in names.split()}
_ADVICE = {
    "policy optimisation is in dlm_jax.contrib.rl (docs/reinforcement.md)": "reward rl",
    "it is a setting of python -m dlm_jax.contrib.distillation": """
        certainty_draws certainty_share certainty_steps certainty_temperature certainty_weight
        sdtt_share sdtt_steps sdtt_teacher_steps teacher
    """,
    "pass **model.presets[NAME] in Python, or --preset NAME": "preset",
    "it was removed; use cache_refresh": "cache_margin",
    "it was removed; use more steps": "corrector_share corrector_steps",
    "it was removed; whole texts are compared": "edit_hidden",
    "it was removed; use edit_gain": "edit_replace_gain edit_token_gain",
    "it was removed with the sequence scorer; every model is a language model": "mode",
    "it was removed; use a larger block_length": "open_blocks open_share",
    "it was removed; use sampler_min_neighbors_ratio": "sampler_ratio_by_density",
    "it is named sample.sampler_min_neighbors_ratio here": "sampler_min_neighbors_ratio",
    "it was removed; use a loop of the shell": "sweep",
    "it was removed; python -m benchmarks.generation measures steps": "time_steps",
}
"""Other names, by what became of them."""
_OTHERS = {name: advice for advice, names in _ADVICE.items() for name in names.split()}


_ORDERS = {
    **dict.fromkeys(("measure", "observe", "weighed", "show_score"), "score"),
    **dict.fromkeys(("reads_head", "map_blocks", "rereads", "goes_on"), "needs"),
    **dict.fromkeys(("start_memory", "remembers_ids"), "init"),
    "remember": "the state that select returns",
    "log_chance": "log_prob",
    "renews": "NoiseRule",
    "patience": "rewrites",
    "rewrite_steps_B": "rewrites",
}
_MEMBERS = {
    "commit": _ORDERS,
    "remask": _ORDERS,
    "fill": {"sources": "logits", "forwards": "FillOutput.counts"},
    "transforms": {
        **dict.fromkeys(("at_progress", "makes_greedy"), "transforms.temperature.Moving"),
        **dict.fromkeys(("banned", "forbids"), "LogitBias"),
        **dict.fromkeys(("ignores_ids", "yields"), "transforms.transform.Pointwise"),
        "reads_final_logprob": "update",
    },
}
"""Members of rules in version 0.2 by slot, and where they are."""


def moved(name: str) -> str:
    """Advice for a setting, flag or ``setting=value`` that left the core; empty for others."""
    if name.startswith("task:"):
        return "it was removed; python -m dlm_jax.contrib.arithmetic prints sums as JSON lines"
    name = name.lstrip("-").replace("-", "_")
    if name in _OTHERS:
        return _OTHERS[name]
    home = _HOMES.get(name)
    if home is None:
        return ""
    module = f"dlm_jax.contrib.{home}"
    return f"it is in {module}: pass --rules {module}, or in Python rules={module}"


_NAMES = {
    "CacheRule": "it is KVCache now",
    "CandidateWriter": "FillInput, in dlm_jax.sampling.propose, replaces it",
    "Cells": "EditContext, in dlm_jax.sampling.edits, has its fields",
    "Decision": "it is in dlm_jax.contrib.decide",
    "SampleConfig": "it is SamplingParams now",
    "Ticket": "Engine.submit returns the number of the request",
    "corrupted_share": "it was removed with the sequence scorer",
    "decide": "it is in dlm_jax.contrib.decide",
    "insert_at_gap": "it is insert_at now",
    "matching": "it is in dlm_jax.contrib.matching",
}
"""Public names of version 0.2 other than rules, and where they are."""


def moved_name(name: str) -> str:
    """Advice for a public name of version 0.2 that left `dlm_jax`; empty for others."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    choices = (f"{key}={snake}" for key in ("order", "remask", "fill", "edit_scoring"))
    home = next((_HOMES[choice] for choice in choices if choice in _HOMES), None)
    return _NAMES.get(name, "") if home is None else f"it is in dlm_jax.contrib.{home}"


def moved_structure(pattern: str) -> str:
    """Advice for a structure that is no expression; empty for others."""
    if re.search(r"^\s*root\s*::=", pattern, re.MULTILINE) is None:
        return ""
    return (
        "is a grammar, which is no longer supported; write it as a regular expression, or use "
        "regex_of_schema"
    )


def moved_member(slot: str, name: str) -> str:
    """Advice for a member of a rule of version 0.2; empty for others."""
    place = _MEMBERS.get(slot, {}).get(name)
    return f"which is {place} now; see docs/own_rules.md" if place else ""
