"""Classifier heads and their training. A new kind of head is a subclass of :class:`sfu.heads.base.Head` with a name."""
