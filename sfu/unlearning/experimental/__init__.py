"""Methods whose rows need a caveat before they are compared with others.

*Experimental* means that the published method does not carry over to a trained head as it stands: sfu had to make up
what the head lacks (DeltaGrad's training path, EMMN's and GKT's noise in feature space), the row is another way of
training (SISA), or the method undoes itself on affine heads (GKT). Each module says which, and docs/methods.md has the
measurements. The methods are registered, configured and tested like those of :mod:`sfu.unlearning.methods`.
"""
