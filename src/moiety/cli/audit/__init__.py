"""`moiety audit`: what an attacker can do to a model of images, and through which door."""

from __future__ import annotations

import shlex
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer

from ...report.audit import answers, threat
from ...report.audit_routes import eps_text
from ...train import find_device
from ..demo import check_writable


def command(
    model: Annotated[str, typer.Option(help="Folder of a saved model, or its id on the hub.")],
    data: Annotated[str, typer.Option(help="Folder of images by class, or a built-in set.")],
    eps: Annotated[
        str, typer.Option(help="Sizes of the perturbation, of pixels in 0…1; 8/255 is understood.")
    ] = "0,1/255,2/255,4/255,8/255",
    attack: Annotated[
        list[str] | None,
        typer.Option(help="Such as apgd, pgd or fgsm; may be repeated, or a,b. Default: apgd."),
    ] = None,
    norm: Annotated[str, typer.Option(help="linf or l2.")] = "linf",
    steps: Annotated[int | None, typer.Option(min=1, help="Of every attack.")] = None,
    examples: Annotated[int, typer.Option(min=1, help="Test images, drawn by the seed.")] = 100,
    group: Annotated[
        int,
        typer.Option(min=1, help="Images that share a batch and are attacked together."),
    ] = 1,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with data sets.")] = None,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of images, split and attacks.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder of audit.html and audit.json, or an .html file.")
    ] = Path("out/audit"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run only.")] = False,
) -> None:
    """Attack a model of images, and show on one page what breaks, and through which door."""
    from ...data import load_problem
    from ...hf.loading import load_any
    from ...robust import audit
    from .pictures import prepare

    sizes, where = read_eps(eps), find_device(device)
    attacks = [name.strip() for each in attack or ["apgd"] for name in each.split(",")]
    page = out if out.suffix == ".html" else out / "audit.html"
    problem = load_problem(data, data_dir=data_dir, seed=seed)
    loaded = load_any(model)
    given = prepare(loaded, model, problem, examples, seed)
    typer.echo(f"{len(given.y)} test images of {problem.name}, {given.says}.")
    if dry_run:
        typer.echo(f"{', '.join(attacks)} at {', '.join(map(eps_text, sizes))} in {norm}, {device}")
        return
    check_writable(page.parent)  # not before: a folder that is made stays
    repeat = ["--model", model, "--data", data, "--eps", eps, "--norm", norm, "--seed", seed]
    repeat += ["--examples", examples, "--group", group, "--device", device]
    repeat += [word for name in attacks for word in ("--attack", name)]
    repeat += ["--steps", steps] * (steps is not None)
    found = audit(
        loaded.to(where),
        (given.x, given.y),
        sizes,
        attacks,
        steps=steps,
        norm=norm,  # type: ignore[arg-type]  # checked there, with a sentence
        normalize=given.normalize,
        group=group,
        seed=seed,
        name=Path(model).resolve().name,
        data_name=problem.name,
        command=f"moiety audit {shlex.join(map(str, repeat))}",
    )
    tell(found.result, str(found))
    found.to_json(page.with_suffix(".json"))
    typer.echo(f"The page: {found.to_html(page)}")


def read_eps(text: str) -> list[float]:
    """Numbers and fractions with commas between, such as 0,1/255,0.1; in order, each once."""
    found = []
    for word in text.split(","):
        try:
            value = float(Fraction(word.strip()))
        except (ValueError, ZeroDivisionError):
            raise ValueError(
                f"--eps must be numbers such as 0.03 or 8/255 with commas between, not {word!r}"
            ) from None
        if value < 0:
            raise ValueError(f"--eps must not be negative, got {word.strip()}")
        found.append(value)
    return sorted(set(found))


def tell(result: dict[str, Any], table: str) -> None:
    """Print what the attacker was allowed, the table, and the answers."""
    found = threat(result)
    typer.secho(f"{found['label']}: {found['text']}", fg="red" if found["batch"] else None)
    typer.echo(f"\n{table}\n")
    for question, text in answers(result).items():
        typer.echo(f"{question}: {text}")
