"""`moiety report`: make the page of a study, an audit, a comparison or a stream anew."""

from pathlib import Path
from typing import Annotated, Any

import typer

LEDGER = "ledger.jsonl"


def command(
    result: Annotated[
        Path,
        typer.Argument(
            help="Folder of a study's run, of an audit, of moiety adapt --method compare or of "
            "moiety anytime, or a result file."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the page here. Default: report.html in the folder of a study or a stream, "
            "compare.html in that of a comparison, or beside a file FILE.html."
        ),
    ] = None,
) -> None:
    """Make the page of a study, an audit, a comparison or a stream, from what it wrote."""
    from ..io import read_json, write_atomic

    if out is not None and out.is_dir():
        raise ValueError(f"{out} is a folder: give the page a file, such as {out / 'report.html'}")
    if not result.exists():
        raise ValueError(f"there is no file or folder {result}")
    if (result / "audit.json").is_file() and not (result / "result.json").is_file():
        result /= "audit.json"
    path = result if result.is_file() else result / "result.json"
    if not path.is_file() and (result / LEDGER).is_file():
        typer.echo(f"The page: {write_atomic(out or result / 'report.html', ledger_page(result))}")
        return
    if not path.is_file():
        raise ValueError(
            f"{result} holds no result.json, which `moiety study run` and `moiety adapt --method "
            "compare` write when all has ended (the same command goes on until then), and no "
            "ledger.jsonl of `moiety anytime`."
        )
    found = read_json(path)
    page, name = make_page(found), "compare.html" if adapts(found) else "report.html"
    usual = result.with_suffix(".html") if result.is_file() else result / name
    typer.echo(f"The page: {write_atomic(out or usual, page)}")


def make_page(found: Any) -> str:
    """The page of a result, once it is known to be whole."""
    from ..lab.headline import answers
    from ..lab.schema import check_result
    from ..report import audit_page, study_page
    from ..report.adapt import adapt_page
    from ..robust import check_audit

    if isinstance(found, dict) and found.get("kind") == "audit":
        check_audit(found)
        return audit_page(found)
    if adapts(found):
        if "judgement" not in found:
            raise ValueError("only a comparison has a page: moiety adapt --method compare")
        return adapt_page(found)
    check_result(found)
    return study_page(found, answers(found))


def adapts(found: Any) -> bool:
    """Whether a result is one of `moiety adapt`."""
    return isinstance(found, dict) and {"asked", "stages", "flops"} <= found.keys()


def ledger_page(folder: Path) -> str:
    """The page of a stream so far, also while it is being learned from."""
    from ..anytime.ledger import read_ledger
    from ..io import read_json
    from ..report.stream import stream_page

    lines = read_ledger(folder / LEDGER)
    if not lines:
        raise ValueError(f"{folder / LEDGER} is empty: nothing has arrived yet")
    words = read_json(folder / "run.json") if (folder / "run.json").is_file() else {}
    if "test" in words:  # a digest, which says nothing to a reader
        words["test"] = "a test set" if words["test"] else "each arrival, before it is trained on"
    shown = {name: str(value) for name, value in words.items() if value not in (None, {}, [])}
    return stream_page(lines, settings=shown, command=f"moiety report {folder}")
