"""A line of a file of requests is answered like a request over HTTP."""

import dataclasses
import json
import re

import toy_model
from serving_cases import complete, serving

from dlm_jax.batch.json_lines import RequestFile, Results
from dlm_jax.batch.runner import run_requests
from dlm_jax.config import SamplingParams

SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"enum": [7, 70]}}}
SHAPED = [
    ({"response_format": SCHEMA}, "70?"),
    ({"response_format": {"type": "regex", "regex": "(cat|rat)( sat)?"}}, "(cat|rat)( sat)?"),
    ({"structure": "(cat|rat)( sat)?"}, "(cat|rat)( sat)?"),
]


def _answered(directory, model, requests):
    source, target = directory / "in.jsonl", directory / "out.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in requests))
    with Results(target, fingerprint="same") as results:
        lines = list(RequestFile(source))
        run_requests(model, lines, lambda one, _: results.write(one), seed=5, batch_size=8)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    return sorted((row for row in rows if "text" in row), key=lambda row: row["line"])


def _of_http(model, requests):
    with serving(model) as server:
        return [complete(server, asked) for asked in requests]


def test_lines_take_stops_and_formats_as_requests_over_http_do(tmp_path):
    model = dataclasses.replace(
        toy_model.of(toy_model.TEXT + "07"), sample=SamplingParams(chain=("temperature",), steps=4)
    )
    plain = {"prompt": "A ", "seed": 3, "steps": 12, "order": "left_to_right", "ignore_eos": True}
    (row,) = _answered(tmp_path, model, [plain | {"gen_length": 12}])
    whole = row["text"][2:]
    asked = [
        plain | {"stop": [whole[4:6], "zz"]},
        plain | {"stop_token_ids": model.tokenizer.encode(whole[5]).tolist()},
        *({"prompt": "A ", "seed": 3} | own for own, _ in SHAPED),
    ]
    (tmp_path / "more").mkdir()
    rows = _answered(tmp_path / "more", model, [one | {"gen_length": 12} for one in asked])
    assert [row["text"][2:] for row in rows] == _of_http(
        model, [one | {"max_tokens": 12} for one in asked]
    )
    assert rows[0]["text"] == "A " + whole[: whole.index(whole[4:6])]
    assert rows[0]["length"] == len(rows[0]["tokens"]) < 14
    for row, (_, pattern) in zip(rows[2:], SHAPED, strict=True):
        assert re.fullmatch(pattern, row["text"][2:]), row
