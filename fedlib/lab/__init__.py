"""The laboratory that makes the book out of the library: ``pip install '.[lab]'``.

=========================  =======================================================================
folder or module           what belongs there
=========================  =======================================================================
`fedlib.lab.studies`       what each paper's chapter runs, one module a paper
`fedlib.lab.vertical`      attacks, and parties as processes
`fedlib.lab.evidence`      from an experiment to a record, and from records to findings
`fedlib.lab.show`          figures and what a chapter prints
`fedlib.lab.batch`         hundreds of runs, on one machine or many
`fedlib.lab.job`           what a study is given and returns
`fedlib.lab.trials`        what a device is tried with
`fedlib.lab.bench`         how fast the library is, as ratios
`fedlib.lab.gpu`           one command for whoever sits at a GPU
`fedlib.lab.cli`           the command line
=========================  =======================================================================

Imports go down: from the command line to the studies, and from there to the library, which knows
nothing of all this.
"""
