from __future__ import annotations

from pathlib import Path

import pytest

from dlm_jax.store import files


@pytest.fixture
def written(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(b"\x00\x01hello")
    (tmp_path / "inner" / "b").write_bytes(bytes(range(9)))
    (tmp_path / "empty").touch()
    files.write_manifest(tmp_path, {"x": 1})
    return tmp_path


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_untouched_files_verify_and_the_facts_come_back(written: Path):
    files.check_manifest(written)
    assert files.read_manifest(written) == {"x": 1}


def test_every_single_bit_flip_of_every_file_is_found(written: Path):
    for path in _files(written):
        original = path.read_bytes()
        for bit in range(8 * len(original)):
            flipped = bytearray(original)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            with pytest.raises(files.Damaged, match=path.name):
                files.check_manifest(written)
        path.write_bytes(original)
    files.check_manifest(written)


def test_every_shortened_lengthened_or_missing_file_is_found(written: Path):
    for path in _files(written):
        original = path.read_bytes()
        for changed in (original[:-1], original[: len(original) // 2], original + b"\x00"):
            if changed != original:
                path.write_bytes(changed)
                with pytest.raises(files.Damaged, match=path.name):
                    files.check_manifest(written)
        path.unlink()
        with pytest.raises(files.Damaged, match=path.name):
            files.check_manifest(written)
        path.write_bytes(original)


def test_files_added_later_do_no_harm(written: Path):
    (written / "inner" / ".DS_Store").write_bytes(b"x")
    files.check_manifest(written)


def test_no_manifest_appears_when_summing_up_fails(tmp_path: Path):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError):
        files.write_manifest(tmp_path, {})
    assert not (tmp_path / files.MANIFEST).exists()
