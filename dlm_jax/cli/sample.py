"""Samples texts from a trained model: ``python sample.py --prompt "ROMEO:" --num-samples 4``.

Without ``--checkpoint``, the program uses the shipped model, a small model of Shakespeare. Standard
output contains only the texts, separated by lines ``---``. Progress, a summary and the output of
``--report-chain`` and ``--watch`` are written to standard error. The defaults of the flags are the
recommendations of the checkpoint.

``--prompts in.jsonl --output out.jsonl`` runs a file of requests instead; the same command resumes
an interrupted run (docs/generation.md).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dlm_jax
from dlm_jax.batch.json_lines import RequestFile, ResultPlaces, Results, fingerprint
from dlm_jax.batch.runner import READ_AHEAD, describe_model, describe_settings, run_requests
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
from dlm_jax.config import SamplingParams, add_sample_flags, layered, parse_flags, sample_settings
from dlm_jax.distributed.partitions import OwnRows, num_shares, split_rows
from dlm_jax.distributed.processes import check_same_everywhere, gathered, run_together
from dlm_jax.inference.generate import chain_report
from dlm_jax.inference.request import settings_of_call
from dlm_jax.progress import Progress
from dlm_jax.sampling.params import params_of
from dlm_jax.sampling.rules import with_rules
from dlm_jax.store.files import NO_SOURCE, own_source, program_facts
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
    add("--num-samples", type=COUNT, metavar="N", help="number of texts (1)")
    length_help = "canvas length of a row; default: the training length"
    add("--max-length", type=COUNT, metavar="L", help=length_help)
    add("--seed", type=SEED, default=0, metavar="K", help="sample i has the seed K + i (0)")
    add("--batch-size", type=COUNT, default=64, metavar="B", help="rows that run in parallel (64)")
    host_help = "function that selects tokens"
    add("--host-sampler", metavar="MODULE:FUNCTION", help=host_help)
    add("--rules", metavar="MODULES", help="modules with rules (A,B); their settings become flags")
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
    is_file = args.prompts is not None
    alone = ("prompt", "template", "draft", "num_samples", "watch", "trace", "host_sampler")
    for name in alone:
        if is_file and getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} has no effect with --prompts; remove it")
    is_shared = args.num_processes is not None or args.process_id is not None
    if is_shared and not is_file and not args.distributed:
        raise ValueError("--num-processes and --process-id require --prompts; pass it")
    if args.coordinator is not None and not args.distributed:
        raise ValueError("--coordinator has no effect without --distributed; add it")
    if args.chat and (is_file or args.template or args.draft or args.prompt is None):
        raise ValueError("--chat formats --prompt as a turn; pass --prompt and no other text")
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
    settings |= {name: getattr(args, name) for name in ("max_length", "seed", "batch_size")}
    settings |= {"num_samples": args.num_samples or 1, "host_sampler": sampler}
    start, waited, view = time.perf_counter(), 0.0, None
    is_first = jax.process_index() == 0
    with refusals(), naming_flags():
        if viewing is not None:
            view = viewing.View(model, sys.stderr, is_watched=args.watch, is_page=bool(args.trace))
            result, waited = view.sample(prompt, settings), view.waited
        else:
            with Progress("sample", None, "step", is_shown=is_first) as shown:
                result = dlm_jax.generate(model, [prompt], on_steps=shown.update, **settings)
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


def sample_file(model: dlm_jax.Model, args: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Runs a file of requests and returns the exit code, one of `End`."""
    if args.max_length is not None:
        settings = settings | {"max_length": args.max_length}
    with refusals(), naming_flags():
        # Checked once, because these errors do not depend on the line.
        sample = settings_of_call(model, settings)
    with refusals():
        lines = RequestFile(args.prompts)
        described = describe_settings(settings) | {"seed": args.seed}
        for name in described.get("rules", ()):
            if name.endswith(NO_SOURCE):
                print(f"{name}: changes to its source code are not detected", file=sys.stderr)
        mark = fingerprint(args.prompts, model=describe_model(model), settings=described)
        if args.distributed:
            check_same_everywhere({"model or file of requests": mark})
        index, count, writes = _share(model, args)
        own = RequestFile(args.prompts, index=index, count=count)
        ahead = max(READ_AHEAD, 2 * args.batch_size)
        plan = {"batch_size": args.batch_size, "read_ahead": ahead}
        results: Results | None = None
        if writes:
            results = Results(args.output, fingerprint=mark, index=index, count=count, plan=plan)
    with results or contextlib.nullcontext():
        with refusals():
            done, plan = _same_in_all(results, own, index)
        if jax.process_index() == 0:
            print(heads_line(model, sample), file=sys.stderr)
        num_lines = num_done = 0
        for line in own:
            num_lines, num_done = num_lines + 1, num_done + (line.number in done)
        if num_done and results is not None:
            print(f"{num_done} of {num_lines} requests are done", file=sys.stderr)
        start, rows, errors, tokens = time.perf_counter(), 0, 0, 0
        progress = Progress(
            "sample",
            num_lines - num_done,
            "row",
            is_shown=results is not None and num_done < num_lines,
        )

        def write(result: Mapping[str, Any], new: int) -> None:
            nonlocal rows, errors, tokens
            if results is not None:
                results.write(result)
            is_error = "error" in result
            rows, errors, tokens = rows + (not is_error), errors + is_error, tokens + new
            progress.update(note=f"{tokens / max(progress.seconds(), 1e-6):,.0f} tokens/s")

        try:
            with progress:
                programs = run_requests(
                    model,
                    lines if args.distributed else own,
                    write,
                    done=done,
                    seed=args.seed,
                    settings=settings,
                    **plan,
                )
        except KeyboardInterrupt:
            print("stopped; the same command resumes from here", file=sys.stderr)
            if jax.process_count() > 1:  # a process that returns waits for the others
                raise SystemExit(End.INTERRUPTED) from None
            return End.INTERRUPTED
        if results is None:
            return End.DONE
        with refusals():
            results.finish(own)
    seconds = time.perf_counter() - start
    print(
        f"{rows} rows, {errors} refused, {tokens} tokens in {seconds:.2f} s "
        f"({tokens / seconds:,.0f} tokens/s); {len(programs)} programs ({', '.join(programs)})",
        file=sys.stderr,
    )
    print(f"wrote {args.output if count == 1 else results.path}", file=sys.stderr)
    return _end(results.path)


