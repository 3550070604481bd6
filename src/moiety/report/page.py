"""Render a template of this package; the only place that knows jinja2 and plotly's script."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "templates"
# What could end or hide the rest of a script element, as JSON's own escapes.
UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def render(template: str, **values: Any) -> str:
    """Fill a template; every value is escaped, and a name the template lacks raises."""
    # Imported here because a program that makes no page should not pay for it.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def plotly_script() -> str:
    """The source of plotly, or nothing where the extra is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return ""
    return str(get_plotlyjs())


def fingerprint(script: str) -> str:
    """What a policy names to allow this very script and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def data_block(value: Any) -> str:
    """JSON that can stand inside a script element, whatever texts it holds."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).translate(UNSAFE)
