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
    title: str,
    lead: str,
    tables: Sequence[Table],
    pictures: Sequence[Picture],
    findings: Sequence[str] = (),
    *,
    template: str = "report.html.j2",
) -> str:
    """The page's HTML. Text is escaped; the pictures' SVG is ours and is not.

    findings  sentences that stand first, where the template has room for them
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(resources.templates()), undefined=StrictUndefined, autoescape=True, trim_blocks=True
    )
    return templates.get_template(template).render(
        title=title, lead=lead, tables=tables, pictures=pictures, findings=findings
    )
