"""Published models beside transformers on the same machine, in float32, with a user's calls.

    python -m benchmarks parity [--model DIR] [--quick | --full] [--only PART ...]

The model is causal. The parts:

- ``ids``: greedy tokens of prompts and chats, in batches of 1 and 8 rows. Each difference is shown
  with transformers' two logits at that position; within `TIE` of each other, they are a tie.
- ``likelihoods``: negative log-likelihoods of texts (`dlm_jax.score`), relative to transformers.
- ``tasks``: results of two local tasks in lm-evaluation-harness, beside its model ``hf``.
- ``speed``: seconds per token at 1 and 8 rows, and of 12 likelihoods in the harness one by one.
- ``start``: seconds of a new process to its first chat answer, without and with compiled programs
  (the median of five).

Their figures are written to benchmarks/results/parity.json, which keeps those of other parts.
``--full`` compares 200 prompts, 200 texts and whole tasks; a rerun continues after the last
finished batch, which parity_parts.jsonl lists until the end.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.report import Table, alternate, parser_of

RESULTS = Path(__file__).parent / "results" / "parity.json"
PARTS = RESULTS.with_name("parity_parts.jsonl")
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
NEW = 40
"""Number of new tokens."""
TIE = 1e-3
"""Two logits within this distance are a tie between programs that round differently."""
TARGETS = {
    "differences other than ties": 0, "likelihoods, largest relative difference": 1e-4,
    "1 row, of transformers": 0.6, "8 rows, of transformers": 0.6, "lm-eval, of hf": 1.5,
    "first chat answer, cold": 15, "first chat answer, warm": 5,
}  # fmt: skip

SUBJECTS = (
    "the capital of France", "how rain forms", "a cat and a dog", "the number seven", "old books",
    "cooking rice", "the moon landing", "learning to swim", "a long train journey", "green tea",
    "the history of bread", "bees", "a broken clock", "winter in the mountains", "prime numbers",
    "a letter to a friend", "how to plant a tree", "the colour blue", "rivers", "a good sleep",
)  # fmt: skip
_PLAIN = ("Here is what I know about {}:", "Once upon a time, {} and")
_CHAT = ("Tell me about {}.", "Write one sentence about {}.")
_UNICODE = ("Über {} — naïve façade, 日本語の文章: ", "{} 🙂🚀 и немного текста про это, ")
_CODE = (
    'def describe():\n    """Returns a text about {}."""\n    return',
    "# {}\nfor i in range(10):\n",
)


def prompts(kind: str, count: int) -> list[Any]:
    """Texts, or conversations of the kind ``chat``."""
    forms = {"plain": _PLAIN, "chat": _CHAT, "unicode": _UNICODE, "code": _CODE}.get(kind, _PLAIN)
    made: list[Any] = [
        forms[number // len(SUBJECTS) % len(forms)].format(SUBJECTS[number % len(SUBJECTS)])
        for number in range(count)
    ]
    if kind == "long":
        words = " ".join(SUBJECTS)
        return [f"{number}. " + f"{words}. " * 28 + text for number, text in enumerate(made)]
    return [[{"role": "user", "content": text}] for text in made] if kind == "chat" else made


class Parts:
    """Results of finished parts in a file, which a rerun does not compute again.

    Args:
      path: file with one line per part; None keeps no file.
      run: identifies the run; parts of other runs are computed again.
    """

    def __init__(self, path: Path | None, run: str):
        self._path, self._run, self._begin = path, run, time.perf_counter()
        self._done: dict[str, Any] = {}
        if path is not None and path.exists():
            lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            self._done = {line["part"]: line["value"] for line in lines if line["run"] == run}

    def once(self, part: str, compute: Callable[[], Any]) -> Any:
        """The value of a part, as JSON stores it."""
        if part not in self._done:
            value = json.loads(json.dumps(compute()))
            if self._path is not None:
                line = json.dumps({"run": self._run, "part": part, "value": value})
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
            print(f"{time.perf_counter() - self._begin:7.0f} s  {part}", flush=True)
            self._done[part] = value
        return self._done[part]


class Both:
    """The same model in both programs."""

    def __init__(self, path: str):
        import torch
        import transformers

        import dlm_jax

        self.torch, self.dlm_jax = torch, dlm_jax
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.theirs: Any = theirs.eval()
        self.ours = dlm_jax.load(path, dtype="float32")

    def their_ids(self, prompt: Any) -> list[int]:
        """The ids that transformers reads."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt).input_ids)
        made = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
        return list(made if isinstance(made, list) else made["input_ids"])

    def their_answers(self, asked: Sequence[Any], num_new: int, **more: Any) -> list[list[int]]:
        self.tokenizer.padding_side = "left"
        rows = [self.their_ids(prompt) for prompt in asked]
        padded = self.tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        how: dict[str, Any] = {"do_sample": False, "max_new_tokens": num_new} | more
        with self.torch.no_grad():
            out = self.theirs.generate(**padded, **how)
        return [self._upto_end(row) for row in out[:, padded["input_ids"].shape[1] :].tolist()]

    def our_answers(self, asked: Sequence[Any], num_new: int, **more: Any) -> list[list[int]]:
        given = [
            {"prompt": one} if isinstance(one, str) else {"tokens": self._chat(one)}
            for one in asked
        ]
        how: dict[str, Any] = {"temperature": 0.0, "gen_length": num_new, "steps": num_new} | more
        made = self.dlm_jax.generate(self.ours, given, **how)
        rows = zip(made.tokens, made.committed >= 0, strict=True)
        return [self._upto_end(tokens[is_new].tolist()) for tokens, is_new in rows]

    def _chat(self, messages: Any) -> list[int]:
        chat = self.ours.chat
        if chat is None:
            raise SystemExit("the model has no chat template; choose an instruction-tuned model")
        return chat.ids(messages).tolist()

    def _upto_end(self, ids: list[int]) -> list[int]:
        ends = [place for place, id_ in enumerate(ids) if id_ in self.ours.eos_ids]
        return ids[: ends[0] + 1] if ends else ids

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Transformers' logits after these ids."""
        with self.torch.no_grad():
            return self.theirs(self.torch.tensor([list(ids)])).logits[0, -1].numpy()

    def nats(self, ids: Sequence[int]) -> float:
        """The negative log-likelihood of all ids but the first, by transformers."""
        with self.torch.no_grad():
            logits = self.theirs(self.torch.tensor([list(ids)])).logits[0, :-1].double()
        logprobs = self.torch.log_softmax(logits, dim=-1)
        return -float(logprobs[self.torch.arange(len(ids) - 1), list(ids[1:])].sum())


