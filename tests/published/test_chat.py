"""Chat templates write what they say, in a sandbox; specials of a text stay text elsewhere."""

from __future__ import annotations

import published_cases as cases
import pytest

import dlm_jax
from dlm_jax.cli import sample
from dlm_jax.published import ChatTemplate


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
    with pytest.raises(ValueError, match="chat_template refuses"):
        template.text([{"role": "user", "content": "hi"}])


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
