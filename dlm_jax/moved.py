"""Settings and names that left the core, for the error messages about them."""

from __future__ import annotations

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
    "remdm": """
        order=ancestral_remdm remask=remdm_cap remask=remdm_conf remask_eta
    """,
    "speculative": "fill=speculative",
    "constrained_waves": "fill=constrained_waves",
    "drafts": "order=drafted cache=drafts draft_by draft_confidence draft_length draft_verified",
}
"""Names by module of `dlm_jax.contrib`."""
_HOMES = {name: home for home, names in _CONTRIB.items() for name in names.split()}
_ADVICE = {
    "policy optimisation is in dlm_jax.contrib.rl (docs/reinforcement.md)": "reward rl",
    "it was removed; python -m dlm_jax.contrib.distillation distils (docs/contrib.md)": """
        certainty_draws certainty_share certainty_steps certainty_temperature certainty_weight
        sdtt_share sdtt_steps sdtt_teacher_steps teacher
    """,
    "pass **model.presets[NAME] in Python, or --preset NAME": "preset",
    "it was removed; put a reverse proxy in front of the server": "allow_origin log_texts max_body",
    "it was removed": """
        calibration mask_like prefix_mib report_every report_json sampler_width steps_per_call
    """,
    "it was removed; every norm is RMSNorm": "model.norm",
    "it was removed; its default is used": """
        max_ratio muon_momentum sticky_alone sticky_beside
    """,
    "it was removed; a text has the same distribution without it": "draw",
    "it was removed; bfloat16 is faster": "quantize",
    "it was removed; DRY searches the whole run, and dry_multiplier=0 disables it": "dry_last_n",
    "it was removed; each new character is refused": "new_characters",
    "it was removed; pass an objective in Python (docs/training.md)": "process_settings",
    "it was removed; the loss of the sampler head is that of the data": "sampler_trunk_share",
    "it was removed; the network's probability of a token decides": "renew_by",
    "it was removed; the schedule is cosine": "renoise_schedule",
    "it was removed; use cache=dual": "cache=prefix",
    "it was removed; use cache_refresh": "cache_margin",
    "it was removed; use edit_scoring=likelihood": "edit_scoring=lead",
    "it was removed; use remask=remdm_cap": "remask=remdm_rescale",
    "it was removed; use length_target_mode=to_max_new": "length_target_mode=exact",
    "it was removed; use order=threshold": "factor order=factor",
    "it was removed; use remask=scheduled": "remask=scheduled_threshold",
    "it was removed; the least likely tokens are remasked": "remask_randomness",
    "it was removed; every row without edits ends at its EOS": "stop_at_eos",
    "it was removed; use top_p": "sampler_top_p",
    "it was removed; use train.checkpoint_dir": "local_checkpoint_dir",
    "it was removed; use train.checkpoint_every": "local_checkpoint_every",
    "it was removed; write an expression, or a schema as response_format": "grammar",
    "it was removed; ban the ids with logit_bias": "confidence_without",
    "it was removed; use more steps": "corrector_share corrector_steps",
    "it was removed; whole texts are compared": "edit_hidden",
    "it was removed; use edit_gain": "edit_replace_gain edit_token_gain",
    "it was removed; use insert_ratio_start": "insert_margin",
    "it was removed; use sampler_even_odd": "sampler_spread_seeds",
    "it was removed with the sequence scorer; every model is a language model": "mode",
    "it was removed; model.attention_type=canvas has all layers of DiffusionGemma": """
        attention_scale embedding_scaled experts_beside full_value_from_key layer_scales
        post_norms router_scales self_conditioning value_norm
    """,
    "it was removed; use a larger block_length": "open_blocks open_share",
    "it was removed; use sampler_min_neighbors_ratio": "sampler_ratio_by_density",
    "it is named sample.sampler_min_neighbors_ratio here": "sampler_min_neighbors_ratio",
    "it was removed; pass max_candidates in Python": "max_candidates",
    "it was removed; pass read_back=True in Python": "read_back",
    "a line of a file is one row; repeat the line": "n",
    "it was removed; use a loop of the shell": "sweep",
    "it was removed; --text reads prompts and responses": "pairs",
    "it was removed; python -m benchmarks generate measures steps": "time_steps",
    "the harness does not read it; pass a loaded model in Python": "ignore_config",
}
"""Other names, by what became of them."""
_OTHERS = {name: advice for advice, names in _ADVICE.items() for name in names.split()}

NAMES = {
    "decide": "it is in dlm_jax.contrib.decide",
    "Decision": "it is in dlm_jax.contrib.decide",
    "Generation": "it is Texts",
    "inside": "it is model.network.inside",
    "SampleConfig": "it is SamplingParams",
    "parallel_fill": "it is wavefront_fill(..., rule=Parallel())",
    "Ticket": "it is the number that Engine.submit returns",
}
"""Names that `dlm_jax` had, by what they are now."""


def moved(name: str) -> str:
    """Advice for a setting, flag or ``setting=value`` that left the core; empty for others."""
    name = name.lstrip("-").replace("-", "_")
    if name.startswith("rl."):
        name = "rl"
    if name in _OTHERS:
        return _OTHERS[name]
    home = _HOMES.get(name)
    if home is None:
        return ""
    module = f"dlm_jax.contrib.{home}"
    return f"it is in {module}: pass --rules {module}, or in Python rules={module}"
