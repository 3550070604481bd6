"""The `moiety` command: one file per verb.

A verb is a module of this package with a function `command`: the file name is the verb, the
docstring its help, the parameters its options. Nothing else is edited. All verbs are imported to
list them, so a verb imports what is heavy inside its function:

    # moiety/cli/hello.py
    def command(name: str = "you") -> None:
        '''Greet somebody.'''
        print(f"Hello, {name}.")
"""

import importlib
import pkgutil
import sys
import traceback
from importlib.metadata import version
from typing import Annotated, Any

import typer

GO_ON = ("adapt", "anytime", "compare", "study")  # from where they were stopped
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; 2 says that the user can put it right, 130 an interrupt."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command: Any = typer.main.get_command(build_app())
    try:
        code = command.main(arguments or ["--help"], prog_name="moiety", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED  # some versions of typer return it instead
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        if sentence:  # empty where typer has just shown the help of a verb without its own verb
            typer.echo(f"moiety: {sentence}", err=True)
        sys.exit(2)
    if code == INTERRUPTED:
        again = (
            "; run the same command again to go on" if arguments and arguments[0] in GO_ON else ""
        )
        typer.echo(f"moiety: interrupted{again}.", err=True)
    sys.exit(code if isinstance(code, int) else 0)


def build_app() -> typer.Typer:
    """Make the application with every verb of this package."""
    app = typer.Typer(add_completion=False)
    app.callback()(options)
    for name in sorted(found.name for found in pkgutil.iter_modules(__path__)):
        verb = importlib.import_module(f"{__name__}.{name}").command
        if isinstance(verb, typer.Typer):  # a verb with verbs of its own, such as `study run`
            app.add_typer(verb, name=name)
        else:
            app.command(name)(verb)
    return app


def show_version(wanted: bool) -> None:
    """Print the installed version and stop, if it was asked for."""
    if wanted:
        typer.echo(f"moiety {version('moiety')}")
        raise typer.Exit()


def options(
    _: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=show_version, help="Show the version."),
    ] = False,
) -> None:
    """Mixture-of-experts models over their whole life."""


def explain(error: Exception) -> str | None:
    """Return one sentence for what the user can put right, or none for what is a defect.

    That is a wrong argument, a file or an extra that is missing, and a `ValueError` that Moiety
    itself raised: one from inside a library is a defect of ours and keeps its traceback.
    """
    if hasattr(error, "format_message"):  # typer's usage errors, whose class moved between versions
        return error.format_message().replace("Value error, ", "")  # of what checks the values
    if isinstance(error, OSError | ImportError):
        return str(error)
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = frames[-1][0].f_globals.get("__name__", "").split(".")[0] == "moiety"
    return str(error) if isinstance(error, ValueError) and ours else None
