"""`moiety report`: make the page of a study again from its result."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    result: Annotated[
        Path, typer.Argument(help="Folder of a study's run, or a result file of one.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the page here. Default: report.html in the folder, or beside a "
            "file FILE.html."
        ),
    ] = None,
) -> None:
    """Make the page of a study again, from the result of its run."""
    from ..io import read_json, write_atomic
    from ..lab.headline import answers
    from ..lab.schema import check_result
    from ..report import study_page

    if out is not None and out.is_dir():
        raise ValueError(f"{out} is a folder: give the page a file, such as {out / 'report.html'}")
    path = result if result.is_file() else result / "result.json"
    if not path.is_file():
        raise ValueError(
            f"{result} holds no result.json, which a study writes when all its trials have ended; "
            "run `moiety study run` until then."
        )
    found = read_json(path)
    check_result(found)
    page = study_page(found, answers(found))
    usual = result.with_suffix(".html") if result.is_file() else result / "report.html"
    typer.echo(f"The page: {write_atomic(out or usual, page)}")
