"""Writes a run's model into one file: ``python -m dlm_jax.export --checkpoint DIR --out FILE``.

The file contains the parameters (or their moving average, if the run has one), the config and the
tokenizer; `dlm_jax.load`, ``sample.py`` and ``python -m dlm_jax.evaluate`` accept it like a run.
With a custom network, only ``dlm_jax.load(path, network=...)`` accepts it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from dlm_jax.cli.common import Parser, start_jax
from dlm_jax.cli.ends import End, program, refusals
from dlm_jax.config import parse_flags
from dlm_jax.hf import KEPT
from dlm_jax.store import load_params, save_weights


@program
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m dlm_jax.export", description=__doc__)
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="directory of the run")
    add("--out", required=True, metavar="FILE", help="file to write, ending in .safetensors")
    add("--dtype", default="float32", metavar="TYPE", help="float32 or float16 (float32)")
    start_jax()
    with refusals():
        args, _ = parse_flags(parser, argv)
        params, meta = load_params(
            args.checkpoint, report=lambda line: print(line, file=sys.stderr)
        )
        kept = {name: meta[name] for name in ("config", "tokenizer", "corpus")}
        kept |= {name: meta.get(name) for name in ("bound", "step")}
        kept |= {"run": meta.get("run", ""), "own": meta.get("own") or {}}
        kept |= {name: meta[name] for name in KEPT if name in meta}
        size = save_weights(args.out, params, kept, dtype=args.dtype)
    print(f"{args.out}: {size:,} bytes; {json.dumps(kept['corpus'])}", file=sys.stderr)
    if name := kept["own"].get("network"):
        print(
            f"the model has the custom network {name}; load the file in Python: "
            "dlm_jax.load(path, network=...)",
            file=sys.stderr,
        )
    return End.DONE


if __name__ == "__main__":
    raise SystemExit(main())