def measure_ids(both: Both, counts: dict[str, int], parts: Parts) -> dict[str, Any]:
    found: dict[str, Any] = {"differences": []}
    others = 0
    for kind, count in counts.items():
        asked = prompts(kind, count)

        def of_eight(first: int, asked: Sequence[Any] = asked) -> dict[str, Any]:
            some = asked[first : first + 8]
            return {
                "theirs": [both.their_answers([prompt], NEW)[0] for prompt in some],
                "1": [both.our_answers([prompt], NEW)[0] for prompt in some],
                "8": both.our_answers(some, NEW),
            }

        answers: dict[str, list[list[int]]] = {"theirs": [], "1": [], "8": []}
        for first in range(0, count, 8):
            name = f"ids of {kind} prompts {first + 1} to {min(first + 8, count)}"
            some = parts.once(name, lambda first=first, of=of_eight: of(first))
            for who, rows in answers.items():
                rows += some[who]
        wanted = answers["theirs"]
        for batch in (1, 8):
            made = answers[str(batch)]
            found[f"{kind}, {batch} rows"] = f"{sum(map(_same, made, wanted))} of {count}"
            for prompt, ours, theirs in zip(asked, made, wanted, strict=True):
                if ours == theirs:
                    continue
                at = len(os.path.commonprefix([ours, theirs]))
                one = {"kind": kind, "rows": batch, "prompt": str(prompt)[:60], "at": at}
                if at < min(len(ours), len(theirs)):
                    logits = both.logits(both.their_ids(prompt) + theirs[:at])
                    pair = float(logits[theirs[at]]), float(logits[ours[at]])
                    one |= {"logits": pair, "is_tie": abs(pair[0] - pair[1]) <= TIE}
                others += not one.get("is_tie", False)
                found["differences"].append(one)
    return found | {"differences other than ties": others}


