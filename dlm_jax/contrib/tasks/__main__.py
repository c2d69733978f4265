"""Prints the examples of a task as JSON lines, for ``data.source``:

python -m dlm_jax.contrib.tasks arithmetic > runs/arithmetic.jsonl
"""

from __future__ import annotations

import argparse
import json

from dlm_jax.contrib.tasks import TASKS

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dlm_jax.contrib.tasks", description=__doc__)
    parser.add_argument("task", choices=TASKS)
    for prompt, answer in TASKS[parser.parse_args().task].corpus():
        print(json.dumps({"prompt": prompt, "response": answer}))
