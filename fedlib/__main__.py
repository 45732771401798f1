"""The command line as ``python -m fedlib``."""

from fedlib.cli import main

main()
