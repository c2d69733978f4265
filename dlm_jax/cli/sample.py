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
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

import dlm_jax
from dlm_jax.cli.common import (
    CHECKPOINT,
    COUNT,
    IGNORE_CONFIG,
    PRESET,
    QUANTIZE,
    SEED,
    Parser,
    add_host_flags,
    add_mesh_flags,
    compile_clock,
    heads_line,
    import_module,
    import_rules,
    import_sampler,
    join_hosts,
    load_model,
    mesh_of,
    naming_flags,
    speeds,
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
from dlm_jax.cli.sample_file import sample_file
from dlm_jax.config import SamplingParams, add_sample_flags, layered, parse_flags, sample_settings
from dlm_jax.data import Tokenizer
from dlm_jax.distributed.partitions import num_shares, split_rows
from dlm_jax.distributed.processes import check_same_everywhere, run_together
from dlm_jax.inference.candidates import HostSampler
from dlm_jax.inference.generate import chain_report, texts_of
from dlm_jax.inference.model import DTYPES
from dlm_jax.inference.results import Row
from dlm_jax.progress import Progress
from dlm_jax.sampling.params import params_of
from dlm_jax.sampling.rules import with_rules
from dlm_jax.store.files import own_source, program_facts
from dlm_jax.types import Params, Status

if TYPE_CHECKING:
    from dlm_jax.viewing.frames import Frame


def watched(
    model: dlm_jax.Model,
    prompts: Sequence[dict[str, Any]],
    args: argparse.Namespace,
    common: dict[str, Any],
    frames: dict[int, list[Frame]],
) -> tuple[dlm_jax.Texts, float]:
    """Samples the texts and shows the denoising; `frames` collects the frames of each row.

    Returns the texts and the seconds spent waiting between redraws.
    """
    from dlm_jax.viewing.frames import frame_of, special_names
    from dlm_jax.viewing.watch import Watch, pace_of

    decode, names = model.tokenizer.decode, special_names(model.tokenizer)
    steps = common.get("steps", model.sample.steps)
    watch = Watch(decode, sys.stderr, names=names, pace=pace_of(steps)) if args.watch else None
    rows: dict[int, Row] = {}
    for canvases in dlm_jax.stream(model, prompts, **common):
        rows |= canvases
        shown = [
            frame_of(i, row, mask_id=model.tokenizer.mask_id, steps=steps)
            for i, row in sorted(canvases.items())
        ]
        for frame in shown if args.trace is not None else ():
            frames.setdefault(frame.row, []).append(frame)
        if watch is not None:
            watch.show(shown)
    return texts_of(model, rows), 0.0 if watch is None else watch.waited


_NOT_OF_A_ROW = ("num_samples", "batch_size")


def make_parser(kind: type[SamplingParams]) -> Parser:
    parser = Parser(prog="sample.py", description=__doc__)
    add = parser.add_argument
    add("--checkpoint", metavar="PATH", help=CHECKPOINT)
    add("--prompt", metavar="TEXT", help="text at the start of every sample")
    add("--template", metavar="TEXT", help='text with gaps to fill: "To be <hole:4> be"')
    add("--draft", metavar="TEXT", help="text after the prompt, to refine")
    add(
        "--chat",
        action="store_true",
        help="treat --prompt as a user turn, and print the model's answer",
    )
    add("--preset", metavar="NAME", help=PRESET)
    add(
        "--num-samples",
        type=COUNT,
        default=1,
        metavar="N",
        help="number of texts (1); with --prompts, number of samples per request without n",
    )
    add(
        "--max-length",
        type=COUNT,
        metavar="L",
        help="canvas length of a row; default: the training length",
    )
    add("--seed", type=SEED, default=0, metavar="K", help="sample i has the seed K + i (0)")
    add("--batch-size", type=COUNT, default=64, metavar="B", help="rows that run in parallel (64)")
    add(
        "--host-sampler",
        metavar="MODULE:FUNCTION",
        help="function that selects tokens; a request's own host_sampler overrides it",
    )
    add(
        "--allow-host-sampler",
        metavar="MODULE",
        action="append",
        default=[],
        help="module with functions that requests of --prompts can use; repeatable",
    )
    add("--rules", metavar="MODULES", help="modules with rules (A,B); their settings become flags")
    add(
        "--read-back",
        type=COUNT,
        metavar="K",
        help="print, or write to --output, each token with its K best candidates",
    )
    add(
        "--max-candidates",
        type=COUNT,
        default=64,
        metavar="N",
        help="maximum candidates per position for host samplers and --read-back (64)",
    )
    add("--watch", action="store_true", help="show the canvas while it is denoised")
    add("--trace", metavar="FILE", help="write an HTML page that replays the denoising")
    add("--prompts", metavar="FILE", help="requests, one JSON object per line; requires --output")
    add("--output", metavar="FILE", help="results of --prompts, one JSON object per line")
    add(
        "--report-every",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds between progress lines of --prompts (10); 0: none",
    )
    add(
        "--report-json",
        metavar="FILE",
        help="append the figures of the progress lines to this file, one JSON object per line",
    )
    add(
        "--dtype",
        metavar="TYPE",
        help=f"dtype of the parameters: {', '.join(DTYPES)}; default: float32",
    )
    add("--quantize", metavar="KIND", help=QUANTIZE)
    add("--ignore-config", action="append", default=[], metavar="KEY", help=IGNORE_CONFIG)
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


def _host_sampler(args: argparse.Namespace) -> HostSampler | None:
    """Imports the modules that requests can use, and returns the ``--host-sampler`` function."""
    for module in args.allow_host_sampler:
        import_module(module, f"--allow-host-sampler {module}")
    if args.host_sampler is None:
        return None
    return import_sampler(args.host_sampler, f"--host-sampler {args.host_sampler}")


def _check_modes(args: argparse.Namespace) -> None:
    size, limit = args.read_back, args.max_candidates
    if size is not None and size > limit:
        raise ValueError(
            f"--read-back {size} is more than --max-candidates {limit}; raise the limit to {size}"
        )
    if (args.prompts is None) != (args.output is None):
        raise ValueError("--prompts and --output require each other; pass both")
    if args.prompts is not None:
        for name in ("prompt", "template", "draft"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} has no effect with --prompts; set it in the requests")
        for name in ("watch", "trace"):
            if getattr(args, name):
                raise ValueError(
                    f"--{name} shows a single text, not a file of --prompts; run one request with "
                    f"its --prompt and --seed, which gives the same text"
                )
    if args.allow_host_sampler and args.prompts is None:
        raise ValueError(
            "--allow-host-sampler applies only to requests of --prompts; use --host-sampler"
        )
    if args.chat and (args.prompts or args.template or args.draft or args.prompt is None):
        raise ValueError("--chat formats --prompt as a turn; pass --prompt and no other text")
    is_shared = args.num_processes is not None or args.process_id is not None
    if args.prompts is None and is_shared and not args.distributed:
        raise ValueError("--num-processes and --process-id require --prompts; pass it")
    if args.coordinator is not None and not args.distributed:
        raise ValueError(
            "--coordinator has no effect without --distributed; add it or remove --coordinator"
        )
    if not 0 <= args.report_every < math.inf:
        raise ValueError(f"--report-every {args.report_every} must be at least 0")
    if args.report_json is not None and (args.prompts is None or not args.report_every):
        raise ValueError("--report-json requires --prompts and --report-every; pass both")
    if args.trace is not None:
        _check_page(args.trace)
    hosted = [name for name in ("host_sampler", "read_back") if getattr(args, name) is not None]
    if hosted and (args.watch or args.trace):
        raise ValueError(
            f"--{hosted[0].replace('_', '-')} and --watch or --trace cannot be combined; remove one"
        )


@program
def main(argv: Sequence[str] | None = None) -> int:
    start_jax()
    compile_clock()
    argv = sys.argv[1:] if argv is None else argv
    with refusals():
        check_output()
        join_hosts(_host_flags(argv))
    return run_together(lambda: _main(argv), code_of, end_of)


def _main(argv: Sequence[str]) -> int:
    with refusals(), naming_flags():
        rules = _own_rules(argv)
        kind = params_of(with_rules(rules))
        args, overrides = parse_flags(make_parser(kind), argv)
        given = {n: getattr(args, n) for n in kind.table.settings if hasattr(args, n)}
        settings = sample_settings(given, kind) | ({"rules": rules} if rules else {})
        _check_modes(args)
        sampler = _host_sampler(args)
        if args.distributed:
            check_same_everywhere(_facts_of(args, overrides, rules))
        mesh = mesh_of(overrides, is_distributed=args.distributed)
        model = load_model(
            args.checkpoint,
            mesh=mesh,
            dtype=args.dtype,
            quantize=args.quantize,
            ignore_config=args.ignore_config,
        )
        if mesh is not None:
            _check_batch(model.params, args.batch_size)
        settings = layered(model.preset(args.preset) if args.preset else None, settings)
        if args.report_chain:
            print(chain_report(model, host_sampler=sampler, **settings), file=sys.stderr)
    if args.prompts is not None:
        return sample_file(model, args, settings)
    with refusals():
        prompts = [_asked(model, args)]
    common: dict[str, Any] = {
        "num_samples": args.num_samples,
        "max_length": args.max_length,
        "seed": args.seed,
        "batch_size": args.batch_size,
    } | settings
    host = {"host_sampler": sampler, "read_back": args.read_back is not None}
    heads = _heads(model, prompts[0], host | common)
    began, compiled = time.perf_counter(), compile_clock().seconds
    frames: dict[int, list[Frame]] = {}
    with refusals(), naming_flags():
        if args.watch or args.trace is not None:
            _noted(heads)
            result, waited = watched(model, prompts, args, common, frames)
        else:
            result, waited = _generated(model, prompts, args, host | common, heads), 0.0
    seconds = time.perf_counter() - began - waited
    compiling = compile_clock().seconds - compiled
    if jax.process_index() != 0:
        return End.DONE
    texts = _answers_of(model, result, len(prompts[0]["tokens"])) if args.chat else result.texts
    # The texts are printed first, so that later failures do not lose them.
    emit("\n---\n".join(texts))
    _print_read_back(result, model.tokenizer, args.read_back)
    _tell(result, seconds, compiling)
    if args.trace is not None and not _write_page(model, prompts[0], frames, args.trace):
        return _end_of(result, End.NO_PAGE)
    return _end_of(result, End.DONE)


def _generated(
    model: dlm_jax.Model,
    prompts: list[dict[str, Any]],
    args: argparse.Namespace,
    settings: dict[str, Any],
    heads: str,
) -> dlm_jax.Texts:
    """Samples the texts with a progress line, and prints the line `heads` after the first step.

    An error before the first step, such as a lack of memory, must print only one line.
    """

    def committed(number: int) -> None:
        nonlocal heads
        heads = _noted(heads)
        shown.update(number)

    with Progress("sample", None, "token", is_shown=jax.process_index() == 0) as shown:
        result = dlm_jax.generate(
            model, prompts, max_candidates=args.max_candidates, on_commits=committed, **settings
        )
    _noted(heads)
    return result


def _heads(model: dlm_jax.Model, prompt: dict[str, Any], common: dict[str, Any]) -> str:
    """Checks the request, and returns the line about the heads, the fill and the order.

    The line is empty in processes that print nothing. Warnings are suppressed, because sampling
    repeats them.
    """
    asked = {name: value for name, value in common.items() if name not in _NOT_OF_A_ROW}
    with refusals(), naming_flags(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (request,) = dlm_jax.make_requests(model, prompt, asked)
    return heads_line(model, request.sample) if jax.process_index() == 0 else ""


def _noted(line: str) -> str:
    """Prints the line unless it is empty; returns the empty string."""
    if line:
        print(line, file=sys.stderr)
    return ""


def _end_of(result: dlm_jax.Texts, otherwise: End) -> End:
    """Reports texts left unfinished by non-finite logits; returns `otherwise` if there are none."""
    broken = [str(i) for i, status in enumerate(result.status) if status is Status.NON_FINITE]
    if broken:
        say_error(f"the model's logits are not finite: texts {', '.join(broken)} are unfinished")
        return End.NOT_FINITE
    return otherwise


def _tell(result: dlm_jax.Texts, seconds: float, compiling: float) -> None:
    generated = int((result.committed >= 0).sum())
    programs = f"; {len(result.programs)} compilation ({', '.join(result.programs)})"
    print(
        f"{len(result.texts)} texts, {int(result.steps.sum())} steps, {_counted(result)}"
        f"{generated} tokens in {seconds:.2f} s ({speeds(generated, seconds, compiling)})"
        + programs
        * bool(result.programs),
        file=sys.stderr,
    )


def _asked(model: dlm_jax.Model, args: argparse.Namespace) -> dict[str, Any]:
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


def _answers_of(model: dlm_jax.Model, result: dlm_jax.Texts, start: int) -> list[str]:
    """The text after the first `start` tokens of each row."""
    rows = zip(result.tokens, result.lengths, strict=True)
    return [model.tokenizer.decode(tokens[start:length]) for tokens, length in rows]


def _check_batch(params: Params, batch_size: int) -> None:
    """Raises ValueError if the batch size is not divisible by the number of shards of the rows."""
    shares = num_shares(split_rows(params))
    if batch_size % shares:
        raise ValueError(
            f"--batch-size {batch_size} is not divisible by the {shares} devices across which the "
            f"rows are split; use {max(1, round(batch_size / shares)) * shares}"
        )


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


def _check_page(name: str) -> None:
    """Raises ValueError if a page cannot be written to the path `name`."""
    path = Path(name)
    if not path.parent.is_dir():
        raise ValueError(f"--trace {name}: the directory does not exist; create it first")
    if path.is_dir():
        raise ValueError(f"--trace {name} is a directory; pass a file")
    try:
        # Checking permissions would miss some cases, such as a read-only file system.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(
            f"--trace {name} cannot be written: {error.strerror}; choose another file"
        ) from None


def _write_page(
    model: dlm_jax.Model, prompt: dict[str, Any], frames: dict[int, list[Frame]], path: str
) -> bool:
    """Writes the denoising page, prints a line, and returns True on success."""
    title = prompt.get("prompt") or prompt.get("template") or "unprompted"
    from dlm_jax.viewing.frames import special_names
    from dlm_jax.viewing.trace import write_trace

    decode, names = model.tokenizer.decode, special_names(model.tokenizer)
    try:
        write_trace(
            path, [frames[i] for i in sorted(frames)], decode, title=title[:80], names=names
        )
    except OSError as error:
        say_error(f"--trace {path} cannot be written: {error.strerror}; the texts are complete")
        return False
    print(f"wrote {path}", file=sys.stderr)
    return True


# Flags that may differ between hosts: how they are joined, paths, and reports.
_LOCAL = (
    "coordinator", "num_processes", "process_id", "checkpoint", "prompts", "output", "trace",
    "report_every", "report_json",
)  # fmt: skip


def _facts_of(
    args: argparse.Namespace, overrides: Mapping[str, str], rules: Sequence[type]
) -> dict[str, Any]:
    """Values that all hosts must share: the program, its flags, and the rules of the user."""
    given = {name: value for name, value in vars(args).items() if name not in _LOCAL}
    flags = {f"--{n.replace('_', '-')}": repr(v) for n, v in (given | {**overrides}).items()}
    own = {f"source code of {rule.__qualname__}": own_source(rule) for rule in rules}
    return program_facts() | {"version of jax": jax.__version__} | flags | own


def _host_flags(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of the hosts, before the module of ``--rules`` is imported, which may use JAX."""
    parser = Parser(prog="sample.py", description=None, add_help=False)
    add_host_flags(parser)
    flags = parser.parse_known_args(argv)[0]
    flags.distributed &= not {"-h", "--help", "--version"}.intersection(argv)
    return flags


def _own_rules(argv: Sequence[str]) -> list[type]:
    """The rules in the modules given by ``--rules``; their settings become flags."""
    parser = Parser(prog="sample.py", description=None, add_help=False)
    parser.add_argument("--rules")
    return import_rules(parser.parse_known_args(argv)[0].rules)


def _counted(result: dlm_jax.Texts) -> str:
    """The nonzero counters as text."""
    total = {name: int(column.sum()) for name, column in result.counters._asdict().items()}
    return "".join(f"{n} {name}, " for name, n in total.items() if n)


if __name__ == "__main__":
    raise SystemExit(main())
