"""One file a method; each holds one subclass of :class:`sfu.unlearning.base.UnlearningMethod`."""
