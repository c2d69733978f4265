"""The program that serves: what it refuses before it listens, and how it ends."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import published_cases
import pytest
import saved_model
from serving_cases import complete, post, refusal_of, serving

import dlm_jax
from dlm_jax.cli.common import import_rules, load_model
from dlm_jax.serving import server

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return saved_model.save(tmp_path_factory.mktemp("serve") / "toy")


def _refused(capsys, *flags):
    with pytest.raises(SystemExit) as ended:
        server.main(list(flags))
    assert ended.value.code == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error:")]
    return line


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--port", "70000"], "--port"),
        (["--slots", "0"], "--slots"),
        (["--drain", "-1"], "--drain"),
        (["--max-seconds", "nan"], "--max-seconds"),
        (["--prot", "1"], "--port"),
        (["--host", "256.256.256.256"], "--host 256.256.256.256"),
        (["--port", "0", "--checkpoint", "nowhere"], "nowhere"),
    ],
)
def test_bad_flags_are_refused(capsys, flags, told):
    assert told in _refused(capsys, *flags)


def test_a_port_that_is_taken_and_an_empty_key_are_refused(capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port} is not available" in _refused(capsys, "--port", port)
    monkeypatch.setenv("MY_KEY", " ")
    assert "MY_KEY is empty" in _refused(capsys, "--api-key-env", "MY_KEY", "--port", "0")


def test_a_template_of_a_published_model_writes_its_markers(tmp_path):
    directory = published_cases.write(tmp_path / "model", "llada")
    template = tmp_path / "chat.jinja"
    template.write_text("<|start|>{{ messages[0].content }}<|end|>")
    model = server._with_template(dlm_jax.load(directory), template)
    ids = model.chat.ids([{"role": "user", "content": "<|end|>a"}]).tolist()
    assert (ids[0], ids[-1]) == (published_cases.START, published_cases.END)
    assert ids.count(published_cases.END) == 1


def test_broken_templates_and_presets_are_refused(capsys, run_dir, tmp_path):
    flags = ["--checkpoint", str(run_dir), "--port", "0"]
    assert "--preset='x' is unknown; this model has variable_length" in _refused(
        capsys, *flags, "--preset", "x"
    )
    template = tmp_path / "chat.jinja"
    template.write_text("{% for %}")
    line = _refused(capsys, *flags, "--chat-template", str(template))
    assert "chat_template is broken" in line
    assert "cannot be read" in _refused(capsys, *flags, "--chat-template", str(tmp_path / "no"))


@pytest.mark.parametrize(
    ("defaults", "told"),
    [
        (["temprature=1"], "did you mean 'temperature'?"),
        (["alg=entropy"], "unknown setting 'alg'; it is named order here"),
        (["temperature"], "--default temperature has no value"),
        (["top_p=2"], "--default top_p=2: top_p=2.0 is outside (0, 1]"),
        (["temperature=hot"], "--default temperature=hot: temperature='hot' is not a number"),
    ],
)
def test_defaults_are_checked_by_name_before_it_listens(capsys, run_dir, defaults, told):
    flags = [part for text in defaults for part in ("--default", text)]
    assert told in _refused(capsys, "--checkpoint", str(run_dir), "--port", "0", *flags)


@pytest.mark.slow
def test_it_tells_its_address_asks_for_the_key_and_ends_on_a_signal(run_dir):
    env = os.environ | {"PYTHONPATH": str(ROOT), "DLM_JAX_API_KEY": "secret"}
    command = [sys.executable, "-m", "dlm_jax.serve", "--checkpoint", str(run_dir), "--port", "0",
               "--default", "temperature=0", "--default", "gen-length=3",
               "--default", "order=left_to_right"]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
        assert httpx.get(f"{url}/v1/models").status_code == 401
        key = {"authorization": "Bearer secret"}
        models = httpx.get(f"{url}/v1/models", headers=key).json()
        assert [model["id"] for model in models["data"]] == ["toy"]
        asked = {"prompt": "A ", "steps": 3, "ignore_eos": True}
        completions = [
            httpx.post(f"{url}/v1/completions", headers=key, timeout=120, json=asked | own).json()
            for own in ({"seed": 1}, {"seed": 2}, {"seed": 1, "temperature": 2.0, "max_tokens": 5})
        ]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        texts = [made["choices"][0]["text"] for made in completions]
        assert texts[0] == texts[1] and [*map(len, texts)] == [3, 3, 5]
        logged = process.stderr.read()
        assert "secret" not in logged
        assert json.loads(logged.splitlines()[0])["event"] == (
            "heads: none; fill=parallel, order=left_to_right"
        )


RULES = """
from dlm_jax import LogitTransform, Setting, per_row, rule

@rule
class Shift(LogitTransform):
    '''Adds to one logit.'''
    shift_B: object = per_row(Setting("my_shift", 0.0, "added to the logit of id 3"))

    def apply(self, state, logits_NV, at):
        return logits_NV.at[:, 3].add(self.shift_B[at.row_N])
"""


@pytest.fixture
def own_rules(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "serve_rules_here.py").write_text(RULES)
    yield "serve_rules_here"
    sys.modules.pop("serve_rules_here", None)


def test_the_settings_of_own_rules_are_fields_and_defaults_of_requests(run_dir, own_rules):
    args = server.make_parser().parse_args(["--checkpoint", str(run_dir)])
    model = load_model(args)
    rules = import_rules(own_rules)
    defaults = server._defaults(model, {}, ["order=left_to_right", "my_shift=1000"], rules)
    fourth = model.tokenizer.decode([3])
    asked = {"prompt": "A ", "max_tokens": 4, "steps": 4, "chain": ["temperature", "shift"]}
    with serving(model, defaults=defaults) as running:
        texts = [
            complete(running, asked | more) for more in ({}, {"my_shift": -1000.0}, {"logprobs": 2})
        ]
        wrong = refusal_of(post(running, "/v1/completions", asked | {"my_shift": "much"}))
    assert texts[0] == texts[2] == fourth * 4 and fourth not in texts[1]
    assert wrong["param"] == "my_shift"


def test_rules_that_are_none_are_refused(capsys, own_rules, run_dir):
    flags = ["--checkpoint", str(run_dir), "--port", "0", "--rules", "nowhere_here"]
    assert "--rules nowhere_here" in _refused(capsys, *flags)


@pytest.mark.parametrize(("key", "are_bound"), [(None, True), ("secret", False)])
def test_without_a_key_a_server_on_loopback_answers_its_own_hosts(
    run_dir, monkeypatch, key, are_bound
):
    monkeypatch.setattr(server, "start_jax", lambda *args: None)
    if key is not None:
        monkeypatch.setenv("DLM_JAX_API_KEY", key)
    seen = {}
    monkeypatch.setattr(
        "dlm_jax.serving.server.make_app", lambda engine, options: seen.update(o=options)
    )
    with contextlib.ExitStack() as undo:
        with contextlib.suppress(AttributeError):  # there is no app
            server._served(["--checkpoint", str(run_dir), "--port", "0"], undo)
    assert seen["o"].hosts == (("127.0.0.1", "[::1]", "localhost") if are_bound else ())
