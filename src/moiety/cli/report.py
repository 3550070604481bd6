"""`moiety report`: make the page of a study again from its result."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    folder: Annotated[Path, typer.Argument(help="Folder of a study's run, with its result.json.")],
    out: Annotated[
        Path | None, typer.Option(help="Write the page here. Default: report.html in the folder.")
    ] = None,
) -> None:
    """Make the page of a study again, from result.json in its folder."""
    from ..io import read_json, write_atomic
    from ..lab.headline import answers
    from ..lab.schema import check_result
    from ..report import study_page

    if out is not None and out.is_dir():
        raise ValueError(f"{out} is a folder: give the page a file, such as {out / 'report.html'}")
    path = folder / "result.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no result.json, which a study writes when all its trials have ended; "
            "run `moiety study run` until then."
        )
    result = read_json(path)
    check_result(result)
    page = study_page(result, answers(result))
    typer.echo(f"The page: {write_atomic(out or folder / 'report.html', page)}")
