"""fedlib: federated learning as linear algebra on the client axis.

A model copy is a row of a matrix ``theta[copies, P]``. Averaging is a weight row times that
matrix. Everything in this package follows from that one idea.

====================  ============================================================================
folder                what belongs there
====================  ============================================================================
`fedlib.engine`       how rows of ``theta`` learn and mix
`fedlib.datasets`     what there is to learn from, and who holds which part of it
`fedlib.population`   who takes part, how long it takes, and what is sent
`fedlib.papers`       one folder a paper: its algorithm and its theory
`fedlib.lab`          the laboratory that makes the book out of these four
====================  ============================================================================

Imports go down this list's order of need: a folder knows those above it, and never the reverse.
"""

__version__ = "0.1.0"
