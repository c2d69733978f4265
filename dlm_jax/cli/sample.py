"""Samples texts from a trained model: ``python sample.py --prompt "ROMEO:" --num-samples 4``.

Without ``--checkpoint``, the program uses the shipped model, a small model of Shakespeare. Standard
output contains only the texts, separated by lines ``---``. Progress, a summary and the output of
``--read-back``, ``--report-chain`` and ``--watch`` are written to standard error. The defaults of
the flags are the recommendations of the checkpoint.

``--prompts in.jsonl --output out.jsonl`` runs a file of requests instead; the same command resumes
an interrupted run (docs/generation.md).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import dlm_jax
from dlm_jax.cli.common import (
    COUNT,
    PRESET,
    SEED,
    Parser,
    add_host_flags,
    add_mesh_flags,
    add_model_flags,
    heads_line,
    import_function,
    import_rules,
    join_hosts,
    load_model,
    mesh_of,
    naming_flags,
    start_jax,
)
from dlm_jax.cli.ends import (
    End,
    check_output,
    code_of,
    emit,
    end_of,
    program,
    refusals,
    say_error,
)
from dlm_jax.cli.programs import needed
from dlm_jax.cli.sample_file import sample_file
from dlm_jax.config import SamplingParams, add_sample_flags, layered, parse_flags, sample_settings
from dlm_jax.data import Tokenizer
from dlm_jax.distributed.partitions import num_shares, split_rows
from dlm_jax.distributed.processes import check_same_everywhere, run_together
from dlm_jax.inference.generate import chain_report
from dlm_jax.inference.request import settings_of_call
from dlm_jax.progress import Progress
from dlm_jax.sampling.params import params_of
from dlm_jax.sampling.rules import with_rules
from dlm_jax.store.files import own_source, program_facts
from dlm_jax.types import Status


def make_parser(kind: type[SamplingParams]) -> Parser:
    parser = Parser(prog="sample.py", description=__doc__)
    add = parser.add_argument
    add_model_flags(parser)
    add("--prompt", metavar="TEXT", help="text at the start of every sample")
    add("--template", metavar="TEXT", help='text with gaps to fill: "To be <hole:4> be"')
    add("--draft", metavar="TEXT", help="text after the prompt, to refine")
    chat_help = "treat --prompt as a user turn, and print the model's answer"
    add("--chat", action="store_true", help=chat_help)
    add("--preset", metavar="NAME", help=PRESET)
    count_help = "number of texts (1); with --prompts, number of samples per request without n"
    add("--num-samples", type=COUNT, default=1, metavar="N", help=count_help)
    length_help = "canvas length of a row; default: the training length"
    add("--max-length", type=COUNT, metavar="L", help=length_help)
    add("--seed", type=SEED, default=0, metavar="K", help="sample i has the seed K + i (0)")
    add("--batch-size", type=COUNT, default=64, metavar="B", help="rows that run in parallel (64)")
    host_help = "function that selects tokens"
    add("--host-sampler", metavar="MODULE:FUNCTION", help=host_help)
    add("--rules", metavar="MODULES", help="modules with rules (A,B); their settings become flags")
    read_help = "print each token with its K best candidates"
    add("--read-back", type=COUNT, metavar="K", help=read_help)
    most_help = "maximum candidates per position for host samplers and --read-back (64)"
    add("--max-candidates", type=COUNT, default=64, metavar="N", help=most_help)
    add("--watch", action="store_true", help="show the canvas while it is denoised")
    add("--trace", metavar="FILE", help="write an HTML page that replays the denoising")
    add("--prompts", metavar="FILE", help="requests, one JSON object per line; requires --output")
    add("--output", metavar="FILE", help="results of --prompts, one JSON object per line")
    add("--report-chain", action="store_true", help="print where each part of the chain runs")
    add("--version", action="version", version=f"dlm_jax {dlm_jax.__version__}")
    add_host_flags(
        parser,
        "With --distributed, the hosts form one mesh. Without it, --num-processes and "
        "--process-id distribute the requests of --prompts over independent programs.",
    )
    add_mesh_flags(parser)
    add_sample_flags(parser, kind)
    return parser


def _check_modes(args: argparse.Namespace) -> None:
    """Raises ValueError for flags that contradict each other."""
    if (args.prompts is None) != (args.output is None):
        raise ValueError("--prompts and --output require each other; pass both")
    is_file, hosted = args.prompts is not None, ("host_sampler", "read_back")
    for name in ("prompt", "template", "draft", "watch", "trace", *hosted):
        flag = f"--{name.replace('_', '-')}"
        if is_file and getattr(args, name):
            raise ValueError(f"{flag} has no effect with --prompts; remove it")
        if name in hosted and getattr(args, name) and (args.watch or args.trace):
            raise ValueError(f"{flag} and --watch or --trace cannot be combined; remove one")
    is_shared = args.num_processes is not None or args.process_id is not None
    if is_shared and not is_file and not args.distributed:
        raise ValueError("--num-processes and --process-id require --prompts; pass it")
    if args.coordinator is not None and not args.distributed:
        raise ValueError("--coordinator has no effect without --distributed; add it")
    if args.chat and (is_file or args.template or args.draft or args.prompt is None):
        raise ValueError("--chat formats --prompt as a turn; pass --prompt and no other text")
    if (args.read_back or 0) > args.max_candidates:
        raise ValueError(f"--read-back {args.read_back} is more than --max-candidates; raise it")
    page = None if args.trace is None else Path(args.trace)
    if page is not None and page.is_dir():
        raise ValueError(f"--trace {page} is a directory; pass a file")
    if page is not None and not page.parent.is_dir():
        raise ValueError(f"--trace {page}: the directory does not exist; create it first")


@program
def main(argv: Sequence[str] | None = None) -> int:
    start_jax()
    argv = sys.argv[1:] if argv is None else argv
    with refusals():
        check_output()
        # Hosts join before the modules of --rules are imported, which may use JAX.
        early = Parser(prog="sample.py", description=None, add_help=False)
        early.add_argument("--rules")
        add_host_flags(early)
        first = early.parse_known_args(argv)[0]
        first.distributed &= not {"-h", "--help", "--version"}.intersection(argv)
        join_hosts(first)
    return run_together(lambda: _main(argv, first.rules), code_of, end_of)


def _main(argv: Sequence[str], modules: str | None) -> int:
    with refusals(), naming_flags():
        rules = import_rules(modules)
        kind = params_of(with_rules(rules))
        args, overrides = parse_flags(make_parser(kind), argv)
        given = {n: getattr(args, n) for n in kind.table.settings if hasattr(args, n)}
        settings = sample_settings(given, kind) | ({"rules": rules} if rules else {})
        _check_modes(args)
        viewing = None
        if args.watch or args.trace is not None:
            viewing = needed("dlm_jax.viewing.show", "--watch or --trace")
        sampler = None
        if args.host_sampler is not None:
            where = f"--host-sampler {args.host_sampler}"
            sampler = import_function(args.host_sampler, where, "rules:only_digits")
        if args.distributed:
            check_same_everywhere(_facts_of(args, overrides, rules))
        model = load_model(args, mesh_of(overrides, is_distributed=args.distributed))
        shares = num_shares(split_rows(model.params))
        if args.batch_size % shares:
            raise ValueError(
                f"--batch-size {args.batch_size} is not divisible by the {shares} devices across "
                f"which the rows are split; use {max(1, round(args.batch_size / shares)) * shares}"
            )
        settings = layered(model.preset(args.preset) if args.preset else None, settings)
        if args.report_chain:
            print(chain_report(model, host_sampler=sampler, **settings), file=sys.stderr)
        if args.prompts is None:
            prompt = _prompt_of(model, args)
            heads = heads_line(model, settings_of_call(model, settings))
    if args.prompts is not None:
        return sample_file(model, args, settings)
    settings |= {
        name: getattr(args, name) for name in ("num_samples", "max_length", "seed", "batch_size")
    }
    start, waited, view = time.perf_counter(), 0.0, None
    is_first = jax.process_index() == 0
    with refusals(), naming_flags():
        if viewing is not None:
            view = viewing.View(model, sys.stderr, is_watched=args.watch, is_page=bool(args.trace))
            result, waited = view.sample(prompt, settings), view.waited
        else:
            with Progress("sample", None, "step", is_shown=is_first) as shown:
                result = dlm_jax.generate(
                    model,
                    [prompt],
                    host_sampler=sampler,
                    read_back=args.read_back is not None,
                    max_candidates=args.max_candidates,
                    on_steps=shown.update,
                    **settings,
                )
    seconds = time.perf_counter() - start - waited
    if not is_first:
        return End.DONE
    texts = result.texts
    if args.chat:
        rows = zip(result.tokens, result.lengths, strict=True)
        begin = len(prompt["tokens"])
        texts = [model.tokenizer.decode(tokens[begin:length]) for tokens, length in rows]
    # The texts are printed first, so that later failures do not lose them.
    emit("\n---\n".join(texts))
    _print_read_back(result, model.tokenizer, args.read_back)
    print(f"{heads}\n{_summary(result, seconds)}", file=sys.stderr)
    code = End.DONE
    if view is not None and args.trace is not None:
        title = prompt.get("prompt") or prompt.get("template") or "unprompted"
        try:
            view.write_page(args.trace, title[:80])
            print(f"wrote {args.trace}", file=sys.stderr)
        except OSError as error:
            why = f"cannot be written: {error.strerror}; the texts are complete"
            say_error(f"--trace {args.trace} {why}")
            code = End.NO_PAGE
    broken = [str(i) for i, status in enumerate(result.status) if status is Status.NON_FINITE]
    if broken:
        say_error(f"the model's logits are not finite: texts {', '.join(broken)} are unfinished")
        return End.NOT_FINITE
    return code


def _prompt_of(model: dlm_jax.Model, args: argparse.Namespace) -> dict[str, Any]:
    """The prompt from the flags, as arguments of `dlm_jax.generate`."""
    if args.chat:
        if model.chat is None:
            raise ValueError(
                "--chat: the model has no chat_template (in tokenizer_config.json, or as "
                "chat_template.jinja); format the turns yourself and omit --chat"
            )
        return {"tokens": model.chat.ids([{"role": "user", "content": args.prompt}]).tolist()}
    texts = {name: getattr(args, name) for name in ("prompt", "template", "draft")}
    return {name: text for name, text in texts.items() if text is not None}


def _summary(result: dlm_jax.Texts, seconds: float) -> str:
    """A line with the work of a call and its nonzero counters."""
    total = {name: int(column.sum()) for name, column in result.counters._asdict().items()}
    tokens = int((result.committed >= 0).sum())
    parts = [f"{len(result.texts)} texts", f"{int(result.steps.sum())} steps"]
    parts += [f"{count} {name}" for name, count in total.items() if count]
    line = f"{', '.join(parts)}, {tokens} tokens in {seconds:.2f} s"
    line += f" ({tokens / max(seconds, 1e-6):,.0f} tokens/s)"
    return f"{line}; {', '.join(result.programs)}" if result.programs else line


def _print_read_back(result: dlm_jax.Texts, tokenizer: Tokenizer, size: int) -> None:
    """Prints each read-back token with its position, probability, and `size` candidates to standard
    error.
    """

    def piece(token: int) -> str:
        text = tokenizer.decode([token])
        return repr(text) if text else f"<{token}>"

    for record in itertools.chain.from_iterable(result.read_back):
        seen = record.candidates
        best = zip(seen.ids[:size].tolist(), seen.logits[:size].tolist(), strict=True)
        rivals = ", ".join(f"{piece(token)} {logit:.4g}" for token, logit in best)
        print(
            f"row {seen.row} step {seen.step} position {seen.index}: {piece(record.token)} "
            f"p={record.probability:.4g} of {seen.num_survivors} candidates: {rivals}",
            file=sys.stderr,
        )


# Flags that may differ between hosts: how they are joined, and paths.
_PATHS = ("checkpoint", "prompts", "output", "trace")
_LOCAL = ("coordinator", "num_processes", "process_id", *_PATHS)


def _facts_of(
    args: argparse.Namespace, overrides: Mapping[str, str], rules: Sequence[type]
) -> dict[str, Any]:
    """Values that all hosts must share: the program, its flags, and the rules of the user."""
    given = {name: value for name, value in vars(args).items() if name not in _LOCAL}
    flags = {f"--{n.replace('_', '-')}": repr(v) for n, v in (given | {**overrides}).items()}
    own = {f"source code of {rule.__qualname__}": own_source(rule) for rule in rules}
    return program_facts() | {"version of jax": jax.__version__} | flags | own


if __name__ == "__main__":
    raise SystemExit(main())
