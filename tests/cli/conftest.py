"""What the tests of all commands share."""

import pytest

from moiety import cli


@pytest.fixture
def moiety(capsys):
    """Run `moiety …`; return exit code, stdout, stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        return ended.value.code, *capsys.readouterr()

    return run
