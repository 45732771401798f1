"""From an experiment to a record, and from records to findings."""
