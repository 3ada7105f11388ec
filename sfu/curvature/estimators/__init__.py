"""Where the Hessian of the Newton step comes from: one file an estimator, each holding one subclass of ``base``."""
