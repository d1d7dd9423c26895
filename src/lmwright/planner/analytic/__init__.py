"""Analytic: memory and time of a run, by arithmetic alone."""
