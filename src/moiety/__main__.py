"""`python -m moiety` is the command `moiety`."""

from .cli import main

main()
