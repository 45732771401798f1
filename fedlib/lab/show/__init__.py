"""Figures, interactive or still, and what every reproduce notebook prints."""
