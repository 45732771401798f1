"""Who takes part in a round, how long everything takes, and what is sent over which link."""
