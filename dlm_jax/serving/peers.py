"""Request field names of OpenAI, vLLM, SGLang and llama-server, and how this server handles them.

`PEERS` is the table of aliases, ignored fields and rejected names. The server uses it for every
request, and docs/peers.md is generated from it. Fields with the same name and meaning are declared
in `protocol`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dlm_jax.settings import UNSET, SettingError

Fields = dict[str, Any]
"""Fields of this server, keyed by name."""


class _No(ValueError):
    """Raised with the problem and the remedy for a value without an equivalent."""

    def __init__(self, why: str, remedy: str):
        super().__init__(why, remedy)
        self.why, self.remedy = why, remedy


class Peer(NamedTuple):
    """A field of another server.

    Attributes:
      of: the servers with this field: ``o`` OpenAI, ``v`` vLLM, ``s`` SGLang, ``l`` llama-server.
      ours: the corresponding field or setting, or the closest one.
      does: the documented effect, or the remedy for a rejected name.
      read: function that converts a value to fields of this server; raises `_No` for a value
        without an equivalent. None means that every value is rejected.
    """

    of: str
    ours: str
    does: str
    read: Callable[[Any], Fields] | None = None


_NO_COUNTERPART = "has no counterpart here"

SERVERS = {"o": "OpenAI", "v": "vLLM", "s": "SGLang", "l": "llama-server"}


def _same(of: str, ours: str) -> Peer:
    return Peer(of, ours, "alias", lambda value: {ours: value})


def _unread(of: str, does: str) -> Peer:
    return Peer(of, "", f"not read: {does}", lambda value: {})


def _neutral(of: str, ours: str, value: Any, remedy: str) -> Peer:
    """Returns a field with one neutral value. Requests with any other value are rejected."""

    def read(given: Any) -> Fields:
        if type(given) is not type(value) or given != value:
            raise _No(_NO_COUNTERPART, remedy)
        return {}

    return Peer(of, ours, f"`{json.dumps(value)}` changes nothing; other values: {remedy}", read)


def _refused(of: str, ours: str, remedy: str) -> Peer:
    return Peer(of, ours, f"refused: {remedy}")


def _of_schema(value: Any) -> Fields:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _No(f"is not JSON ({error})", "pass a schema") from None
    if not isinstance(value, dict):
        raise _No("is not a schema", "pass an object, or its JSON as a string")
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": value}}}


def _of_regex(value: Any) -> Fields:
    return {"response_format": {"type": "regex", "regex": value}}


def _of_choice(value: Any) -> Fields:
    is_list = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
    if not is_list or not all(value):
        raise _No("is not a list of strings", "pass at least one non-empty string")
    return _of_regex("|".join(map(re.escape, value)))


_NO_GRAMMAR = "grammars are not supported; use response_format with a schema or a regex"


def _of_outputs(value: Any) -> Fields:
    kinds = {
        "json": _of_schema, "regex": _of_regex, "choice": _of_choice,
        "json_object": lambda _: {"response_format": {"type": "json_object"}},
    }  # fmt: skip
    given = value if isinstance(value, dict) else {}
    asked = [name for name in given if given[name] is not None and given[name] is not False]
    if len(asked) != 1 or asked[0] not in kinds:
        raise _No(f"is not exactly one of {', '.join(kinds)}", _NO_GRAMMAR)
    return kinds[asked[0]](given[asked[0]])


_SHAPED = "response_format"

PEERS: Mapping[str, Peer] = {
    # Format of the answer.
    "guided_json": Peer("v", _SHAPED, "alias: `json_schema`", _of_schema),
    "json_schema": Peer("sl", _SHAPED, "alias: `json_schema`", _of_schema),
    "guided_regex": Peer("v", _SHAPED, "alias: `regex`", _of_regex),
    "regex": Peer("s", _SHAPED, "alias: `regex`", _of_regex),
    "guided_choice": Peer("v", _SHAPED, "alias: a `regex` of the texts", _of_choice),
    "structured_outputs": Peer(
        "v", _SHAPED, "alias: `json`, `regex`, `choice` or `json_object`", _of_outputs
    ),
    "grammar": _refused("l", _SHAPED, _NO_GRAMMAR),
    "guided_grammar": _refused("v", _SHAPED, _NO_GRAMMAR),
    "ebnf": _refused("s", _SHAPED, _NO_GRAMMAR),
    # Lengths and stop conditions.
    "n_predict": _same("l", "max_tokens"),
    "no_stop_trim": _same("s", "include_stop_str_in_output"),
    "min_tokens": _neutral("vs", "ignore_eos", 0, "use ignore_eos=true"),
    "stop_regex": _refused("s", "stop", "use stop with texts"),
    "truncate_prompt_tokens": _refused("v", "max_length", "shorten the prompt; see /tokenize"),
    "n_keep": _refused("l", "max_length", "prompts are never truncated; shorten the prompt, see "
    "/tokenize"),
    "t_max_predict_ms": _refused("l", "max_tokens", "use a lower max_tokens or close the stream"),
    # Settings of the sampler.
    "repeat_penalty": _same("l", "repetition_penalty"),
    "repeat_last_n": _same("l", "penalty_last_n"),
    "dry_penalty_last_n": _same("l", "dry_last_n"),
    "samplers": _refused("l", "chain", "use chain, with the names in docs/settings.md"),
    "bad_words": _neutral("v", "logit_bias", [], "use logit_bias with -100 for each id"),
    "allowed_token_ids": _refused("v", _SHAPED, "use response_format or logit_bias"),
    "best_of": _neutral("v", "n", 1, "use n and select by logprobs"),
    "use_beam_search": _neutral("v", "order", False, "rows are sampled; use temperature=0"),
    "length_penalty": _neutral("v", "max_tokens", 1.0, "beam search is not supported; remove it"),
    "logits_processors": _refused("v", "rules", "the server sets the rules; see docs/settings.md"),
    "custom_logit_processor": _refused("s", "rules", "the server sets the rules"),
    # Information in the answer.
    "n_probs": _refused("l", "logprobs", "use logprobs (and top_logprobs in a chat)"),
    "prompt_logprobs": _refused("v", "logprobs", "use echo and logprobs of /v1/completions"),
    "return_tokens": _refused("l", "return_token_ids", "use return_token_ids"),
    "return_tokens_as_token_ids": _neutral(
        "v", "return_token_ids", False, "use return_token_ids"
    ),
    "return_hidden_states": _neutral("s", "", False, "remove it"),
    "skip_special_tokens": _neutral(
        "vs", "return_token_ids", True, "texts have no special tokens; use return_token_ids"
    ),
    "spaces_between_special_tokens": _unread("vs", "texts have no special tokens"),
    "add_special_tokens": _neutral("v", "prompt", False, "pass the ids as prompt"),
    # Conversations.
    "chat_template": _refused("v", "--chat-template", "it is a flag of the server"),
    "documents": _refused("v", "chat_template_kwargs", "use chat_template_kwargs"),
    # Execution of requests; these fields do not affect results.
    "store": _unread("o", "nothing is stored"),
    "metadata": _unread("o", "nothing is stored"),
    "service_tier": _unread("o", "all requests have one tier"),
    "prompt_cache_key": _unread("o", "texts do not depend on it; see `cache`"),
    "prompt_cache_retention": _unread("o", "texts do not depend on it; see `cache`"),
    "safety_identifier": _unread("o", "as `user`"),
    "modalities": _neutral("o", "", ["text"], "answers are texts; remove it"),
    "prediction": _unread("o", "texts do not depend on it; see `draft`"),
    "reasoning_effort": _refused(
        "ov", "chat_template_kwargs", "use chat_template_kwargs, if the template reads it"
    ),
    "cache_prompt": _unread("l", "texts do not depend on it; see `cache`"),
    "cache_salt": _unread("v", "prompts are not shared between requests"),
    "id_slot": _unread("l", "the scheduler assigns slots"),
    "priority": _neutral("v", "", 0, "requests are served in order; remove it"),
    "request_id": _unread("v", "answers have their own ids"),
    "rid": _unread("s", "answers have their own ids"),
    "timings_per_token": _unread("l", "see the counts in `usage`"),
    "lora_path": _refused("s", "--checkpoint", "adapters are not loaded; export a merged model"),
    "lora": _neutral("l", "--checkpoint", [], "adapters are not loaded; export a merged model"),
    "session_params": _refused("s", "messages", "pass all turns in messages"),
}  # fmt: skip
"""Fields of other servers, keyed by name. An endpoint's field with the same name takes precedence.
"""


def table() -> list[str]:
    """Returns the rows of the table in docs/peers.md."""
    rows = ["| name | of | here | what happens |", "| --- | --- | --- | --- |"]
    for name, peer in PEERS.items():
        of = ", ".join(SERVERS[one] for one in peer.of)
        here = f"`{peer.ours}`" if peer.ours else ""
        rows.append(f"| `{name}` | {of} | {here} | {peer.does} |")
    return rows


def in_our_names(given: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[Fields, Fields]:
    """Returns the request in this server's names, and a mapping from these names to the client's.

    Args:
      given: the request.
      fields: fields of the endpoint, which are never treated as names of other servers.

    Raises:
      SettingError: a name or value has no equivalent, or two names of the same field have different
          values.
    """
    ours: Fields = {}
    theirs: Fields = {}
    for name, value in given.items():
        is_ours = name in fields or name not in PEERS
        if value is None and not is_ours:
            continue
        read = {name: value} if is_ours else _read(name, value)
        if not is_ours:
            theirs |= dict.fromkeys(read, name)
        for field, one in read.items():
            if ours.get(field) is None:
                ours[field] = one
            elif one is not None and ours[field] != one:
                alias = theirs[field]
                raise SettingError(alias, UNSET, f"is another name of {field}", "pass one of them")
    return ours, theirs


def _read(name: str, value: Any) -> Fields:
    peer = PEERS[name]
    if peer.read is None:
        remedy = peer.does.removeprefix("refused: ")
        raise SettingError(name, value, _NO_COUNTERPART, remedy)
    try:
        return peer.read(value)
    except _No as error:
        raise SettingError(name, value, error.why, error.remedy) from None
