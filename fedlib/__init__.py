"""fedlib: federated learning as linear algebra on the client axis.

A model copy is a row of a matrix ``theta[copies, P]``. Averaging is a weight row times that
matrix. Everything in this package follows from that one idea.
"""

__version__ = "0.1.0"