def _share(model: dlm_jax.Model, args: argparse.Namespace) -> tuple[int, int, bool]:
    """Returns (index of this process's part of the lines, number of parts, whether it writes
    results).

    Processes across which only the parameters are sharded have the same part, and only the first of
    them writes.
    """
    if not args.distributed:
        return args.process_id or 0, 1 if args.num_processes is None else args.num_processes, True
    rows = split_rows(model.params)
    index, count = OwnRows(rows, num_shares(rows)).share
    shares: list[Any] = gathered(index)
    return index, count, shares.index(index) == jax.process_index()


def _same_in_all(
    results: Results | None, own: RequestFile, index: int
) -> tuple[Container[int], dict[str, int]]:
    """The finished lines and the plan of this process's part, also if it writes no results."""
    if jax.process_count() == 1 and results is not None:
        return results.done, results.plan
    given = None
    if results is not None:
        given = (
            results.plan,
            np.packbits(np.fromiter((line.number in results.done for line in own), bool)),
        )
    shared = gathered((index, given))
    if results is not None:
        return results.done, results.plan
    plan, bits = next(value for part, value in shared if part == index and value is not None)
    done = ResultPlaces()
    for line, is_done in zip(own, np.unpackbits(bits), strict=False):
        if is_done:
            done.add(line.number, 0, 1)
    return done, plan


def _end(output: Path) -> End:
    """The exit code for all results, including those of earlier runs."""
    is_partly = False
    with output.open("rb") as rows:
        for row in rows:
            if b'"error"' not in row and b'"non_finite"' not in row:
                continue
            result = json.loads(row)
            if result.get("status") == "non_finite":
                return End.NOT_FINITE
            is_partly |= "error" in result
    return End.PARTLY if is_partly else End.DONE


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
