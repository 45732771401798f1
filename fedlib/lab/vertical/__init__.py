"""What is tried on VFB²: attacks, mitigations, and parties as processes (MPI)."""
