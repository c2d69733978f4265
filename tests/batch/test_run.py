"""A file of requests through the toy model: every line answered, and each as if it were alone."""

import dataclasses
import importlib
import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_model

import dlm_jax
from dlm_jax.batch import runner
from dlm_jax.batch.json_lines import RequestFile, Results
from dlm_jax.batch.runner import describe_model, describe_settings, run_requests
from dlm_jax.config import SamplingParams
from dlm_jax.data.tokenizers import CharacterTokenizer
from dlm_jax.inference import request as requesting
from dlm_jax.inference.request import only_chains_in_use
from dlm_jax.sampling.rules import BUILT_IN, with_rules
from dlm_jax.settings import static

MODEL = dataclasses.replace(
    toy_model.MODEL,
    max_length=96,
    # The chain is short, so that it compiles fast.
    sample=SamplingParams(steps=6, chain=("temperature",), order="left_to_right", ignore_eos=True),
)
REQUESTS = [
    {"id": number, "prompt": "The cat "[: number % 5], "gen_length": 3 + 5 * (number % 7),
     "temperature": 0.5 + number % 3, "steps": 2 + 3 * (number % 4)}
    for number in range(20)
]  # fmt: skip
REQUESTS += [
    {"template": "A <hole:4> ran.", "steps": 4, "block_length": 3},
    {"id": "wide", "gen_length": 90, "steps": 5},
    {"id": "own seed", "prompt": "A ", "gen_length": 6, "seed": 77},
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All results, in the order of the requests."""
    path = tmp_path_factory.mktemp("whole")
    return _run(path, REQUESTS)


def _tuple(value):
    if not isinstance(value, tuple):
        raise ValueError(f"favoured={value!r} is no tuple; use (3, 4)")
    return value


@dlm_jax.rule
class Favour(dlm_jax.LogitTransform):
    """A transform with a setting that is a list."""

    share_B: jax.Array = dlm_jax.per_row(dlm_jax.Setting("favour_share", 0.0, "how much"))
    favoured: tuple[int, ...] = static(
        dlm_jax.Setting("favoured", (), "ids", parse=_tuple, hint=tuple[int, ...])
    )

    def apply(self, state, logits_NV, at):
        """The logits as they are."""
        return logits_NV


def _write(path, requests):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in requests]
    path.write_text("\n".join(lines) + "\n")
    return path


def _run(
    directory, requests, *, model=MODEL, stop_after=None, batch_size=8, index=0, count=1, **options,
):  # fmt: skip
    """The rows of the output file after a run, which may be stopped after some results."""
    source = _write(directory / "in.jsonl", requests)
    lines = RequestFile(source, index=index, count=count)
    target = directory / "out.jsonl"
    seen = []

    def write(result, generated):
        assert generated <= result.get("length", 0)
        results.write(result)
        seen.append(result)
        if stop_after is not None and len(seen) == stop_after:
            raise KeyboardInterrupt

    results = Results(target, fingerprint="same", index=index, count=count)
    try:
        with results:
            run_requests(
                model, lines, write, done=results.done, seed=5, batch_size=batch_size, **options
            )
            results.finish(lines)
    except KeyboardInterrupt:
        assert stop_after is not None
    return [json.loads(line) for line in results.path.read_text().splitlines()]


def _untimed(rows):
    """The rows without what depends on the clock: the checksum covers the seconds too."""
    assert all(row["seconds"] > 0 for row in rows)
    clock = ("seconds", "crc")
    return [{name: value for name, value in row.items() if name not in clock} for row in rows]


def _requests(path):
    lines = RequestFile(path)
    return [line.request for line in runner.accept_lines(MODEL, lines, settings={})]


def test_every_request_is_answered_in_order_with_what_it_asked_for(whole):
    assert [row.get("id") for row in whole] == [*range(20), None, "wide", "own seed"]
    assert [row["line"] for row in whole] == [*range(1, 24)]
    for request, row in zip(REQUESTS, whole, strict=True):
        assert {*row} - {"id"} == {
            "line", "text", "tokens", "length", "steps", "forwards", "filled", "status", "waves",
            "seconds", "crc",
        }  # fmt: skip
        assert row["status"] == "done"
        assert row["length"] == len(row["tokens"]) == len(row["text"])
        assert row["steps"] == row["forwards"] <= request.get("steps", 6)
    assert whole[20]["text"].startswith("A ")
    assert whole[20]["text"].endswith(" ran.")
    assert whole[21]["length"] == 90


def test_a_line_is_what_generate_makes_of_it_alone(whole):
    for number in (0, 7, 13):
        request = {key: value for key, value in REQUESTS[number].items() if key != "id"}
        alone = dlm_jax.generate(MODEL, [request | {"seed": 5 + number}])
        assert alone.texts[0] == whole[number]["text"]
    own = dlm_jax.generate(MODEL, [{"prompt": "A ", "gen_length": 6, "seed": 77}])
    assert own.texts[0] == whole[-1]["text"]


@pytest.mark.parametrize("stop_after", [1, 9])
def test_a_stopped_run_goes_on_and_writes_what_an_unstopped_one_does(tmp_path, whole, stop_after):
    stopped = _run(tmp_path, REQUESTS, stop_after=stop_after)
    assert len(stopped) == stop_after
    by_line = {row["line"]: row for row in _untimed(whole)}
    assert all(row == by_line[row["line"]] for row in _untimed(stopped))
    again = _run(tmp_path, REQUESTS)
    assert _untimed(again) == _untimed(whole)
    assert _run(tmp_path, REQUESTS) == again


def test_a_stopped_run_goes_on_with_another_number_of_slots(tmp_path, whole):
    stopped = _run(tmp_path, REQUESTS, stop_after=9)
    again = _run(tmp_path, REQUESTS, batch_size=4)
    assert [row["line"] for row in again] == [row["line"] for row in whole]
    assert all(row in again for row in stopped)


def test_processes_share_the_lines(tmp_path, whole):
    even, odd = (_untimed(_run(tmp_path, REQUESTS, index=n, count=2)) for n in (0, 1))
    assert odd == _untimed(whole)[::2] and even == _untimed(whole)[1::2]


def test_bad_lines_are_told_by_number_and_the_rest_is_done(tmp_path):
    bad = [
        ('{"id": "a", "prompt": "The"', "is not JSON"),
        ({"prompt": "Q"}, "'Q'"),
        ({"prompt": "A", "gen_length": 200}, "gen_length=200"),
        ({"temprature": 1.0}, "did you mean 'temperature'"),
        ({"gen_length": 20, "block_length": 2, "steps": 3}, "10 blocks"),
        ({"prompt": "A", "draft": "cat"}, "remask"),
        ({"tokens": [1, MODEL.tokenizer.mask_id]}, "tokens contain MASK"),
        ({"block_length": "4"}, "block_length='4' is not an integer"),
        ({"logit_bias": 5}, "logit_bias=5 is not a mapping from ids to"),
        ({"chain": [3]}, "chain=(3,) is not a list of names; for example, use ["),
        ({"ignore_eos": 1}, "ignore_eos=1 is not a bool"),
        ({"steps": 3_000_000_000}, "steps=3000000000 is outside [1, 2147483647]"),
        ({"template": "A <hole:99999999999999>"}, "is a gap of 99999999999999"),
        ({"max_length": 10_000_000}, "max_length=10000000"),
        ({"top_p": 10**400}, "top_p=1000"),
        ({"cache_margin": 1}, "is not a sampling setting"),
        ({"top_k": 5, "chain": ["temperature"]}, "top_k=5 requires 'top_k'"),
        ({"logit_bias": {"999": 1.0}, "chain": ["bias"]}, "logit_bias has id 999"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias"),
        ({"top_k": [3]}, "top_k is a list"),
        ({"n": 2}, "n=2 is not a sampling setting; a line of a file is one row; repeat"),
        ({"dry_breakers": ["a"]}, "dry_breakers"),
    ]
    *rows, last = _run(tmp_path, [*(line for line, _ in bad), {"prompt": "A ", "gen_length": 4}])
    assert last["status"] == "done"
    for number, (row, (_, said)) in enumerate(zip(rows, bad, strict=True), 1):
        assert f"line {number}" in row["error"] and said in row["error"], row["error"]
        assert "\n" not in row["error"]


def test_every_setting_that_is_a_list_is_one_in_json_own_ones_too(tmp_path):
    """Which ones are follows from what they declare."""
    shared = {name for name, setting in BUILT_IN.request_settings.items() if setting.is_list}
    table = with_rules((Favour,))
    assert {name for name, s in table.request_settings.items() if s.is_list} == {
        *shared,
        "favoured",
    }
    given = dict.fromkeys(shared, [3]) | {
        "logit_bias": [[3, -1.0]], "chain": ["bias", "temperature", "favour"], "favoured": [3, 4],
        "order": "low_confidence",
    }  # fmt: skip
    path = _write(tmp_path / "in.jsonl", [given, {"favoured": 3}])
    lines = RequestFile(path)
    accepted, refused = runner.accept_lines(MODEL, lines, settings={"rules": [Favour]})
    made = {name: getattr(accepted.request.sample, name) for name in given}
    assert made == given | dict.fromkeys(shared, (3,)) | {
        "logit_bias": ((3, -1.0),), "chain": tuple(given["chain"]), "favoured": (3, 4),
    }  # fmt: skip
    assert "favoured=3 is no tuple" in refused.error


def test_requests_of_the_same_settings_resolve_and_check_them_once(tmp_path, monkeypatch):
    """What takes the time before the first row of a long file begins."""
    resolved = []
    resolve = requesting.resolve

    def counted(*arguments, **options):
        resolved.append(arguments)
        return resolve(*arguments, **options)

    monkeypatch.setattr(requesting, "resolve", counted)
    requests = [
        {"prompt": f"{'cat '[: n % 4]}", "seed": n, "temperature": (0.5, 1, 1.0)[n % 3]}
        for n in range(60)
    ]
    path = _write(tmp_path / "in.jsonl", requests)
    asked = _requests(path)
    assert len(asked) == 60
    # 1 and 1.0 are not the same value, and neither is a seed or a prompt a setting.
    assert len({id(one.sample) for one in asked}) == 3
    assert [one.sample.temperature for one in asked[:3]] == [0.5, 1, 1.0]
    assert [one.seed for one in asked] == list(range(60))
    assert len(resolved) == 3
    assert len({id(one.sample) for one in only_chains_in_use(asked)}) == 2


def test_a_long_file_runs_in_programs_of_one_size_and_is_read_as_rows_start(tmp_path):
    """Of which a resumed run chooses the same."""
    requests = [{"gen_length": (5, 70)[n % 9 == 8], "steps": 3} for n in range(40)] + [{"stepz": 1}]
    lines = list(RequestFile(_write(tmp_path / "in.jsonl", requests)))
    read, seen = [], []

    def coming():
        for line in lines:
            read.append(line.number)
            yield line

    def write(result, new):
        results.write(result)
        seen.append(result["line"])
        # The rows that wait, and those in the slots of two programs.
        assert len(read) <= len(seen) + 6 + 2 * 4

    plan = {"batch_size": 4, "read_ahead": 6}
    programs = []
    for stop in (7, None):
        with Results(tmp_path / "out.jsonl", fingerprint="same", plan=plan) as results:
            assert results.plan == {"batch_size": 4, "read_ahead": 6}
            some = itertools.islice(coming(), stop)
            programs.append({*run_requests(MODEL, some, write, done=results.done, **results.plan)})
        read.clear()
        plan = {"batch_size": 8, "read_ahead": 1000}  # that of the first run stays
    assert sorted(seen) == sorted(line.number for line in lines)
    assert programs == [{"rows=4 canvas=64"}, {"rows=4 canvas=64", "rows=4 canvas=128"}]


def test_models_are_told_apart():
    """By every number of every parameter, by the tokenizer, and by what a call would not say."""
    known = describe_model(MODEL)
    assert known == describe_model(MODEL)
    json.dumps(known)
    leaves, structure = jax.tree.flatten(MODEL.params)
    size = max(leaf.size for leaf in leaves)
    (place, large), *_ = [(i, leaf) for i, leaf in enumerate(leaves) if leaf.size == size]
    for at in (0, size // 2, size - 1):
        # The last bit of one number.
        flat = np.array(large).reshape(-1)
        flat[at] = np.nextafter(flat[at], np.inf)
        changed = [*leaves[:place], jnp.array(flat.reshape(large.shape)), *leaves[place + 1 :]]
        other = dataclasses.replace(MODEL, params=jax.tree.unflatten(structure, changed))
        assert describe_model(other)["params"] != known["params"]
    letters = CharacterTokenizer.of(toy_model.TEXT.replace("c", "z"))
    for changes in (
        {"tokenizer": letters}, {"more_eos_ids": (3,)}, {"max_length": 64},
        {"sample": dataclasses.replace(MODEL.sample, steps=7)},
        {"network": dataclasses.replace(MODEL.network, embed=lambda params, ids: ids)},
    ):  # fmt: skip
        assert describe_model(dataclasses.replace(MODEL, **changes)) != known


def test_own_rules_are_told_apart_by_their_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    text = (
        "import dlm_jax\n@dlm_jax.rule\nclass Left(dlm_jax.CommitRule):\n"
        "    def select(self, state, context, proposal):\n"
        "        return context.is_hole_BL, state\n"
    )
    found = []
    for content in (text, text + "\n", text):
        (tmp_path / "own_left.py").write_text(content)
        sys.modules.pop("own_left", None)
        importlib.invalidate_caches()
        module = importlib.import_module("own_left")
        told = describe_settings({"rules": module, "steps": 3})
        assert told == describe_settings({"rules": [module.Left], "steps": 3})
        found.append(json.dumps(told))
    assert found[0] == found[2] != found[1]
    assert str(tmp_path) not in found[0]
    space = {"__name__": "typed"}
    exec(text, space)
    assert describe_settings({"rules": [space["Left"]]}) == {"rules": ["typed.Left without source"]}


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"stop": 5}, "stop=5 is not a string"),
        ({"stop": [""]}, "stop has a string that is empty"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"stop": "a", "structure": "a+"}, "stop can truncate a structure"),
        ({"template": "A <hole:2> a", "stop": "a"}, "stop has no effect on an infill"),
        ({"response_format": {"type": "poem"}}, "response_format has no known type"),
        ({"response_format": {"type": "regex"}}, "response_format lacks regex"),
        ({"response_format": {"type": "text", "regex": "a"}}, "of type text has 'regex'"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, 'lacks "schema"'),
        ({"response_format": {"type": "json_object"}, "structure": "a"}, "another name"),
    ],
)
def test_lines_with_bad_stops_and_formats_are_refused(tmp_path, own, told):
    (row,) = _run(tmp_path, [own])
    assert told in row["error"] and "line 1" in row["error"]


def test_a_line_with_a_long_text_is_refused_unencoded_and_others_are_answered(
    tmp_path, monkeypatch
):
    encode = CharacterTokenizer.encode

    def short(tokenizer, text):
        assert len(text) < 1000, "a long text is encoded"
        return encode(tokenizer, text)

    monkeypatch.setattr(CharacterTokenizer, "encode", short)
    long = "A " * 500_000
    asked = [{"prompt": long}, {"template": f"{long}<hole:2>"}, {"prompt": "A ", "draft": long}]
    *refused, result = _run(tmp_path, [*asked, {"prompt": "A ", "gen_length": 3}])
    assert all("characters exceeds the canvas of 96" in one["error"] for one in refused)
    assert result["length"] == 5


@pytest.mark.parametrize(("name", "value"), [("block_length", "x"), ("fill", [1])])
def test_a_line_with_a_structure_and_a_wrong_setting_ends_no_other_line(tmp_path, name, value):
    file = tmp_path / "in.jsonl"
    rows = [{"structure": "A+", name: value}, {"prompt": "A "}]
    file.write_text("\n".join(map(json.dumps, rows)))
    lines = RequestFile(file)
    refused, accepted = runner.accept_lines(MODEL, lines, settings={})
    assert accepted.request is not None and name in refused.error
