"""Chat templates write what they say, in a sandbox; specials of a text stay text elsewhere."""

from __future__ import annotations

import published_cases as cases
import pytest

import dlm_jax
from dlm_jax.cli import sample
from dlm_jax.published import ChatTemplate, chat


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return cases.write(tmp_path_factory.mktemp("chat") / "model", "llada")


@pytest.fixture(scope="module")
def model(directory):
    return dlm_jax.load(directory)


def test_a_conversation_is_written_as_the_template_says(model):
    turns = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "yes"}]
    assert model.chat.text(turns) == (
        "<|start|>user hi<|end|><|start|>assistant yes<|end|><|start|>assistant "
    )
    ids = model.chat.ids(turns[:1], begins_answer=False).tolist()
    letters = [cases.LETTERS.index(letter) for letter in "user hi"]
    assert ids == [cases.START, *letters, cases.END]


def test_text_never_becomes_a_special_outside_a_template(model):
    ids = model.tokenizer.encode("a<|end|>")
    assert cases.END not in ids
    assert model.tokenizer.encode_marked("a<|end|>").tolist() == [0, cases.END]
    assert model.tokenizer.decode([0, cases.EOS, 1]) == "ab"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no system turn') }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_reaches_nothing_outside_its_sandbox(model, source):
    template = ChatTemplate(source, model.tokenizer)
    with pytest.raises(ValueError, match="chat_template rejects"):
        template.text([{"role": "user", "content": "hi"}])


LOOP = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (LOOP, "it takes longer than 0.5 s"),
        ("{{ 10 ** 10000000000 }}", "it takes longer than 0.5 s"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ 'a' * 10**10 }}", "it uses more than 1024 MiB"),
        ("{{ messages[0].role * 10**8 }}", "its text is longer than 16,777,216 characters"),
        ("{{ 'a' | center(10**10) }}", "it uses more than 1024 MiB"),
        ("{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
         "{% endfor %}", "it uses more than 1024 MiB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ " + "(" * 9999 + ")" * 9999 + " }}", "maximum recursion depth"),
    ],
)  # fmt: skip
def test_a_template_is_bounded_in_time_memory_and_output(model, source, reason, monkeypatch):
    monkeypatch.setattr(chat, "_SECONDS", 0.5 if "longer than 0.5" in reason else 60.0)
    template = ChatTemplate(source, model.tokenizer)
    with pytest.raises(ValueError, match="chat_template rejects the messages") as refused:
        template.text([{"role": "user", "content": "hi"}])
    assert reason in str(refused.value) and "\n" not in str(refused.value)
    # The next one is not touched by it.
    monkeypatch.setattr(chat, "_SECONDS", 60.0)
    assert model.chat.text([{"role": "user", "content": "hi"}]).startswith("<|start|>user hi")


@pytest.mark.parametrize("values", [{"more": object()}, {"source": "x"}])
def test_variables_of_a_template_are_what_json_can_hold(model, values):
    template = ChatTemplate("{{ source }}", model.tokenizer)
    turns = [{"role": "user", "content": "hi"}]
    if "more" in values:
        with pytest.raises(ValueError, match="chat_template rejects .*not JSON serializable"):
            template.text(turns, **values)
    else:
        assert template.text(turns, **values) == "x"


def test_a_turn_without_content_is_refused(model):
    with pytest.raises(ValueError, match=r"messages\[0\]"):
        model.chat.text([{"role": "user"}])


def test_a_program_prints_the_answer_alone(directory, capsys):
    flags = ["--checkpoint", str(directory), "--prompt", "hi"]
    short = ["--gen-length", "4", "--steps", "4", "--block-length", "0"]
    assert sample.main([*flags, "--chat", "--preset", "fast", *short]) == 0
    answer = capsys.readouterr().out
    assert "user" not in answer
    assert len(answer.strip("\n")) <= 4


def test_a_program_refuses_what_the_model_lacks(directory, tmp_path, capsys):
    flags = ["--checkpoint", str(directory), "--prompt", "hi"]
    with pytest.raises(SystemExit) as stopped:
        sample.main([*flags, "--preset", "slow"])
    assert stopped.value.code == 2
    assert (
        "--preset='slow' is unknown; this model has variable_length, llada, fast"
        in capsys.readouterr().err
    )
    plain = cases.write(tmp_path / "plain", "llada")
    (plain / "tokenizer_config.json").unlink()
    with pytest.raises(SystemExit) as stopped:
        sample.main(["--checkpoint", str(plain), "--prompt", "hi", "--chat"])
    assert stopped.value.code == 2
    assert "chat_template" in capsys.readouterr().err
