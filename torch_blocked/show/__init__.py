"""`tb.show`: pictures of how a tensor lies in memory, as text and as SVG."""

from torch_blocked.show.picture import Picture, show

__all__ = ["Picture", "show"]
