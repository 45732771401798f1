"""fedlib: federated learning as linear algebra on the client axis.

A model copy is a row of a matrix ``theta[copies, P]``. Averaging is a weight row times that
matrix. Everything in this package follows from that one idea.

====================  ============================================================================
folder                what belongs there
====================  ============================================================================
`fedlib.engine`       how rows of ``theta`` learn and mix
`fedlib.datasets`     what there is to learn from, and who holds which part of it
`fedlib.population`   who takes part, how long it takes, and what is sent
`fedlib.papers`       one folder a paper: its algorithm, its theory and what its chapter runs
`fedlib.evidence`     from an experiment to a record, and from records to findings
`fedlib.show`         figures and what a chapter prints; nothing below needs it
`fedlib.batch`        hundreds of runs, on one machine or many
====================  ============================================================================

Imports go down this list's order of need: a folder knows those above it, and never the reverse.
"""

__version__ = "0.1.0"
