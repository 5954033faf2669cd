"""The command ``tandem``: global options, errors and exit codes. Commands live in their own modules."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from importlib.metadata import version
from typing import Annotated

import typer

from tandem.cli import (
    assess,
    candidates,
    controller,
    db,
    demo,
    doctor,
    export,
    nodes,
    pair,
    paper,
    report,
    run,
    runs,
    serve,
    show,
    verdict,
)
from tandem.errors import TandemError
from tandem.vocabulary import EXIT_INCONCLUSIVE, EXIT_USAGE

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
"""As the shell would report SIGINT and SIGPIPE."""

app = typer.Typer(
    name="tandem",
    help="Finds silent data corruption: runs a suspect node against a healthy reference, bit by bit.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"tandem {version('tandem-sdc')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="TANDEM_DEBUG", help="Show the trace of an error, not only its line.")
    ] = False,
) -> None:
    """Finds silent data corruption: runs a suspect node against a healthy reference, bit by bit.

    Exit codes: 0 match, 1 mismatch found, 2 inconclusive or not able to run, 64 wrong usage.
    """
    context.obj = {"debug": debug}
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_USAGE)


app.command("demo")(demo.demo)
app.command("run")(run.run)
app.command("runs")(runs.runs)
app.command("show")(show.show)
app.command("verdict")(verdict.verdict)
app.command("nodes")(nodes.nodes)
app.command("node")(nodes.node)
app.command("assess")(assess.assess)
app.command("report")(report.report)
app.command("export")(export.export)
app.command("paper")(paper.paper)
app.command("doctor")(doctor.doctor)
app.command("pair")(pair.pair)
app.command("watch")(pair.watch)
app.command("candidates")(candidates.candidates)
app.command("controller")(controller.controller)
app.command("serve")(serve.serve)
app.add_typer(db.app, name="db")


def main(arguments: list[str] | None = None) -> None:
    """Entry point: runs a command and exits with its code.

    Whatever goes wrong on purpose is one line on standard error; `--debug` (anywhere on the line) or ``TANDEM_DEBUG``
    adds the trace.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    # Also after the command: a user who got an error line repeats it with --debug at the end.
    debug = "--debug" in arguments or bool(os.environ.get("TANDEM_DEBUG"))
    arguments = [a for a in arguments if a != "--debug"]
    code = _run(arguments, debug)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _broken_pipe()
    sys.exit(code)


def _run(arguments: list[str], debug: bool) -> int:
    try:
        result = app(args=arguments, prog_name="tandem", standalone_mode=False)
        code = result if isinstance(result, int) else 0
        if code == EXIT_INTERRUPTED:
            # The library turns KeyboardInterrupt into this code, silently.
            print("\ninterrupted", file=sys.stderr)
        return code
    except SystemExit as stop:
        # It also turns a broken pipe into exit code 1, which here would read as "mismatch found".
        if isinstance(stop.__context__, BrokenPipeError):
            return _broken_pipe()
        raise
    except TandemError as error:
        return _fail(str(error), error.exit_code, debug)
    except Exception as error:
        # The library's own exceptions (bad option, missing argument) all carry a message and an exit code.
        message = getattr(error, "format_message", None)
        if callable(message):
            return _fail(f"{message()} (see `{_help_of(error)}`)", EXIT_USAGE, debug)
        return _fail(
            f"{type(error).__name__}: {error} (unexpected: run again with --debug and report the trace)",
            EXIT_INCONCLUSIVE,
            debug,
        )


def _help_of(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context is not None else 'tandem'} --help"


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _broken_pipe() -> int:
    """The reader went away (``tandem runs | head``): say nothing, not even at the interpreter's end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    return EXIT_BROKEN_PIPE


if __name__ == "__main__":
    main()
