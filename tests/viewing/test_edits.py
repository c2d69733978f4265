"""A view of edited canvases sees as many edits as are counted."""

import pytest
from edited_rows import MODEL, PROMPTS, TOKENIZER

import dlm_jax
from dlm_jax.viewing.frames import Kind, changes, frame_of


@pytest.mark.parametrize(("every", "num_samples"), [(1, 1), (3, 3)])
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
            assert 0 <= pushed_out <= new.lost - old.lost
