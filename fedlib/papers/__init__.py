"""One folder a paper: its algorithm and its theory.

Beside the folders stands what several papers share: `fedavg`, the baseline of them all, and
`bound`, what a theorem returns. Two folders belong to no paper of the book: `methods`, the rivals
that its papers have in common, and `beyond`, ideas of two papers in one.
"""
