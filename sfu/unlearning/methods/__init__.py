"""One file a method; each holds one subclass of :class:`sfu.unlearning.method.UnlearningMethod`."""