def _same(ours: list[int], theirs: list[int]) -> bool:
    return ours == theirs


def measure_likelihoods(both: Both, count: int, parts: Parts) -> dict[str, Any]:
    some = max(1, count // 4)
    texts = [text + " It is well known, and often told." for text in prompts("plain", 2 * some)]
    texts += prompts("unicode", some) + prompts("code", some)

    def of_some(texts: Sequence[str]) -> list[float]:
        made = both.dlm_jax.score(both.ours, texts).nats
        wanted = np.array([both.nats(both.their_ids(text)) for text in texts])
        return np.abs(made / wanted - 1).tolist()

    differences: list[float] = []
    for first in range(0, len(texts), 20):
        chosen = texts[first : first + 20]
        name = f"likelihoods of texts {first + 1} to {first + len(chosen)}"
        differences += parts.once(name, lambda chosen=chosen: of_some(chosen))
    return {"texts": len(texts), "likelihoods, largest relative difference": max(differences)}


def _last_lines() -> dict[str, Any]:
    """A task of single likelihoods: the line of Shakespeare that follows."""
    from dlm_jax.harness.tasks.shipped import shakespeare_cloze

    metrics = [{"metric": name, "aggregation": kind, "higher_is_better": name == "acc"}
               for name, kind in (("perplexity", "perplexity"), ("acc", "mean"))]  # fmt: skip
    return {
        "task": "last_lines", "custom_dataset": shakespeare_cloze, "output_type": "loglikelihood",
        "test_split": "test", "doc_to_text": "{{context}}", "metric_list": metrics,
        "doc_to_target": "{{choices[gold]}}", "target_delimiter": "",
    }  # fmt: skip


def measure_tasks(both: Both, limit: int | None, parts: Parts) -> dict[str, Any]:
    """Results of tasks in lm-evaluation-harness, and the first result of ``hf`` where they differ
    by more than 1e-4 of its value.
    """
    from dlm_jax.harness import lm
    from dlm_jax.harness.lm_eval import register

    register()
    harness: Any = importlib.import_module("lm_eval")
    make: Any = importlib.import_module("lm_eval.models.huggingface").HFLM
    models = {
        "ours": lambda: lm.DlmJax(model=both.ours, temperature=0.0),
        "hf": lambda: make(pretrained=both.theirs, tokenizer=both.tokenizer, batch_size=8),
    }
    tasks = ("dlm_jax_shakespeare_cloze", _last_lines())
    found: dict[str, Any] = {}
    equal = 0
    for task in tasks:
        name = task if isinstance(task, str) else task["task"]

        def results(who: str, task: Any = task, name: str = name) -> dict[str, float]:
            made = harness.simple_evaluate(
                model=models[who](), tasks=[task], limit=limit, bootstrap_iters=0
            )["results"][name]  # fmt: skip
            return {key: value for key, value in made.items() if isinstance(value, float | int)}

        ours, theirs = (
            parts.once(f"task {name}, {who}", lambda who=who, of=results: of(who)) for who in models
        )
        is_equal = all(
            abs(ours[key] - value) <= 1e-4 * max(1.0, abs(value)) for key, value in theirs.items()
        )
        shown = {key: (ours[key], value) for key, value in theirs.items() if "stderr" not in key}
        found[f"task {name}, ours and hf"] = json.dumps(shown)
        equal += is_equal
    return found | {"tasks equal to hf": f"{equal} of {len(tasks)}"}


def measure_speed(both: Both, rounds: int, num_new: int) -> dict[str, Any]:
    from dlm_jax.harness.lm import DlmJax

    harness: Any = importlib.import_module("lm_eval.models.huggingface")

    found: dict[str, Any] = {}
    for rows in (1, 8):
        asked = prompts("plain", rows)
        ours, theirs = alternate(
            rounds,
            lambda asked=asked: both.our_answers(asked, num_new, ignore_eos=True),
            lambda asked=asked: both.their_answers(asked, num_new, min_new_tokens=num_new),
        )  # fmt: skip
        found[f"{rows} rows, ms per token"] = 1e3 * ours / num_new
        found[f"{rows} rows, ms per token of transformers"] = 1e3 * theirs / num_new
        found[f"{rows} row{'s' * (rows > 1)}, of transformers"] = ours / theirs
    contexts = prompts("plain", 3)
    asked = [
        SimpleNamespace(args=(context, f" {subject} and other things"))
        for context in contexts for subject in SUBJECTS[:4]
    ]  # fmt: skip
    make = harness.HFLM
    hf = make(pretrained=both.theirs, tokenizer=both.tokenizer, batch_size=1)
    evaluated = DlmJax(model=both.ours, batch_size=1)
    made: list[Any] = [None, None]

    def run(place: int, model: Any) -> None:
        made[place] = model.loglikelihood(asked)

    began = time.perf_counter()
    run(0, evaluated)
    found["lm-eval, first call in s"] = time.perf_counter() - began
    ours, theirs = alternate(rounds, lambda: run(0, evaluated), lambda: run(1, hf))
    found |= {"lm-eval, s": ours, "lm-eval, s of hf": theirs, "lm-eval, of hf": ours / theirs}
    pairs = zip(made[0], made[1], strict=True)
    found["lm-eval, largest difference in nats"] = max(abs(a[0] - b[0]) for a, b in pairs)
    found["lm-eval, same greedy"] = all(a[1] == b[1] for a, b in zip(*made, strict=True))
    return found


_CHILD = """
import json, sys, time
import dlm_jax
from dlm_jax.cli.common import start_jax
start_jax()
model = dlm_jax.load(sys.argv[1], dtype="float32")
loaded = time.time()
ids = model.chat.ids([{"role": "user", "content": "What is the capital of France?"}]).tolist()
made = dlm_jax.generate(model, [{"tokens": ids}], gen_length=32, steps=32)
print(json.dumps({"loaded": loaded, "answered": time.time(), "text": made.texts[0][-80:]}))
"""


def measure_start(path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": folder}
        for name, runs in (("cold", 1), ("warm", 5)):
            times = []
            for _ in range(runs):
                began = time.time()
                done = subprocess.run(
                    [sys.executable, "-c", _CHILD, path], env=environment, check=True,
                    stdout=subprocess.PIPE, text=True,
                )  # fmt: skip
                said = json.loads(done.stdout.splitlines()[-1])
                times.append((said["loaded"] - began, said["answered"] - began))
            loaded, answered = np.median(times, axis=0)
            found[f"load, {name}"] = float(loaded)
            found[f"first chat answer, {name}"] = float(answered)
            found["answer"] = said["text"]
    return found


def main() -> None:
    """Prints the table and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=MODEL, help="a directory or a Hub id")
    parser.add_argument("--full", action="store_true", help="200 prompts of five kinds")
    parts = ("ids", "likelihoods", "tasks", "speed", "start")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    args = parser.parse_args()
    if args.quick and args.full:
        parser.error("--quick and --full cannot be combined")
    kinds = ("plain", "chat", "unicode", "code", "long") if args.full else ("plain", "chat")
    counts: dict[str, int] = dict.fromkeys(kinds, 40 if args.full else 4 if args.quick else 20)
    found: dict[str, Any] = measure_start(args.model) if "start" in args.only else {}
    if any(part != "start" for part in args.only):
        both = Both(args.model)
        done = Parts(PARTS if args.full else None, str(args.model))
        if "ids" in args.only:
            found |= measure_ids(both, counts, done)
        if "likelihoods" in args.only:
            found |= measure_likelihoods(both, 200 if args.full else 4 if args.quick else 20, done)
        if "tasks" in args.only:
            found |= measure_tasks(both, None if args.full else 4 if args.quick else 16, done)
        if "speed" in args.only:
            found |= measure_speed(both, *((2, 48) if args.quick else (7, 64)))
    table = Table(args, "figure", "value", "target")
    for name, value in found.items():
        if name != "differences":
            table.add(name, value, TARGETS.get(name, ""))
    for one in found.get("differences", ()):
        print(json.dumps(one, ensure_ascii=False))
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    RESULTS.write_text(
        json.dumps(known | found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    if args.full:
        PARTS.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
