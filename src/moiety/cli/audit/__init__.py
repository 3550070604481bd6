"""`moiety audit`: what an attacker can do to a model of images, and through which door."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from ...report.audit import answers, threat
from ...report.audit_routes import eps_text
from ...train import find_device
from ..demo import check_writable

# By norm: what is small for the largest of all pixels is nothing for the length of all.
EPS = {"linf": "0,1/255,2/255,4/255,8/255", "l2": "0,0.25,0.5,1"}


def command(
    model: Annotated[str, typer.Option(help="Folder of a saved model, or its id on the hub.")],
    data: Annotated[str, typer.Option(help="Folder of images by class, or a built-in set.")],
    eps: Annotated[
        str | None,
        typer.Option(
            help="How far an attack may go, with pixels in 0…1: numbers or fractions such as "
            f"2/255,8/255. Default: {EPS['linf']}, and {EPS['l2']} for l2."
        ),
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            help="fgsm, pgd, apgd, apgd-dlr, apgd-dlr-targeted, random-search, or one that sees "
            "the router, such as 'apgd + router-margin' (also overload, diversity, auxiliary). "
            "May be repeated. Default: apgd."
        ),
    ] = None,
    norm: Annotated[
        str, typer.Option(help="What ε bounds: every pixel (linf), or the length of all (l2).")
    ] = "linf",
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of every attack. Default: its own, pgd 40 and apgd 100."),
    ] = None,
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
    from ...robust import Target, audit, named_attacks
    from ...robust.audit_attacks import check_router_attacks
    from ...robust.noise import check_seed
    from ...robust.parallel import check_group
    from .pictures import check_reads_images, prepare

    if norm not in EPS:
        raise ValueError(f"--norm must be linf or l2, not {norm!r}")
    eps = EPS[norm] if eps is None else eps
    check_seed(seed)
    sizes, where = read_eps(eps, norm), find_device(device)
    words = (name.strip() for each in attack or ["apgd"] for name in each.split(","))
    attacks = list(dict.fromkeys(words))
    known = named_attacks(attacks, steps)
    check_reads_images(model)
    page = out if out.suffix == ".html" else out / "audit.html"
    problem = load_problem(data, data_dir=data_dir, seed=seed)
    loaded = load_any(model)
    given = prepare(loaded, model, problem, examples, seed)
    check_group(group, len(given.y))
    check_router_attacks(known, Target(loaded, normalize=given.normalize), given.x[:1])
    typer.echo(f"{given.says}.")
    if dry_run:
        at = ", ".join(map(eps_text, sizes))
        typer.echo(f"Would run {', '.join(known)} at ε = {at} in {norm} on {device}: {page}")
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
        known,
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


def read_eps(text: str, norm: str) -> list[float]:
    """Numbers and fractions with commas between, such as 0,1/255,0.1; in order, each once."""
    found = []
    for word in map(str.strip, text.split(",")):
        try:
            above, line, below = word.partition("/")
            value = float(above) / (float(below) if line else 1)
        except (ValueError, ZeroDivisionError):
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(
                f"--eps must be numbers such as 0.03 or 8/255 with commas between, not {word!r}"
            )
        if value < 0:
            raise ValueError(f"--eps must not be negative, got {word}")
        if norm == "linf" and value > 1:
            raise ValueError(
                f"--eps {word} is more than a pixel can move, since pixels are in 0…1; steps of "
                "an image of bytes are written 8/255"
            )
        found.append(value)
    if not any(found):
        raise ValueError(f"--eps must hold at least one number above 0, got {text}")
    return sorted(set(found))


def tell(result: dict[str, Any], table: str) -> None:
    """Print what the attacker was allowed, the table, and the answers."""
    found = threat(result)
    typer.secho(f"{found['label']}: {found['text']}", fg="red" if found["batch"] else None)
    typer.echo(f"\n{table}\n")
    for question, text in answers(result).items():
        typer.echo(f"{question}: {text}")
