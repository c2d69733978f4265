"""Published causal models read and write the same tokens as in transformers.

References are transformers' own calls, as a user makes them: ``tokenizer(text)``,
``apply_chat_template``, ``generate``, and the log-softmax of its logits.
"""

import numpy as np
import pytest
import transformers_cases as cases

import dlm_jax
from dlm_jax.settings import SettingError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

KINDS = {"llama": ("llama", False), "llama with BOS": ("llama", True), "qwen2": ("qwen2", False)}
NEW = 12


@pytest.fixture(scope="module", params=KINDS)
def loaded(request, tmp_path_factory):
    kind, adds_bos = KINDS[request.param]
    path = tmp_path_factory.mktemp("model") / kind
    theirs, tokenizer = cases.write(path, kind, adds_bos=adds_bos)
    return dlm_jax.load(path), theirs, tokenizer


def _asked(model, tokenizer, text):
    """A text, or the ids that transformers reads if the text would be encoded without BOS."""
    ids = tokenizer(text).input_ids
    is_same = ids == [*getattr(model, "prefix_ids", ()), *model.tokenizer.encode(text).tolist()]
    return {"prompt": text} if is_same else {"tokens": ids}


def _theirs(theirs, ids):
    with torch.no_grad():
        out = theirs.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
    return out[0, len(ids) :].tolist()


def _ours(model, asked, **more):
    how = {"gen_length": NEW, "steps": NEW} | more
    made = dlm_jax.generate(model, asked, **how)
    is_new = made.committed >= 0
    return [tokens[own].tolist() for tokens, own in zip(made.tokens, is_new, strict=True)]


@pytest.mark.parametrize("cache", ["exact", "none"])
@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_ids_of_prompts_and_chats_are_those_of_generate(loaded, batch, cache):
    model, theirs, tokenizer = loaded
    chats = [[{"role": "user", "content": text}] for text in cases.PROMPTS]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    ids = [own if isinstance(own, list) else own["input_ids"] for own in ids]
    asked = [_asked(model, tokenizer, text) for text in cases.PROMPTS]
    for own, chat in zip(ids, chats, strict=True):
        assert model.chat.ids(chat).tolist() == own
        asked.append({"tokens": own})
    ids = [tokenizer(text).input_ids for text in cases.PROMPTS] + ids
    found = []
    for first in range(0, len(asked), batch):
        found += _ours(model, asked[first : first + batch], cache=cache)
    assert found == [_theirs(theirs, own) for own in ids]


def _logprobs(theirs, ids):
    """The log-probability of each token but the first."""
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0].double()
    return torch.log_softmax(logits, dim=-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


def test_scores_are_sums_of_the_log_softmax_and_the_first_token_costs_nothing(loaded):
    model, theirs, tokenizer = loaded
    # Without BOS in the row, the first token of the text is the first token of the row.
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in cases.PROMPTS]
    prefix = list(getattr(model, "prefix_ids", ()))
    found = dlm_jax.score(model, cases.PROMPTS)
    wanted = [-float(_logprobs(theirs, prefix + own).sum()) for own in ids]
    np.testing.assert_allclose(found.nats, wanted, rtol=1e-5)
    assert found.tokens.tolist() == [len(own) - (not prefix) for own in ids]
    first = dlm_jax.score(model, ["a"])
    if not prefix:
        assert first.nats.tolist() == [0] and first.tokens.tolist() == [0]
        assert np.isnan(first.nats_per_token).all()


def test_all_tokens_after_a_prompt_are_scored(loaded):
    model, theirs, tokenizer = loaded
    prompts, texts = ("who", "a rat "), ("sat here", "ate")
    found = dlm_jax.score(model, texts, prompts=prompts)
    prefix = list(getattr(model, "prefix_ids", ()))
    for place, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        given = prefix + tokenizer(prompt, add_special_tokens=False).input_ids
        rest = tokenizer(text, add_special_tokens=False).input_ids
        wanted = -float(_logprobs(theirs, given + rest)[-len(rest) :].sum())
        np.testing.assert_allclose(found.nats[place], wanted, rtol=1e-5)
        assert found.tokens[place] == len(rest)


def test_an_empty_prompt_begins_with_bos_as_in_generate(loaded):
    model, theirs, _ = loaded
    with torch.no_grad():
        out = theirs.generate(max_new_tokens=NEW, do_sample=False)
    assert _ours(model, [""]) == [out[0, 1:].tolist()]


def test_a_row_that_begins_with_a_hole_is_refused_without_bos(tmp_path):
    cases.write(tmp_path / "model", "qwen2", adds_bos=False, has_bos=False)
    model = dlm_jax.load(tmp_path / "model")
    with pytest.raises(SettingError, match="^prompt is empty, but the model predicts each token"):
        dlm_jax.generate(model, [""])
    with pytest.raises(SettingError, match="^prompt is empty, but the model predicts each token"):
        dlm_jax.generate(model, [{"template": "<hole:2> cat"}])
