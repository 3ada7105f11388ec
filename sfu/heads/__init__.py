"""Classifier heads and their training. A new kind of head is a subclass of :class:`sfu.heads.base.Head` with a name."""

from sfu.registry import add_modules

add_modules("sfu.heads.linear")
add_modules("sfu.heads.linearised")
