"""The objectives of a config as one mixture."""

from __future__ import annotations

import functools

from dlm_jax.config import ObjectiveConfig
from dlm_jax.diffusion.canvas_denoising import canvas_denoising
from dlm_jax.diffusion.corruption import SCHEDULES, Schedule
from dlm_jax.diffusion.objectives import (
    Mixture,
    NetworkObjective,
    Objective,
    denoising,
    elbo,
    process_elbo,
    proofreading,
)
from dlm_jax.diffusion.processes import checked, noise_process


def _of_process(
    config: ObjectiveConfig,
    schedule: Schedule,
    *,
    mask_id: int,
    noise_ids: tuple[int, ...],
    block_length: int,
    has_canvases: bool,
) -> NetworkObjective:
    """The only objective of a model with canvases, or of a process with other noise than MASK."""
    process = checked(noise_process(config), config.process)
    common = {"schedule": schedule, "mask_id": mask_id, "noise_ids": noise_ids}
    if not has_canvases:
        return process_elbo(process, block_length=block_length, **common)
    return canvas_denoising(
        process,
        canvas_length=block_length,
        text_weight=config.text_weight,
        conditioned_share=config.conditioned_share,
        **common,
    )


def mixture_of(
    config: ObjectiveConfig,
    *,
    mask_id: int,
    random_ids: tuple[int, ...],
    noise_ids: tuple[int, ...] = (),
    block_length: int = 0,
    has_canvases: bool = False,
) -> Mixture:
    """Returns the mixture of objectives of a config. Objectives whose share is 0 are omitted.

    A corruption can show `random_ids` instead of the true token, and a process other than the
    masked one `noise_ids`. `block_length` is that of a block-causal model, or the length of a
    canvas, else 0.
    """
    process, schedule = noise_process(config), SCHEDULES[config.schedule](config.schedule_power)
    if has_canvases or not process.is_masked:
        objective = _of_process(
            config,
            schedule,
            mask_id=mask_id,
            noise_ids=noise_ids,
            block_length=block_length,
            has_canvases=has_canvases,
        )
        name, share = "denoising" if has_canvases else "elbo", config.random_length_share
        return Mixture({name: objective}, {name: 1.0}, random_length_share=share)
    table: dict[str, tuple[float, Objective | NetworkObjective]] = {
        "elbo": (
            1.0 - config.denoising_share - config.proofreading_share,
            functools.partial(
                elbo,
                schedule=schedule,
                mask_id=mask_id,
                block_length=block_length,
                over=config.normaliser,
                is_weighted=config.time_weight,
            ),
        ),
        "denoising": (
            config.denoising_share,
            functools.partial(denoising, settings=config, mask_id=mask_id, random_ids=random_ids),
        ),
        "proofreading": (
            config.proofreading_share,
            functools.partial(
                proofreading,
                max_ratio=config.misprint_ratio,
                mask_id=mask_id,
                kinds=config.misprint_kinds,
                masked_rows=config.misprint_masked_rows,
            ),
        ),
    }
    used = {name: found for name, found in table.items() if found[0] > 1e-6}
    return Mixture(
        {name: objective for name, (_, objective) in used.items()},
        {name: share for name, (share, _) in used.items()},
        random_length_share=config.random_length_share,
    )
