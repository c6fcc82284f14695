"""A self-contained HTML page: no script, no request to anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from micsctl import resources
from micsctl.report.table import Table


@dataclass(frozen=True)
class Picture:
    title: str
    svg: str
    caption: str


def page(
    title: str, lead: str, tables: Sequence[Table], pictures: Sequence[Picture], findings: Sequence[str] = ()
) -> str:
    """The page's HTML. Text is escaped; the pictures' SVG is ours and is not.

    findings  sentences that stand first; with them the page is that of a benchmark
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(resources.templates()), undefined=StrictUndefined, autoescape=True, trim_blocks=True
    )
    template = templates.get_template("bench.html.j2" if findings else "report.html.j2")
    return template.render(title=title, lead=lead, tables=tables, pictures=pictures, findings=findings)
