"""The command line: verbs are found, and mistakes are explained in one sentence."""

import sys
from importlib.metadata import version

import pytest

from moiety import cli

VERB = '''
import json

import typer

def command(times: int = 1, error: str = "", name: str = "") -> None:
    """Do a thing for a test."""
    if error == "ours":
        raise ValueError("k is 9, but there are 4 experts; choose k between 1 and 4.")
    if error == "library":
        json.loads("x")
    if error == "file":
        open("/nowhere/at/all")
    if error == "interrupt":
        raise KeyboardInterrupt
    if error == "exit":
        raise typer.Exit(3)
    typer.echo("done " * times)
'''


@pytest.fixture
def moiety(tmp_path, monkeypatch, capsys):
    """Run `moiety …` in a command that has one more verb; return exit code, stdout, stderr."""
    (tmp_path / "thing.py").write_text(VERB)
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        return ended.value.code, *capsys.readouterr()

    yield run
    # The planted verb must not stay importable for other tests.
    sys.modules.pop("moiety.cli.thing", None)
    vars(cli).pop("thing", None)


def test_a_new_file_is_a_new_verb(moiety):
    assert moiety("thing", "--times", "2") == (0, "done done \n", "")
    code, out, _ = moiety("--help")
    assert code == 0
    assert "thing" in out
    assert "Do a thing for a test." in out


def test_without_arguments_the_help_is_shown(moiety):
    assert moiety()[:2] == moiety("--help")[:2]


def test_version(moiety):
    assert moiety("--version") == (0, f"moiety {version('moiety')}\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "nothing"),
        (["thing", "--tims", "2"], "--tims"),
        (["thing", "--times", "two"], "--times"),
        (["thing", "--error", "ours"], "k is 9, but there are 4 experts"),
        (["thing", "--error", "file"], "/nowhere/at/all"),
    ],
)
def test_a_mistake_is_explained_in_one_sentence(moiety, arguments, said):
    code, out, err = moiety(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("moiety: ")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("error", "code"), [("interrupt", 130), ("exit", 3)])
def test_exit_codes(moiety, error, code):
    assert moiety("thing", "--error", error)[0] == code


def test_a_defect_keeps_its_traceback(moiety):
    with pytest.raises(ValueError, match="Expecting value"):
        cli.main(["thing", "--error", "library"])
