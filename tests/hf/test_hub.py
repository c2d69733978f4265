"""Models by their ids on a hub, which is a stub on loopback; each client is its own process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import published_cases
import pytest
from hub_stub import serving_hub

import dlm_jax
from dlm_jax.cli import sample
from dlm_jax.hf.hub import fetched, hub_id

ROOT = Path(__file__).parents[2]
DATA = {"modeling_llada.py": b"raise SystemExit('it was run')", "original/model.safetensors": b"x"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return published_cases.write(tmp_path_factory.mktemp("hub") / "model", "llada", seed=3)


@pytest.fixture
def client(tmp_path):
    """Runs Python as somebody whose hub, cache and token are of this test."""

    def run(url, code, **more):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        env |= {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT),
                "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1",
                "JAX_PLATFORMS": "cpu"} | more  # fmt: skip
        command = [sys.executable, "-c", code] if isinstance(code, str) else [sys.executable, *code]
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
        )

    return run


def _files(path):
    return {one.name: one.read_bytes() for one in Path(path).iterdir()}


TELL = """
import json, sys
from dlm_jax.hf.hub import fetched
from dlm_jax.settings import SettingError
told = []
for name in sys.argv[1:] or NAMES:
    try:
        told.append(str(fetched(name)))
    except SettingError as error:
        told.append(f"{error.name}: {error}")
print(json.dumps(told))
"""


def _told(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_an_id_is_fetched_once_and_read_from_the_cache_then(directory, client, tmp_path):
    names = ["org/m", "org/m@other", "org/none", "org/m@none", "org/gated", "org/empty"]
    with serving_hub() as hub:
        hub.repos["org/m"] = {"main": _files(directory) | DATA, "other": _files(directory)}
        hub.repos["org/m"]["other"]["chat_template.jinja"] = b"{{ messages }}"
        hub.repos["org/empty"] = {"main": {"README.md": b""}}
        hub.gated.add("org/gated")
        online = client(hub.url, f"NAMES = {names!r}\n{TELL}", HF_TOKEN="secret")
        whole, other, *refused = _told(online)
        assert _files(whole) == {k: v for k, v in _files(directory).items()}
        assert _files(other).keys() - _files(whole).keys() == {"chat_template.jinja"}
        assert str(tmp_path) in whole
        assert [line.split(";")[0] for line in refused] == [
            "checkpoint: checkpoint='org/none' is neither a local path nor a model on the Hub that "
            "you can access",
            "checkpoint: checkpoint='org/m@none' is not an existing revision",
            "checkpoint: checkpoint='org/gated' is gated",
            "checkpoint: checkpoint='org/empty' has neither a config.json nor a single "
            ".safetensors file",
        ]
        assert {token for _, _, token in hub.asked} == {"secret"}
        assert not [path for _, path, _ in hub.asked if ".py" in path or "original" in path]
        downloads = [path for method, path, _ in hub.asked if method == "GET" and "resolve" in path]
        assert _told(client(hub.url, f"NAMES = ['org/m']\n{TELL}")) == [whole]
        again = [path for method, path, _ in hub.asked if method == "GET" and "resolve" in path]
        assert again == downloads
    # Nobody listens any more; and then it is not even tried.
    for more in ({}, {"HF_HUB_OFFLINE": "1"}):
        kept, lost = _told(client(hub.url, f"NAMES = ['org/m', 'org/x']\n{TELL}", **more))
        assert kept == whole
        assert lost.startswith("checkpoint: checkpoint='org/x' is not a local path, the Hub ")


def test_without_the_extra_the_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SystemExit) as ended:
        sample.main(["--checkpoint", "nobody/nothing", "--prompt", "A"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "nobody/nothing" in line and "pip install 'dlm_jax[hub]'" in line


def test_what_is_here_is_never_looked_up(monkeypatch, tmp_path, directory):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "m").symlink_to(directory)
    assert fetched("org/m") == "org/m" and dlm_jax.load("org/m").family == "llada"
    # A name that is missing in a directory that is here is a slip, no id.
    with pytest.raises(ValueError, match="org/typo does not exist"):
        dlm_jax.load("org/typo")


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("org/m", ("org/m", None)), ("GSAI-ML/LLaDA-8B.x_1", ("GSAI-ML/LLaDA-8B.x_1", None)),
        ("org/m@refs/pr/1", ("org/m", "refs/pr/1")), ("org/m@abc1", ("org/m", "abc1")),
        ("org", None), ("a/b/c", None), ("/a/b", None), ("./b", None), ("../b", None),
        ("~/b", None), ("a/m.safetensors", None), ("tests/nothing", None), ("gs://b/c", None),
        (Path("org/m"), None), (None, None), ("org/", None), ("org/m@", None),
    ],
)  # fmt: skip
def test_ids_are_told_from_paths(monkeypatch, path, found):
    monkeypatch.chdir(ROOT)
    assert hub_id(path) == found
