"""What each paper's chapter runs: a module a paper, with the studies that its settings name."""
