"""A view of edited canvases sees as many edits as are counted."""

import dataclasses

import pytest
import toy_model

import dlm_jax
from dlm_jax.config import SamplingParams
from dlm_jax.viewing.frames import Kind, changes, frame_of

TOKENIZER = toy_model.TOKENIZER
SAMPLE = SamplingParams(
    steps=6, temperature=0.8, chain=("temperature",), schedule="all", ignore_eos=True,
    resample=True, edit=True, insert_ratio_start=0.2, delete_ratio_start=0.3, delete_margin=0.0,
)  # fmt: skip
MODEL = dataclasses.replace(toy_model.MODEL, sample=SAMPLE)
# They run in one program, on four slots.
PROMPTS = [
    {"prompt": "The ", "draft": "cat sat. A rat", "seed": 1, "max_length": 18,
     "insert_ratio_start": 0.5},
    {"prompt": "A ", "draft": "rat ran. The cat sat", "seed": 2, "max_length": 23,
     "overflow": "refuse", "insert_ratio_start": 0.5},
    {"gen_length": 18, "seed": 3, "resample": False, "edit_token": "mask", "block_length": 7},
    {"prompt": "A ", "draft": "cat. ", "gen_length": 4, "seed": 4, "insert_ratio_start": 0.0,
     "length_target_mode": "to_max_new", "max_new_tokens": 15, "block_length": 5, "steps": 9},
]  # fmt: skip


@pytest.mark.parametrize(("every", "num_samples"), [(1, 1), (3, 3), ("block", 1)])
def test_a_view_accepts_the_canvases_and_sees_as_many_edits_as_are_counted(every, num_samples):
    shown = [[] for _ in PROMPTS]
    for canvases in dlm_jax.stream(
        MODEL, PROMPTS, every=every, num_samples=num_samples, batch_size=4
    ):
        for index, row in canvases.items():
            if index % num_samples == 0:
                shown[index // num_samples].append(row)
    for index, rows in enumerate(shown):
        frames = [frame_of(index, row, mask_id=TOKENIZER.mask_id) for row in rows]
        counted = [row.counters for row in rows]
        for before, after, old, new in zip(frames, frames[1:], counted, counted[1:], strict=False):
            seen = changes(before, after)
            if every != 1:
                continue
            assert seen.count(Kind.INSERTED) == new.insertions - old.insertions
            pushed_out = seen.deleted.size - (new.deletions - old.deletions)
            is_refusing = PROMPTS[index].get("overflow") == "refuse"
            assert 0 <= pushed_out <= (0 if is_refusing else new.lost - old.lost)
