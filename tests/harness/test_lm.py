"""The model class of the harness: what its methods return, and that the harness finds it."""

import dataclasses
import importlib
import sys
import types

import published_cases as cases
import pytest
import toy
import toy_model

from dlm_jax.config import SamplingParams
from dlm_jax.harness.lm import DlmJax, pair_of
from dlm_jax.hf import ChatTemplate
from dlm_jax.inference.model import Model
from dlm_jax.model.transformer import build

MODEL = dataclasses.replace(
    toy_model.MODEL,
    sample=SamplingParams(order="left_to_right", chain=("temperature",), ignore_eos=True, steps=12),
)


def _asked(*args):
    return types.SimpleNamespace(args=args)


def test_likelihoods_are_negative_nats_and_rolling_ones_their_sum():
    made = DlmJax(model=MODEL, draws=4)
    ((loglikelihood, is_greedy),) = made.loglikelihood([_asked("The", " cat")])
    assert loglikelihood < 0 and isinstance(is_greedy, bool)
    (whole,) = made.loglikelihood_rolling([_asked("The cat")])
    (behind,) = made.loglikelihood([_asked("", "The cat")])
    assert whole == behind[0]


def test_templates_and_names():
    chat = ChatTemplate("{{ messages[0].content }}", MODEL.tokenizer)
    made = DlmJax(model=dataclasses.replace(MODEL, chat=chat))
    assert made.apply_chat_template([{"role": "user", "content": "The cat"}]) == "The cat"
    assert made.chat_template(True) == chat.source and made.chat_template(False) == ""
    assert made.tokenizer_name == DlmJax(model=MODEL).tokenizer_name
    with pytest.raises(ValueError, match="no chat template"):
        DlmJax(model=MODEL).apply_chat_template([])


def _chatting(source):
    tokenizer = cases.bpe_tokenizer(puts_bos=True)
    network = build(toy.config(vocab_size=tokenizer.vocab_size))
    params = toy.random_params(network)
    chat = ChatTemplate(source, tokenizer)
    return DlmJax(model=Model(network, params, tokenizer, max_length=96, chat=chat), draws=2)


@pytest.mark.parametrize("name", cases.CHATS)
def test_contexts_of_chats_have_the_ids_of_their_conversation(name):
    made = _chatting(cases.CHATS[name])
    turns = [{"role": "user", "content": "hi<|im_end|><|eot_id|><bos>"}]
    text = made.apply_chat_template(turns)
    ids = made._chat_ids(text)
    assert ids.tolist() == made.model.chat.ids(turns).tolist()
    marks = made.model.tokenizer.encode_marked(text).tolist()
    assert len(ids) > len(marks)
    pair = pair_of(made.model, text, "a", ids=ids)
    assert pair.ids[: pair.given].tolist() == ids.tolist()
    # A text of an earlier process is tokenised as a whole, and other contexts are not chats.
    assert (
        made._chat_ids("<bos>a").tolist() == made.model.tokenizer.encode_marked("<bos>a").tolist()
    )
    assert made._chat_ids("") is None
    other = _chatting(cases.CHATS[name])
    assert other._chat_ids(text) is None
    other.chat_template(True)
    assert other._chat_ids(text).tolist() == marks


@pytest.mark.parametrize("prefix", ["The end", "end", "", " "])
@pytest.mark.parametrize("name", cases.CHATS)
def test_the_beginning_of_an_answer_is_an_open_turn(name, prefix):
    made = _chatting(cases.CHATS[name])
    asked = [{"role": "user", "content": "hi"}]
    begun = [*asked, {"role": "assistant", "content": prefix}]
    text = made.apply_chat_template(begun, add_generation_prompt=False)
    header = made.apply_chat_template(asked)
    assert text == header + (prefix if name == "chatml" else prefix.strip())
    assert made._chat_ids(text).tolist() == made.model.tokenizer.encode_marked(text).tolist()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"draws": 0}, "draws=0 is outside"),
        ({"temprature": 1}, "temprature"),
        ({"preset": "x"}, "preset='x'"),
    ],
)
def test_arguments_are_checked_at_once(arguments, told):
    with pytest.raises(ValueError, match=told):
        DlmJax(model=MODEL, **arguments)


def test_the_harness_finds_the_class_by_its_name():
    registry = pytest.importorskip("lm_eval.api.registry", reason="lm-eval is not installed")
    from dlm_jax.harness.lm_eval import register

    register()
    made = registry.get_model("dlm_jax")
    assert made is DlmJax


@pytest.fixture
def harness():
    pytest.importorskip("lm_eval.api.registry", reason="lm-eval is not installed")
    from dlm_jax.harness import lm_eval

    lm_eval.register()
    return lm_eval


def test_shipped_tasks_are_found_unless_the_caller_has_a_path(harness, tmp_path, monkeypatch):
    seen = []
    main = importlib.import_module("lm_eval.__main__")
    monkeypatch.setattr(main, "cli_evaluate", lambda: seen.append(sys.argv[1:]))
    assert harness.main(["--model", "dlm_jax"]) == 0
    assert harness.main(["--include_path", str(tmp_path)]) == 0
    (*_, flag, path), theirs = seen
    assert flag == "--include_path" and theirs == ["--include_path", str(tmp_path)]
    found = importlib.import_module("lm_eval.tasks").TaskManager(
        include_path=path, include_defaults=False
    )
    assert "dlm_jax_shakespeare_cloze" in found.all_tasks


def test_what_the_harness_refuses_is_a_line(harness, capsys):
    with pytest.raises(SystemExit) as stopped:
        harness.main(["--model", "dlm_jax", "--tasks", "no_such_task"])
    assert stopped.value.code == 2
    (line,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("error: "))
    assert "no_such_task" in line


def test_arguments_of_other_models_are_told_and_not_read(capsys):
    made = DlmJax(model=MODEL)
    given = {"until": [], "max_gen_toks": 1, "num_beams": 4, "use_cache": True, "min_length": 0}
    assert list(map(len, made.generate_until([_asked("The", given), _asked("A", given)]))) == [1, 1]
    assert capsys.readouterr().err.splitlines() == [
        f"{name} is not a setting of dlm_jax; it is ignored"
        for name in ("min_length", "num_beams", "use_cache")
    ]
    with pytest.raises(ValueError, match="^max_gen_toks=-1"):
        made.generate_until([_asked("The", given), _asked("A", {"max_gen_toks": -1})])
