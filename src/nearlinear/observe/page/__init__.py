"""A plan or a run as one HTML page: `page(Content(title=..., ...))`.

The page is one file that loads nothing: pictures are SVG drawn here, and it can be read without JavaScript, which
adds details under the pointer and a zoom into the timeline.
"""

from nearlinear.observe.page.content import (
    Bar,
    Comparison,
    Content,
    Figure,
    Measured,
    Pace,
    Split,
    Stage,
    Timeline,
)
from nearlinear.observe.page.document import page

__all__ = ["Bar", "Comparison", "Content", "Figure", "Measured", "Pace", "Split", "Stage", "Timeline", "page"]
